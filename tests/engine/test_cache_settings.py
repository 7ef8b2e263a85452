"""Budgets in bytes: how many entries, and of which type."""

import pytest
import torch

from snapstream import LLM, CacheBudget, EngineConfig, MemoryBudget, SamplingParams
from snapstream.cache import type_name
from snapstream.engine.memory.planner import plan_engine
from snapstream.engine.settings import set_up
from snapstream.errors import ConfigurationError, MemoryPlanError
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import CODED, save_coded


@pytest.fixture(scope="module", params=CODED)
def checkpoint(request, tmp_path_factory):
    return save_coded(tmp_path_factory, request.param)


def setup(checkpoint, budget, **settings):
    return set_up(str(checkpoint), budget, EngineConfig(**({"max_model_len": 512, "dtype": "float32"} | settings)))


def sizes(made, entries):
    return made.spec.sizes(made.types.cache).of([group.entries(entries) for group in made.spec.groups])


@pytest.mark.parametrize("kind", ["auto", "float32", "int8", "int4"])
def test_as_many_entries_as_fit(checkpoint, kind):
    """And not one more."""
    whole = sizes(setup(checkpoint, None, kv_dtype=kind), 512)
    fixed = sizes(setup(checkpoint, None, kv_dtype=kind), 0)
    for share in (0.2, 0.5, 0.9, 0.999):
        nbytes = int(fixed + share * (whole - fixed))
        made = setup(checkpoint, MemoryBudget(nbytes), kv_dtype=kind)
        entries = made.budget.capacity
        assert sizes(made, entries) <= nbytes
        assert entries == 512 or nbytes < sizes(made, entries + 1)
        if kind == "auto":
            assert type_name(made.types.cache) != "float32"
            assert entries > 512 * share or entries == 512
        else:
            assert type_name(made.types.cache) == kind
            assert entries == int(512 * share)


def test_everything_is_kept_in_full_if_it_fits(checkpoint):
    whole = sizes(setup(checkpoint, None), 512)
    made = setup(checkpoint, MemoryBudget(whole))
    assert made.types.cache == torch.float32
    assert made.budget == CacheBudget.of(512)
    assert setup(checkpoint, "1GiB").budget == CacheBudget.of(512)


def test_an_engine_has_no_more_than_that(checkpoint):
    spec = setup(checkpoint, None).spec
    nbytes = sizes(setup(checkpoint, None, kv_dtype="int4"), 0) + 100 * spec.budget_bytes_per_token(torch.float32) // 3
    settings = {"max_model_len": 512, "dtype": "float32", "slots": 1, "report_plan": lambda plan: None}
    llm = LLM(checkpoint, budget=MemoryBudget(nbytes, "mixed"), **settings)
    assert llm.engine.budget.policy.name == "mixed"
    assert llm.engine.model_runner.decoder.slot_bytes <= nbytes
    (output,) = llm.generate([prompt(400)], SamplingParams(max_tokens=20, ignore_eos=True))
    assert output.cache.limit <= llm.engine.budget.capacity < 400
    assert output.cache.bytes_held <= nbytes


def test_what_holds_nothing_is_refused(checkpoint):
    spec = setup(checkpoint, None).spec
    few = spec.fixed_cache_bytes(torch.float32) + 7 * spec.budget_bytes_per_token(torch.float32)
    with pytest.raises(ConfigurationError, match=r"have room for 7 float32 entries per layer; give at least \d+ bytes"):
        setup(checkpoint, MemoryBudget(few), kv_dtype="float32")
    with pytest.raises(ConfigurationError, match="0 bytes hold no cache"):
        setup(checkpoint, "0MiB")
    with pytest.raises(ConfigurationError, match="'two GiB' is not a size"):
        setup(checkpoint, "two GiB")
    with pytest.raises(ConfigurationError, match="neither a number of entries nor a JSON object, nor a size"):
        setup(checkpoint, "4k")
    with pytest.raises(ConfigurationError, match="unknown policy 'nonsense'"):
        MemoryBudget(2**40, "nonsense")


def test_without_kernels_entries_keep_their_type(checkpoint):
    """Codes would be slow there."""
    made = setup(checkpoint, MemoryBudget(sizes(setup(checkpoint, None), 100)), attention="sdpa")
    assert made.types.cache == torch.float32
    assert made.budget.capacity == 100
    assert setup(checkpoint, "1MiB", attention="sdpa", kv_dtype="int4").types.cache != torch.float32


def test_windows_alone(tmp_path):
    """A budget buys nothing there."""
    save_checkpoint(tmp_path, "qwen3-windows", layer_types=["sliding_attention"] * 2, num_hidden_layers=2)
    made = setup(tmp_path, "1GiB")
    assert not made.spec.has_budget
    with pytest.raises(ConfigurationError, match=r"windows of this model alone take \d+ bytes of a sequence"):
        setup(tmp_path, "1KiB")


def test_advice_names_the_type(checkpoint):
    made = setup(checkpoint, MemoryBudget(sizes(setup(checkpoint, None), 200)), slots=8)
    entries = 8 * 100 * made.spec.budget_bytes_per_token(made.types.cache)
    with pytest.raises(MemoryPlanError, match=r"kv_dtype=int4 and budget=\d+"):
        plan_engine(made, plan_engine(made).ours.total - entries).check()


def test_heads_that_cannot_be_codes_keep_their_type(tmp_path):
    save_checkpoint(tmp_path, "qwen3", head_dim=20)
    made = setup(tmp_path, "100KB")
    assert made.types.cache == torch.float32
    assert made.budget.capacity < 512


def test_latents_whose_rank_is_no_multiple_of_a_rotation_are_refused(tmp_path):
    save_checkpoint(tmp_path, "deepseek-v3", kv_lora_rank=24, qk_rope_head_dim=8)
    with pytest.raises(ConfigurationError, match=r"latents whose rank is a multiple of 32, not 24; use auto"):
        setup(tmp_path, None, kv_dtype="int8")
    assert setup(tmp_path, "64KiB").types.cache == torch.float32
