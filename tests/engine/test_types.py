"""Engines whose weights, activations and caches have different types."""

import itertools
from dataclasses import replace

import pytest
import torch

from snapstream import LLM, CacheBudget, SamplingParams
from snapstream.cache import type_name
from snapstream.engine import engine as engine_module
from snapstream.engine.settings import Types, set_up
from snapstream.errors import CacheFileError
from tests.checkpoints import save_checkpoint
from tests.conftest import save_tokenizer

NARROW, WIDE = torch.bfloat16, torch.float32
BUDGET = CacheBudget(sink=4, recent=24, top_k=36, window=8)
PROMPT = [3 + (7 * i * i + i) % 90 for i in range(150)]
SHORT = PROMPT[:20]


@pytest.fixture(scope="module", params=["qwen3", "deepseek-v3"])
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    save_checkpoint(path, request.param, dtype=NARROW)  # the same numbers, whatever they are loaded as
    save_tokenizer(path)
    return str(path)


@pytest.fixture
def engine_with(checkpoint, monkeypatch):
    """Makes engines; no setting of a user mixes types."""

    def make(types, **settings):
        monkeypatch.setattr(engine_module, "set_up", lambda *given: replace(set_up(*given), types=Types(*types)))
        return LLM(checkpoint, budget=BUDGET, max_model_len=512, slots=2, prefill_chunk=64, **settings)

    return make


def logprobs_of(llm, prompt=PROMPT):
    """Log-probabilities of the same tokens, decoded in a compressed cache."""
    forced = SamplingParams(max_tokens=40, forced=tuple(PROMPT[:40]), logprobs=0, ignore_eos=True)
    (output,) = llm.generate([prompt], forced)
    return torch.tensor([one.logprob for one in output.logprobs])


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
@pytest.mark.parametrize("types", [*itertools.product((NARROW, WIDE), repeat=3)][1:-1])
def test_types_may_differ(engine_with, types, attention):
    _, activations, cache = types
    want = logprobs_of(engine_with((WIDE, WIDE, WIDE), attention="sdpa"))
    llm = engine_with(types, attention=attention)
    runner = llm.engine.model_runner
    assert {each.entry_type for each in runner.decoder.layers} == {cache}
    assert {cache.entry_type for lane in runner.prefiller.lanes for cache in lane.caches} == {activations}
    off = (logprobs_of(llm) - want).abs().mean()
    assert off < (0.3 if activations == NARROW else 0.03 if cache == NARROW else 1e-4), off


@pytest.mark.parametrize("types", [(WIDE, WIDE, NARROW), (NARROW, NARROW, WIDE)])
def test_conversations_and_files_keep_the_type_of_caches(engine_with, types, tmp_path):
    llm = engine_with(types, sessions=1)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    outputs = []
    for prompt in (PROMPT, SHORT):
        llm.engine.add_request(prompt, params, past=outputs[-1].saved if outputs else None, keep=True)
        while llm.engine.busy:
            outputs += [output for output in llm.engine.step() if output.finished]
    saved = outputs[-1].saved
    assert {each.entry_type for each in saved.layers} == {types[2]}
    llm.engine.files.save(saved, tmp_path / "file")
    again = llm.engine.files.load(tmp_path / "file")
    for a, b in zip(saved.layers, again.layers, strict=True):
        assert all(torch.equal(x[:, :, : saved.entries], y) for x, y in zip(a.tensors, b.tensors, strict=True))
    with pytest.raises(CacheFileError, match=f"holds {type_name(types[2])}, but caches are {type_name(types[0])}"):
        engine_with((types[0],) * 3, sessions=1).engine.files.load(tmp_path / "file")


def test_the_plan_counts_each_type(engine_with):
    plans = {types: engine_with(types).engine.plan for types in itertools.product((NARROW, WIDE), repeat=3)}
    base = plans[(NARROW, NARROW, NARROW)]
    assert 1.9 < plans[(WIDE, NARROW, NARROW)].weights / base.weights <= 2
    assert plans[(WIDE, NARROW, NARROW)].staging == base.staging
    assert plans[(NARROW, WIDE, NARROW)].staging > base.staging
    assert plans[(NARROW, WIDE, NARROW)].slots == plans[(WIDE, NARROW, NARROW)].slots == base.slots
    assert plans[(NARROW, NARROW, WIDE)].slots == 2 * base.slots
