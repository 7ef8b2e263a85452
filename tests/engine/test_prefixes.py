"""Beginnings that prompts have in common: answers with and without, to the bit, and what is kept."""

import random

import pytest
import torch

from snapstream import CacheBudget, ConfigurationError, SamplingParams
from snapstream.cache import LayerCache
from snapstream.engine.prefill.prefix_cache import Prefix, Prefixes
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine.test_conversation import run
from tests.engine.test_engine import make

CHUNK = 32  # of make()


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
    sharing = make(checkpoint, budget=budget, sessions=1, max_model_len=400, prefix_contexts=2, **settings)
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
            telemetry=rng.random() < 0.5,
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
        assert len(sharing.engine.model_runner.prefixes) <= 2
        assert sharing.engine.model_runner.prefixes.nbytes <= sharing.engine.plan.prefixes
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


def test_the_second_prompt_keeps_what_the_third_goes_on_behind(checkpoint):
    llm = make(checkpoint, prefix_contexts=2)
    params, begins = SamplingParams(max_tokens=2, ignore_eos=True), prompt(100)
    found = [run(llm, begins + prompt(40, seed=n), params).reused for n in range(1, 5)]
    assert found == [0, 0, 64, 64]
    assert run(llm, begins, params).reused == 32  # the last 64 queries vote, and have to be known
    assert run(llm, begins[:70] + prompt(60, seed=9), params).reused == 64
    assert run(llm, begins[:31] + prompt(60, seed=9), params).reused == 0


def test_prompts_that_wait_together_are_seen_at_once(checkpoint):
    llm = make(checkpoint, slots=1, prefix_contexts=1)
    begins = prompt(100)
    outputs = llm.generate([begins + prompt(40, seed=n) for n in range(4)], SamplingParams(max_tokens=2))
    assert [output.reused for output in outputs] == [0, 64, 64, 64]


def test_equal_prompts_that_wait_together_are_read_once_and_nothing_is_kept(checkpoint):
    llm = make(checkpoint, prefix_contexts=1)
    outputs = llm.generate([prompt(100)] * 3, SamplingParams(max_tokens=2))
    assert [output.reused for output in outputs] == [0, 0, 0]
    assert not len(llm.engine.model_runner.prefixes)


def test_what_is_scored_or_goes_on_is_read_as_a_whole(checkpoint):
    llm = make(checkpoint, prefix_contexts=1, sessions=1)
    begins = prompt(100)
    for n in range(3):
        run(llm, begins + prompt(40, seed=n), SamplingParams(max_tokens=2))
    tokens = begins + prompt(40, seed=5)
    scored = run(llm, tokens, SamplingParams(max_tokens=2, prompt_logprobs=1), keep=True)
    assert scored.reused == 0
    assert scored.prompt_logprobs == run(make(checkpoint), tokens, SamplingParams(prompt_logprobs=1)).prompt_logprobs
    assert run(llm, tokens[:110], SamplingParams(max_tokens=2), past=scored.saved).reused == 0


def test_a_reading_that_ends_early_keeps_nothing(checkpoint):
    llm = make(checkpoint, prefix_contexts=1)
    begins = prompt(200)
    run(llm, begins, SamplingParams(max_tokens=1))
    name = llm.engine.add_request(begins + prompt(40, seed=1), SamplingParams(max_tokens=1))
    llm.engine.step()
    llm.engine.abort(name)
    llm.engine.step()
    assert not len(llm.engine.model_runner.prefixes)
    assert run(llm, begins + prompt(40, seed=2), SamplingParams(max_tokens=1)).reused == 0
    assert run(llm, begins + prompt(40, seed=3), SamplingParams(max_tokens=1)).reused == 160


def test_the_one_used_longest_ago_makes_room():
    prefixes = Prefixes(2, 4)
    for first in (1, 2, 3):
        prefixes.keep(Prefix([first] * 8))
        prefixes.find([1] * 20, 16)
    assert prefixes.find([2] * 20, 16) is None
    assert prefixes.find([1] * 20, 16)[1:] == (8, 8)
    assert prefixes.find([1] * 20, 7)[1:] == (4, 8)
    assert prefixes.find([1] * 20, 3) is None
    prefixes.keep(Prefix([1] * 12))  # instead of what it begins with
    prefixes.keep(Prefix([1] * 4))  # which is known
    assert len(prefixes) == 2
    assert prefixes.find([1] * 20, 16)[1:] == (12, 12)


def test_states_go_with_whole_beginnings():
    """Shorter ones are not replaced, and remain in use together with those that begin with them."""
    prefixes = Prefixes(3, 4, only_whole=True)
    for prefix in ([1] * 4, [1] * 12, [1] * 12, [2] * 8):
        prefixes.keep(Prefix(prefix))
    assert len(prefixes) == 3
    assert prefixes.find([1] * 20, 16)[1:] == (12, 12)
    assert prefixes.find([1] * 20, 11)[1:] == (4, 4)
    assert prefixes.find([1] * 11 + [3] * 9, 16)[1:] == (4, 4)
    assert prefixes.find([1] * 20, 16)[1:] == (12, 12)
    prefixes.keep(Prefix([3] * 4))
    assert prefixes.find([2] * 20, 16) is None
    assert prefixes.find([1] * 11 + [3] * 9, 16)[1:] == (4, 4)
    assert prefixes.worth_keeping([5] * 20, [[5] * 20], 0, 13) == 12


def test_a_prompt_that_comes_again_reuses_states(tmp_path):
    save_checkpoint(tmp_path, "qwen3.5")
    save_tokenizer(tmp_path)
    llm, params = make(tmp_path, prefix_contexts=2), SamplingParams(max_tokens=1)
    found = [run(llm, prompt(150), params).reused for _ in range(4)]
    assert found == [0, 0, 64, 64]
    assert len(llm.engine.model_runner.prefixes) == 1


def test_a_known_beginning_is_not_kept_again(checkpoint):
    """Also if not all of it can be left out, as the last tokens vote."""
    llm = make(checkpoint, prefix_contexts=2)
    params, begins = SamplingParams(max_tokens=1), prompt(96)
    for n in range(3):
        run(llm, begins + prompt(40, seed=n), params)
    kept = llm.engine.model_runner.prefixes._kept
    before = [id(prefix) for prefix in kept]
    for n in range(3):
        assert run(llm, begins + prompt(5, seed=n), params).reused == 32
    assert [id(prefix) for prefix in llm.engine.model_runner.prefixes._kept] == before


def test_only_what_will_be_read_is_compared(checkpoint):
    llm = make(checkpoint, slots=1, prefix_contexts=1, sessions=1)
    begins = prompt(100)
    saved = run(llm, prompt(20, seed=9), SamplingParams(max_tokens=1), keep=True).saved
    names = [llm.engine.add_request(begins + prompt(9, seed=1), SamplingParams(max_tokens=1))]
    names.append(llm.engine.add_request(begins, SamplingParams(max_tokens=1), past=saved))
    names.append(llm.engine.add_request([*begins, 5], SamplingParams(max_tokens=1, prompt_logprobs=0)))
    while llm.engine.busy:
        llm.engine.step()
    assert not len(llm.engine.model_runner.prefixes)


def test_too_little_memory_for_a_beginning_fails_nobody(checkpoint, monkeypatch, caplog):
    llm = make(checkpoint, prefix_contexts=1)
    begins = prompt(100)
    expected = [run(make(checkpoint), begins + prompt(9, seed=n), SamplingParams(max_tokens=5)).text for n in range(3)]

    def full(self, entries):
        raise MemoryError

    monkeypatch.setattr(LayerCache, "to_host", full)
    made = [run(llm, begins + prompt(9, seed=n), SamplingParams(max_tokens=5)) for n in range(3)]
    assert [output.text for output in made] == expected
    assert not len(llm.engine.model_runner.prefixes)
    assert "could not be cached" in caplog.text


def test_policies_that_look_at_all_queries_have_use_for_none(checkpoint):
    llm = make(checkpoint, prefix_contexts=1, kept_queries=-1)
    for n in range(3):
        assert run(llm, prompt(100) + prompt(9, seed=n), SamplingParams(max_tokens=1)).reused == 0
    assert not len(llm.engine.model_runner.prefixes)


def test_settings():
    with pytest.raises(ConfigurationError, match="prefix_contexts is -1"):
        make("task-model", prefix_contexts=-1)
    with pytest.raises(ConfigurationError, match="leave one of them out"):
        make("task-model-mla", prefix_contexts=1, speculative="mtp")
