"""Prompts are read layer by layer: in pieces, for several requests at once, next to others, and broken off anywhere."""

import random

import pytest
import torch

from snapstream import CacheBudget, SamplingParams
from snapstream.config import policy_names
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine.test_engine import BUDGET, greedy, make, naive_generate
from tests.readings import record_readings

OTHERS = [
    CacheBudget(sink=0, recent=24, top_k=24, window=16, pooling="max", kernel=3),
    CacheBudget.of(32),
    CacheBudget.preset("streaming", 40),
    CacheBudget.preset("random", 48),
    CacheBudget.preset("sage-kv", 48),
]


@pytest.mark.parametrize("chunk", [1, 7, 32, 33, 256])
@pytest.mark.parametrize("length", [1, 8, 33, 47, 48, 49, 130])
def test_any_chunk_equals_the_naive_decoder(checkpoint, chunk, length):
    """The window, the sinks and the ends of layers fall everywhere in and between chunks."""
    want = naive_generate(checkpoint, prompt(length), BUDGET, 12)
    assert make(checkpoint, prefill_chunk=chunk).generate(prompt(length), greedy(12))[0].token_ids == want


def test_a_step_never_reads_more_than_a_chunk_of_all_layers(checkpoint, monkeypatch):
    llm = make(checkpoint, slots=2)
    list(zip(range(2), llm.stream(prompt(9), greedy(200)), strict=False))  # somebody decodes all the while
    prefill, sizes = llm.engine.model_runner.prefiller, []
    advance = prefill.advance

    def counting(reading):
        before = reading.layer * len(reading.tokens) + reading.done
        advance(reading)
        sizes[-1] += reading.layer * len(reading.tokens) + reading.done - before

    monkeypatch.setattr(prefill, "advance", counting)
    name = llm.engine.add_request(prompt(150), greedy(30))
    shares = []
    while name in llm.engine.request_ids:
        sizes.append(0)
        llm.engine.step()
        if name in llm.engine.request_ids:
            shares.append(llm.engine.prefill_progress(name)[0])
    layers = llm.engine.spec.layers
    assert max(sizes) <= 32 * layers
    assert sum(sizes) == 150 * layers
    assert shares == sorted(shares)
    assert shares[-1] == 150
    assert 0 < shares[0] < 60


def test_progress_is_a_share_of_the_work(checkpoint):
    """Halfway through the layers is half of the work, and a token at the end of a prompt costs more than one before."""
    llm = make(checkpoint, prefill_chunk=10, max_model_len=256)
    name = llm.engine.add_request(prompt(200), greedy(3))
    halves = []
    while llm.engine.prefill_progress(name)[0] < 200:
        llm.engine.step()
        if not llm.engine.table.readers:
            break
        (prefill,) = llm.engine.table.prefills.values()
        halves.append((prefill.job.layer, prefill.job.done, prefill.job.share))
    at_border = {layer: share for layer, done, share in halves if done == 0}
    for layer, share in at_border.items():
        assert share == pytest.approx(layer / llm.engine.spec.layers)
    middle = next(share for layer, done, share in halves if (layer, done) == (0, 100))
    assert 0.2 < middle * llm.engine.spec.layers < 0.5


def test_all_that_wait_share_a_reading(checkpoint, monkeypatch):
    """More than there are slots, between others, in other sizes; each gets what it gets alone, in its turn."""
    jobs = [(prompt(140), greedy(15))]
    for index, budget in enumerate(OTHERS):
        jobs.append((prompt(140), greedy(20, kv_budget=budget, logprobs=index % 2, return_kept_tokens=index == 2)))
        jobs.append((prompt(20, seed=index), greedy(10)))
    jobs.append((prompt(140), SamplingParams(max_tokens=0, prompt_logprobs=3)))
    jobs.append((prompt(140), greedy(5, prompt_logprobs=1)))
    alone = [make(checkpoint).generate(*job)[0] for job in jobs]
    llm = make(checkpoint, slots=2)
    read = record_readings(llm.engine, monkeypatch)
    got = llm.generate([tokens for tokens, _ in jobs], [params for _, params in jobs])
    assert read == [prompt(140), *(prompt(20, seed=index) for index in range(len(OTHERS)))]
    for one, want in zip(got, alone, strict=True):
        assert one.token_ids == want.token_ids
        assert one.cache == want.cache
        assert one.prompt_logprobs == want.prompt_logprobs


def test_no_more_is_shared_than_memory_was_planned_for(checkpoint, monkeypatch):
    llm = make(checkpoint, slots=1)
    read = record_readings(llm.engine, monkeypatch)
    llm.engine.table.spare = 2 * 48 * llm.engine.plan.bytes_per_token
    want = make(checkpoint).generate(prompt(140), greedy(9))[0].token_ids
    assert [o.token_ids for o in llm.generate([prompt(140)] * 5, greedy(9))] == [want] * 5
    assert len(read) == 2  # one in the slot and two that wait, then the same with the rest


def test_an_abort_leaves_the_reading_to_the_others(checkpoint, monkeypatch):
    want = make(checkpoint).generate(prompt(140), greedy(9))[0].token_ids
    for gone in range(4):
        llm = make(checkpoint, slots=2)
        read = record_readings(llm.engine, monkeypatch)
        names = [llm.engine.add_request(prompt(140), greedy(9)) for _ in range(4)]
        llm.engine.step()
        llm.engine.abort(names[gone])
        outputs = {}
        while llm.engine.busy:
            outputs.update((output.request_id, output) for output in llm.engine.step())
        assert {name: o.token_ids for name, o in outputs.items() if o.finish_reason == "length"} == {
            name: want for name in names if name != names[gone]
        }
        assert len(read) == 1


def test_aborting_all_readers_leaves_no_trace(checkpoint, monkeypatch):
    llm = make(checkpoint, slots=2)
    want = make(checkpoint).generate(prompt(90, seed=4), greedy(20))[0].token_ids
    for steps in range(1, 6):
        names = [llm.engine.add_request(prompt(140), greedy(9)) for _ in range(3)]
        for _ in range(steps):
            llm.engine.step()
        for name in names:
            llm.engine.abort(name)
        assert llm.generate(prompt(90, seed=4), greedy(20))[0].token_ids == want
    assert not llm.engine.table.prefills


def test_an_error_in_a_reading_ends_those_it_was_for(checkpoint, monkeypatch):
    """Who waits behind has a reading of its own."""
    llm = make(checkpoint, slots=1)
    want = llm.generate(prompt(140), greedy(9))[0].token_ids
    prefill = llm.engine.model_runner.prefiller
    compress, calls = prefill._compress, []

    def failing_once(reading):
        calls.append(reading.layer)
        if calls == [0, 1]:
            raise OSError("on purpose")
        compress(reading)

    monkeypatch.setattr(prefill, "_compress", failing_once)
    first, second = llm.generate([prompt(140)] * 2, greedy(9))
    assert (first.finish_reason, first.error) == ("error", "OSError: on purpose")
    assert second.token_ids == want


@pytest.mark.parametrize("place", ["begin", "start"])
def test_an_error_around_a_reading_leaves_nobody_behind(checkpoint, monkeypatch, place):
    llm = make(checkpoint, slots=2)
    want = llm.generate(prompt(140), greedy(9))[0].token_ids
    work, calls = getattr(llm.engine.runner, place), []

    def failing_second(*arguments):
        calls.append(1)
        if len(calls) == (1 if place == "begin" else 2):
            raise MemoryError("on purpose")
        return work(*arguments)

    monkeypatch.setattr(llm.engine.runner, place, failing_second)
    outputs = llm.generate([prompt(140)] * 4, greedy(9))
    # Where there is no memory for those who wait, they have a reading of their own.
    assert {o.finish_reason for o in outputs} == ({"length"} if place == "begin" else {"length", "error"})
    assert all(o.token_ids == want for o in outputs if o.finish_reason == "length")
    assert not llm.engine.busy
    assert llm.generate(prompt(140), greedy(9))[0].token_ids == want


def test_a_free_slot_is_not_written_by_others(checkpoint):
    """Its layers are filled while the other slots decode, greedily or not; a launch must not touch them."""
    rng = random.Random(0)
    jobs = [(prompt(rng.randrange(60, 200), seed=i), greedy(60) if i % 2 else greedy(60, logprobs=1)) for i in range(6)]
    alone = [make(checkpoint).generate(*job)[0].token_ids for job in jobs]
    together = make(checkpoint, slots=3, prefill_chunk=5, decode_steps=1).generate(
        [tokens for tokens, _ in jobs], [params for _, params in jobs]
    )
    assert [o.token_ids for o in together] == alone


@pytest.mark.parametrize("prefixes", [0, 2**22])
@pytest.mark.parametrize("family", ["llama3-gqa", "qwen3-windows", "gemma4-shared", "qwen3.5", "deepseek-v3"])
def test_two_prompts_at_once_do_not_touch_each_other(tmp_path, family, prefixes):
    """Short ones are read between the chunks of long ones; also behind what others have left."""
    save_checkpoint(tmp_path, family)
    save_tokenizer(tmp_path)
    jobs = [(prompt(200, seed=n), greedy(8)) for n in range(2)]
    jobs += [(prompt(12 + n, seed=n), greedy(8, logprobs=1)) for n in range(10)]
    jobs += [(prompt(150, seed=0) + prompt(60, seed=9), greedy(8))]
    alone = [make(tmp_path, slots=1).generate(*job)[0] for job in jobs]
    llm = make(tmp_path, slots=5, prefill_chunk=8, prefix_cache=prefixes)
    assert len(llm.engine.runner.lanes) == 2
    names, both, outputs = [], 0, {}
    while jobs[len(names) :] or llm.engine.busy:
        names += [llm.engine.add_request(*job) for job in jobs[len(names) : len(names) + 1]]
        outputs.update((output.request_id, output) for output in llm.engine.step())
        both += len(llm.engine.table.prefills) == 2
    assert both > 3
    for name, want in zip(names, alone, strict=True):
        assert outputs[name].token_ids == want.token_ids
    assert bool(outputs[names[-1]].reused) == bool(prefixes)


@pytest.mark.parametrize("policy", policy_names())
def test_reading_for_a_second_policy_changes_nothing(checkpoint, policy):
    budget = CacheBudget.preset(policy, 48)
    llm = make(checkpoint, slots=3)
    one, other = llm.generate([prompt(140)] * 2, [greedy(9, kv_budget=budget), greedy(9)])
    assert one.token_ids == llm.generate(prompt(140), greedy(9, kv_budget=budget))[0].token_ids
    assert other.token_ids == llm.generate(prompt(140), greedy(9))[0].token_ids


def test_a_model_of_one_layer(tmp_path):
    """Whose only layer is the first and the last: an answer is the same whether the prompt is scored or not."""
    peer = save_checkpoint(tmp_path, "qwen3", num_hidden_layers=1)
    save_tokenizer(tmp_path)
    llm = make(tmp_path, budget=None, prefill_chunk=32)
    for length in (20, 70):
        tokens = prompt(length, seed=length)
        with torch.no_grad():
            want = peer(torch.tensor([tokens])).logits[0, -1].log_softmax(-1).max()
        for params in (greedy(1, prompt_logprobs=1, logprobs=1), greedy(1, logprobs=1)):
            assert llm.generate(tokens, params)[0].logprobs[0].logprob == pytest.approx(float(want), abs=1e-3)


def test_staging_holds_one_layer(checkpoint):
    """Of the prompt, and nothing else grows with it but hidden states."""
    llm = make(checkpoint, max_model_len=1024, prefill_chunk=32)
    prefill, spec = llm.engine.model_runner.prefiller, llm.engine.spec
    size = spec.hidden_size * 4
    for lane, entries in zip(prefill.lanes, (1024, 128), strict=True):
        assert lane.caches[0].nbytes == entries * spec.entry.nbytes(torch.float32)
        held = [value for value in vars(lane).values() if isinstance(value, torch.Tensor)]
        size += sum(tensor.nbytes for tensor in (*lane.caches[0].tensors, *lane.packed, *held))
    assert size - 3 * 8 <= llm.engine.plan.staging
    assert size > 0.99 * llm.engine.plan.staging
