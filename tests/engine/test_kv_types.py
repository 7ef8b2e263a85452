"""Engines whose cache entries are codes of 8 or 4 bits."""

from dataclasses import replace

import pytest
import torch

from snapstream import LLM, CacheBudget, SamplingParams
from snapstream.cache import QuantizedCache, type_name
from snapstream.errors import CacheFileError
from tests.checkpoints import save_checkpoint
from tests.conftest import CODED, save_coded, save_tokenizer
from tests.integrity import check_integrity

BUDGET = CacheBudget(sink=4, recent=24, top_k=36, window=8)
KINDS = ("int8", "int4", "int8/int4", "int4/int8")
PROMPT = [3 + (7 * i * i + i) % 90 for i in range(150)]
PROMPTS = [PROMPT, PROMPT[:20], PROMPT[30:130], [5]]


@pytest.fixture(scope="module", params=CODED)
def checkpoint(request, tmp_path_factory):
    return save_coded(tmp_path_factory, request.param)


def make(checkpoint, **settings):
    given = {"budget": BUDGET, "max_model_len": 512, "slots": 2, "prefill_chunk": 64, "dtype": "float32"}
    return LLM(checkpoint, **(given | {"report_plan": lambda plan: None} | settings))


def used(kind, checkpoint):
    """Latents have no values of their own."""
    return kind.split("/")[0] if "deepseek" in checkpoint else kind


def logprobs_of(llm, prompt=PROMPT):
    """Log-probabilities of the same tokens, decoded in a compressed cache."""
    forced = SamplingParams(max_tokens=40, forced=tuple(PROMPT[:40]), logprobs=0, ignore_eos=True)
    (output,) = llm.generate([prompt], forced)
    return torch.tensor([one.logprob for one in output.logprobs])


def greedy(llm, prompts=PROMPTS, tokens=24):
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    return [output.token_ids for output in llm.generate(prompts, params)]


@pytest.mark.parametrize("kind", KINDS)
def test_answers_are_close_to_those_of_float32(checkpoint, kind):
    """Random models are sharp and react to everything. Kernels also round queries and weights, and lose little more."""
    want, off = logprobs_of(make(checkpoint)), {}
    for attention in ("auto", "sdpa"):
        llm = make(checkpoint, kv_dtype=kind, attention=attention)
        entries = [one for one in llm.engine.model_runner.decoder.layers if isinstance(one, QuantizedCache)]
        assert entries
        assert {type_name(one.entry_type) for one in entries} == {used(kind, checkpoint)}
        off[attention] = (logprobs_of(llm) - want).abs().mean()
        check_integrity(llm.engine)
    assert 0 < off["sdpa"] < (0.1 if kind == "int8" else 1), off
    assert off["auto"] < 1.3 * off["sdpa"] + 0.01, off


@pytest.mark.parametrize("kind", KINDS)
def test_neighbors_threads_and_guesses_change_nothing(checkpoint, kind):
    llm = make(checkpoint, kv_dtype=kind)
    alone = [greedy(llm, [prompt])[0] for prompt in PROMPTS]
    assert greedy(llm) == alone
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        assert greedy(llm) == alone
    finally:
        torch.set_num_threads(threads)
    assert greedy(make(checkpoint, kv_dtype=kind, speculative="lookup")) == alone


@pytest.mark.parametrize("kind", KINDS)
def test_conversations_and_files(checkpoint, kind, tmp_path):
    llm = make(checkpoint, kv_dtype=kind, sessions=2)
    params, outputs = SamplingParams(max_tokens=8, ignore_eos=True), []
    for prompt in (PROMPT, PROMPT[:20], PROMPT[50:120]):
        llm.engine.add_request(prompt, params, past=outputs[-1].saved if outputs else None, keep=True)
        while llm.engine.busy:
            outputs += [output for output in llm.engine.step() if output.finished]
    saved = outputs[-1].saved
    saved.check_integrity()
    assert type_name(saved.entry_type) == used(kind, checkpoint)
    llm.engine.files.save(saved, tmp_path / "file")
    again = llm.engine.files.load(tmp_path / "file")
    for mine, theirs in zip(saved.layers, again.layers, strict=True):
        pairs = zip(mine.first(mine.entries).tensors, theirs.tensors, strict=True)
        assert all(torch.equal(a[:, :, : b.shape[2]], b) for a, b in pairs)
    answers = []
    for past in (saved, again):
        llm.engine.add_request(PROMPT[:30], params, past=past)
        while llm.engine.busy:
            answers += [output.token_ids for output in llm.engine.step() if output.finished]
    assert answers[0] == answers[1]
    with pytest.raises(CacheFileError, match=f"holds {used(kind, checkpoint)}, but caches are float32 here"):
        make(checkpoint, sessions=1).engine.files.load(tmp_path / "file")


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_frame_stays_for_a_conversation(checkpoint, kind):
    """So entries that are kept in every turn do not get worse from turn to turn."""
    llm = make(checkpoint, kv_dtype=kind, sessions=2, budget=CacheBudget.of(400))
    past, first = None, None
    for turn in range(6):
        llm.engine.add_request(
            PROMPT if past is None else [7 + turn], SamplingParams(max_tokens=0), past=past, keep=True
        )
        while llm.engine.busy:
            for output in llm.engine.step():
                past = output.saved if output.finished else past
        numbers = [
            one.first(60).converted(torch.float32).tensors for one in past.layers if isinstance(one, QuantizedCache)
        ]
        first = first or numbers
    for mine, theirs in zip(first, numbers, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            if a.shape == b.shape and a.shape[2] == 60:
                assert (a - b).norm() < 2e-3 * a.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_a_cached_prefix_changes_nothing(checkpoint, kind):
    """Staging has the type of activations, so what is read again is what was read before."""
    llm = make(checkpoint, kv_dtype=kind, prefix_cache=2**24)
    want = greedy(llm, [PROMPT])
    assert greedy(llm, [PROMPT]) == want
    assert greedy(make(checkpoint, kv_dtype=kind, prefix_cache=0), [PROMPT]) == want


@pytest.mark.parametrize("kind", ["int8", "int8/int4"])
def test_a_prefix_cache_of_codes(checkpoint, kind, tmp_path):
    """It holds less, survives a restart, and what is computed from it is close to what it would have been."""
    budget = replace(BUDGET, policy="snapstream")  # one list of votes, which no rounding turns over here
    settings = {"prefix_dir": str(tmp_path), "prefix_cache": 2**24, "budget": budget}
    want = logprobs_of(make(checkpoint, prefix_cache=0, budget=budget))
    exact = make(checkpoint, prefix_cache=2**24, budget=budget)
    logprobs_of(exact)
    llm = make(checkpoint, prefix_kv_dtype=kind, **settings)
    first, again = logprobs_of(llm), logprobs_of(llm)
    assert torch.equal(first, want)
    assert 0 < (again - want).abs().mean() < (0.1 if kind == "int8" else 1)
    assert llm.engine.prefix_bytes < exact.engine.prefix_bytes
    llm.close()
    restarted = make(checkpoint, prefix_kv_dtype=kind, **settings)
    assert torch.equal(logprobs_of(restarted), again)
    restarted.close()
    other = make(checkpoint, **settings)  # its entries are of another type
    assert torch.equal(logprobs_of(other), want)


@pytest.mark.parametrize("kind", KINDS)
def test_places_are_renewed(checkpoint, kind):
    budget = CacheBudget(sink=4, recent=24, top_k=36, window=8, ring="resnap")
    llm = make(checkpoint, kv_dtype=kind, budget=budget)
    alone = greedy(llm, [PROMPT], 120)
    assert greedy(llm, [PROMPT, PROMPT[:40]], 120)[0] == alone[0]
    check_integrity(llm.engine)


def test_the_plan_is_what_is_allocated(checkpoint):
    plans = {}
    for kind in ("auto", *KINDS):
        engine = make(checkpoint, kv_dtype=kind, sessions=1).engine
        assert engine.plan.slots == engine.model_runner.decoder.slot_bytes
        plans[kind] = engine.plan
    assert all(plans[kind].slots < plans["auto"].slots for kind in KINDS)
    assert plans["int4"].slots < plans["int8/int4"].slots <= plans["int8"].slots


def test_a_draft_model_has_the_same_entries(tmp_path):
    for name in ("target", "drafter"):
        save_checkpoint(tmp_path / name, "qwen3", head_dim=32)
        save_tokenizer(tmp_path / name)
    settings = {"kv_dtype": "int8", "prefix_cache": 0}
    want = greedy(make(str(tmp_path / "target"), **settings))
    drafted = make(
        str(tmp_path / "target"), speculative="draft-model", draft_model=str(tmp_path / "drafter"), **settings
    )
    assert greedy(drafted) == want
