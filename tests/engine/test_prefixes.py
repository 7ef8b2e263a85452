"""Beginnings that prompts have in common: answers with and without, to the bit, and what is kept."""

import random

import pytest
import torch

from snapstream import LLM, CacheBudget, ConfigurationError, SamplingParams
from snapstream.cache import LayerCache
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine.test_conversation import run
from tests.engine.test_engine import greedy, make

CHUNK = 32  # of make()
CACHED = 2**21


def budgets():
    return [
        None,
        CacheBudget(sink=4, recent=24, top_k=20, window=8, kernel=5),
        CacheBudget(sink=0, recent=16, top_k=9, window=16, kernel=1, ring="paper", pooling="max"),
    ]


def check_equal(checkpoint, seed, budget, **settings):
    """The same requests, alone on an engine that keeps nothing, and one after the other on one that does."""
    rng = random.Random(seed)
    plain = make(checkpoint, budget=budget, sessions=1, max_model_len=400, **settings)
    sharing = make(checkpoint, budget=budget, sessions=1, max_model_len=400, prefix_cache=CACHED, **settings)
    beginnings = [prompt(rng.randrange(100, 250), seed=seed * 100 + n) for n in range(3)]
    reused = 0
    for number in range(10):
        whole = rng.choice(beginnings)
        tokens = whole[: rng.randrange(len(whole) // 2, len(whole) + 1)] + prompt(rng.randrange(1, 80), seed=number)
        params = SamplingParams(
            max_tokens=6,
            ignore_eos=True,
            temperature=rng.choice([0.0, 1.0]),
            seed=number,
            logprobs=3,
            return_kept_tokens=rng.random() < 0.5,
            kv_budget=None if budget is None or rng.random() < 0.7 else 25,
        )
        ours, theirs = (run(llm, tokens, params, keep=True) for llm in (sharing, plain))
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == theirs.logprobs
        assert ours.cache == theirs.cache
        for mine, other in zip(ours.saved.layers, theirs.saved.layers, strict=True):
            assert all(map(torch.equal, mine.tensors, other.tensors))
        assert theirs.reused == 0
        assert ours.reused % CHUNK == 0
        reused += ours.reused
        assert 0 < sharing.engine.model_runner.prefixes.store.nbytes <= CACHED == sharing.engine.plan.prefixes
    return reused


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("budget", budgets(), ids=["full", "elastic", "paper"])
def test_answers_are_the_same_to_the_bit(checkpoint, seed, budget):
    assert check_equal(checkpoint, seed, budget) > 0


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3", "qwen3.5"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_other_families(tmp_path, family, dtype):
    save_checkpoint(tmp_path, family)
    save_tokenizer(tmp_path)
    assert check_equal(tmp_path, 1, budgets()[1], dtype=dtype) > 0


def test_guesses_change_nothing(checkpoint):
    assert check_equal(checkpoint, 2, budgets()[1], speculative="lookup") > 0


def test_blocks_may_be_smaller_than_chunks(tmp_path):
    """With weights in blocks: what a prompt goes on behind ends anywhere in a chunk."""
    save_checkpoint(tmp_path, "llama3-gqa", head_dim=32)
    save_tokenizer(tmp_path)
    options = {"max_model_len": 600, "prefill_chunk": 128, "weights": "q8_0"}
    plain, sharing = make(tmp_path, **options), make(tmp_path, prefix_cache=CACHED, **options)
    assert sharing.engine.model_runner.prefiller.takes_rows_alone
    params, tokens, found = greedy(5, logprobs=3), prompt(200), []
    for turn in range(6):
        ours, theirs = (run(llm, tokens, params) for llm in (sharing, plain))
        assert (ours.token_ids, ours.logprobs, ours.cache) == (theirs.token_ids, theirs.logprobs, theirs.cache)
        found.append(ours.reused)
        tokens = tokens + prompt(50, seed=turn)
    # All but what the voters see, 64 tokens at least, in blocks of 64 tokens.
    assert found == [0, 128, 192, 256, 320, 384]
    kept = sharing.engine.model_runner.prefixes.store.all()
    # Four pieces of a chunk, and what was the last one of each turn.
    assert sorted(len(each.sequence.tokens) for each in kept) == [64, 64, 64, 128, 128, 128]


def test_the_next_prompt_goes_on_behind_what_the_first_has_left(checkpoint):
    llm = make(checkpoint, prefix_cache=CACHED)
    params, begins = SamplingParams(max_tokens=2, ignore_eos=True), prompt(100)
    found = [run(llm, begins + prompt(40, seed=n), params).reused for n in range(1, 5)]
    assert found == [0, 64, 64, 64]
    assert run(llm, begins, params).reused == 32  # the last 64 queries vote, and have to be known
    assert run(llm, begins[:70] + prompt(60, seed=9), params).reused == 64
    assert run(llm, begins[:31] + prompt(60, seed=9), params).reused == 0


def test_a_conversation_that_grows_reads_only_what_is_new(checkpoint):
    llm = make(checkpoint, prefix_cache=CACHED, max_model_len=1000)
    tokens = prompt(300)
    for turn in range(8):
        output = run(llm, tokens, greedy(10))
        assert (output.reused > 0) == (turn > 0)
        assert not turn or len(tokens) - output.reused <= 64 + 40 + CHUNK
        tokens = tokens + list(output.token_ids) + prompt(30, seed=turn)


def test_equal_prompts_that_wait_together_are_read_once(checkpoint):
    llm = make(checkpoint, prefix_cache=CACHED)
    outputs = llm.generate([prompt(100)] * 3, SamplingParams(max_tokens=2))
    assert [output.reused for output in outputs] == [0, 0, 0]


def test_who_has_another_salt_finds_nothing(checkpoint):
    llm = make(checkpoint, prefix_cache=CACHED)

    def reused(salt):
        name = llm.engine.add_request(prompt(150), SamplingParams(max_tokens=1), salt=salt)
        return [output for output in iter_until_done(llm) if output.request_id == name][-1].reused

    assert [reused("a"), reused("b"), reused("a"), reused("b"), reused("")] == [0, 0, 64, 64, 0]


def iter_until_done(llm):
    while llm.engine.busy:
        yield from llm.engine.step()


def test_what_is_scored_or_goes_on_is_read_as_a_whole(checkpoint):
    llm = make(checkpoint, prefix_cache=CACHED, sessions=1)
    begins = prompt(100)
    for n in range(3):
        run(llm, begins + prompt(40, seed=n), SamplingParams(max_tokens=2))
    tokens = begins + prompt(40, seed=5)
    scored = run(llm, tokens, SamplingParams(max_tokens=2, prompt_logprobs=1), keep=True)
    assert scored.reused == 0
    assert scored.prompt_logprobs == run(make(checkpoint), tokens, SamplingParams(prompt_logprobs=1)).prompt_logprobs
    assert run(llm, tokens[:110], SamplingParams(max_tokens=2), past=scored.saved).reused == 0


def test_a_prefill_that_ends_early_keeps_nothing(checkpoint):
    llm = make(checkpoint, prefix_cache=CACHED)
    begins = prompt(200)
    name = llm.engine.add_request(begins, SamplingParams(max_tokens=1))
    llm.engine.step()
    llm.engine.abort(name)
    llm.engine.step()
    assert not len(llm.engine.model_runner.prefixes.store)
    assert run(llm, begins + prompt(40, seed=2), SamplingParams(max_tokens=1)).reused == 0
    assert run(llm, begins + prompt(40, seed=3), SamplingParams(max_tokens=1)).reused == 160


def test_the_memory_is_bounded_and_the_one_used_longest_ago_goes(checkpoint):
    """A prompt of 160 tokens takes 5 pieces; there is room for 8."""
    params = SamplingParams(max_tokens=1)
    llm = make(checkpoint)
    piece = CHUNK * llm.engine.plan.bytes_per_token
    llm = make(checkpoint, prefix_cache=8 * piece)
    for seed in (1, 2, 3):
        run(llm, prompt(160, seed=seed), params)
        assert llm.engine.model_runner.prefixes.store.nbytes <= 8 * piece
    # The end of the second one is gone, and its beginning is there.
    assert run(llm, prompt(160, seed=3), params).reused == 96
    assert 0 < run(llm, prompt(160, seed=2), params).reused <= 96
    assert run(llm, prompt(160, seed=1), params).reused == 0
    # Of a prompt that is larger than all of it, the beginning is kept.
    small = make(checkpoint, prefix_cache=3 * piece)
    assert [run(small, prompt(200), params).reused for _ in range(3)] == [0, 96, 96]
    assert small.engine.model_runner.prefixes.store.nbytes == 3 * piece


@pytest.mark.parametrize("family", ["llama3-gqa", "qwen3-windows", "deepseek-v3", "qwen3.5"])
def test_a_restart_goes_on_with_what_is_on_the_disk(tmp_path, family):
    save_checkpoint(tmp_path / "model", family)
    save_tokenizer(tmp_path / "model")
    params, tokens = greedy(6, logprobs=2), prompt(200)
    want = run(make(tmp_path / "model"), tokens, params)
    options = {"prefix_cache": CACHED, "prefix_dir": str(tmp_path / "kept")}
    first = make(tmp_path / "model", **options)
    run(first, tokens, params)
    first.close()
    second = make(tmp_path / "model", **options)
    got = run(second, tokens, params)
    assert got.reused == 128
    assert (got.token_ids, got.logprobs) == (want.token_ids, want.logprobs)
    for path in (tmp_path / "kept").iterdir():
        path.write_bytes(path.read_bytes()[:-3])
    third = make(tmp_path / "model", **options)
    got = run(third, tokens, params)
    assert got.reused == 0
    assert (got.token_ids, got.logprobs) == (want.token_ids, want.logprobs)


def test_what_does_not_fit_goes_to_the_disk_and_comes_back(checkpoint, tmp_path):
    params = SamplingParams(max_tokens=1)
    piece = CHUNK * make(checkpoint).engine.plan.bytes_per_token
    llm = make(checkpoint, prefix_cache=20 * piece, prefix_dir=str(tmp_path))
    store = llm.engine.model_runner.prefixes.store
    for seed in range(9):
        run(llm, prompt(160, seed=seed), params)
        store.flush()
    assert [run(llm, prompt(160, seed=seed), params).reused for seed in range(9)] == [96] * 9
    assert store.nbytes <= 20 * piece


def test_states_go_with_whole_pieces(tmp_path):
    save_checkpoint(tmp_path, "qwen3.5")
    save_tokenizer(tmp_path)
    llm, params = make(tmp_path, prefix_cache=CACHED), SamplingParams(max_tokens=1)
    found = [run(llm, prompt(150), params).reused for _ in range(3)]
    assert found == [0, 64, 64]
    assert run(llm, prompt(97) + prompt(80, seed=1), params).reused == 96


def test_a_known_beginning_is_not_kept_again(checkpoint):
    """Also if not all of it can be left out, as the last tokens vote."""
    llm = make(checkpoint, prefix_cache=CACHED)
    params, begins = SamplingParams(max_tokens=1), prompt(96)
    run(llm, begins, params)
    before = {id(each.sequence) for each in llm.engine.model_runner.prefixes.store.all()}
    for n in range(3):
        assert run(llm, begins + prompt(5, seed=n), params).reused == 32
    assert {id(each.sequence) for each in llm.engine.model_runner.prefixes.store.all()} == before


def test_too_little_memory_for_a_beginning_fails_nobody(checkpoint, monkeypatch, caplog):
    llm = make(checkpoint, prefix_cache=CACHED)
    begins = prompt(100)
    expected = [run(make(checkpoint), begins + prompt(9, seed=n), SamplingParams(max_tokens=5)).text for n in range(3)]

    def full(self, *given):
        raise MemoryError

    monkeypatch.setattr(LayerCache, "copy_to", full)
    made = [run(llm, begins + prompt(9, seed=n), SamplingParams(max_tokens=5)) for n in range(3)]
    assert [output.text for output in made] == expected
    assert not len(llm.engine.model_runner.prefixes.store)
    assert "could not be cached" in caplog.text


def test_policies_that_look_at_all_queries_have_use_for_none(checkpoint):
    llm = make(checkpoint, prefix_cache=CACHED, kept_queries=-1)
    assert llm.engine.model_runner.prefixes is None
    assert run(llm, prompt(100) + prompt(9), SamplingParams(max_tokens=1)).reused == 0


def test_it_is_on_by_default_within_what_is_left(checkpoint):
    options = {"max_model_len": 256, "slots": 3, "enforce_eager": True}
    llm = LLM(str(checkpoint), **options)
    assert llm.engine.plan.prefixes == 3 * 256 * llm.engine.plan.bytes_per_token
    assert LLM(str(checkpoint), prefix_cache=0, **options).engine.model_runner.prefixes is None
    assert LLM(str(checkpoint), prefix_cache="1MiB", **options).engine.plan.prefixes == 2**20
    assert LLM(str(checkpoint), prefix_contexts=1, **options).engine.plan.prefixes == (
        2 * 256 * llm.engine.plan.bytes_per_token
    )


def test_settings(tmp_path):
    for settings, message in (
        ({"prefix_contexts": -1}, "prefix_contexts is -1"),
        ({"prefix_cache": -1}, "prefix_cache is -1"),
        ({"prefix_cache": "2 apples"}, "'2 apples' is not a size"),
        ({"prefix_cache": 1.5}, "prefix_cache is 1.5"),
        ({"prefix_disk": "1GiB"}, "prefix_disk is '1GiB'"),
        ({"context_bytes": "1GiB"}, "context_bytes is '1GiB'"),
        ({"sessions": None}, "sessions is None"),
        ({"sessions": "many"}, "'many' is not a size"),
        ({"prefix_cache": 0, "prefix_dir": str(tmp_path)}, "the prefix cache is off"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            make("task-model", **settings)
    with pytest.raises(ConfigurationError, match="leave one of them out"):
        make("task-model-mla", prefix_contexts=1, speculative="mtp")
    assert (
        make("task-model-mla", budget=None, speculative="mtp", prefix_cache=None).engine.model_runner.prefixes is None
    )
