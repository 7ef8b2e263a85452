"""The plan of memory beside what is allocated."""

import json
from dataclasses import asdict

import pytest
import torch

from snapstream import EngineConfig, SamplingParams
from snapstream.attention import SdpaAttention, TritonAttention
from snapstream.cache.groups import SMALLEST_BLOCK
from snapstream.engine.memory.planner import LIBRARY_WORKSPACE, plan_engine
from snapstream.engine.settings import set_up
from snapstream.kernels import cpu
from snapstream.kernels import triton as kernels
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine.test_engine import make
from tests.kernels.triton.test_compiler import compile_only
from tests.memory import measure

# Large enough that what is counted is more than what is not.
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4000, "max_position_embeddings": 2**17}
GROUPED = SIZES | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
LATENT = SIZES | {"num_attention_heads": 8, "num_key_value_heads": 8, "moe_intermediate_size": 256}
STATE = GROUPED | {"linear_num_key_heads": 8, "linear_num_value_heads": 16}
STATE |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64}
SHAPES = {
    "llama3-gqa": GROUPED,
    "qwen3-windows": GROUPED,
    "gemma2": GROUPED,
    "gemma4-shared": GROUPED | {"vocab_size_per_layer_input": 4000},
    "qwen3.5": STATE,
    "deepseek-v3": LATENT,
}


@pytest.fixture(params=SHAPES)
def checkpoint(request, tmp_path):
    save_checkpoint(tmp_path, request.param, **SHAPES[request.param])
    save_tokenizer(tmp_path)
    return tmp_path


def plan_of(checkpoint, device, **settings):
    config = EngineConfig(device=device, dtype="bfloat16", **settings)
    return plan_engine(set_up(str(checkpoint), 256, config, must_exist=False)).ours


def kept_by(plan):
    """What torch allocates and keeps: not weights, and not caches in blocks of their own."""
    return plan["staging"] + plan["metadata"] + (plan["slots"] if plan["slots"] < SMALLEST_BLOCK else 0)


@pytest.mark.parametrize(
    "checkpoint", ["llama3-gqa", pytest.param("deepseek-v3", marks=pytest.mark.slow)], indirect=True
)
def test_what_the_path_of_cuda_allocates(checkpoint):
    """Seen without a device, with kernels that are compiled but not run: they allocate nothing themselves."""
    pytest.importorskip("triton")
    got = compile_only("memory", checkpoint, 4000, 8)
    assert got["kept"] == pytest.approx(kept_by(got), rel=0.01)
    # With tile registers, torch brings a weight into an order of its own; on CUDA it does not.
    sizes = json.loads((checkpoint / "config.json").read_text())
    has_tiles = cpu.available() and cpu.prefill_instructions(torch.bfloat16) == "tiles"
    packed = sizes["intermediate_size"] * sizes["hidden_size"] * 2 * has_tiles
    assert 0.95 * got["workspace"] <= got["reading"] <= 1.15 * got["workspace"] + packed
    many = compile_only("memory", checkpoint, 512, 600)
    assert many["sampling"] == pytest.approx(many["workspace"], rel=0.01)


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_what_a_cpu_allocates(checkpoint, attention):
    llm = make(checkpoint, 256, attention=attention, device="cpu", max_model_len=4000, slots=2, prefill_chunk=512)
    drawn = SamplingParams(max_tokens=4, temperature=1.0, top_p=0.9, seed=1, logprobs=2, prompt_logprobs=1)
    _, peak, kept = measure(lambda: llm.generate([prompt(3900)] * 2, drawn))
    assert kept < 2**20
    # Attention by torch is declared for all of its versions, and some kernels have memory of their own.
    least = 0.3 if attention == "sdpa" or llm.engine.spec.latent else 0.98
    assert least * llm.engine.plan.workspace < peak <= 1.01 * llm.engine.plan.workspace + 2**15  # and small tensors


@pytest.mark.parametrize("settings", [{}, {"speculative": "lookup"}, {"sessions": 2, "decode_steps": 2}])
def test_what_is_kept_is_what_is_planned(checkpoint, settings):
    """To the byte, except for a few numbers such as rotary frequencies; weights and large caches are in blocks."""
    llm, _, kept = measure(lambda: make(checkpoint, 256, device="cpu", max_model_len=2000, slots=2, **settings))
    assert 0 <= kept - kept_by(asdict(llm.engine.plan)) < 2000


def test_nothing_of_a_chunk_grows_with_the_prompt(checkpoint):
    """On CUDA: no masks, and no logits of ``L x T``. Only staging grows, by what a token has there, and the choice.

    The lane of short prompts has an eighth of the longest one's.
    """
    short, long = (plan_of(checkpoint, "cuda", max_model_len=length) for length in (2**14, 2**17))
    spec = set_up(str(checkpoint), 256, EngineConfig(device="cuda"), must_exist=False).spec
    assert 0 <= long.workspace - short.workspace <= spec.kv_heads * 100 * (2**17 - 2**14)
    per_token = (long.staging - short.staging) / (2**17 - 2**14)
    staged = [entry.nbytes(torch.bfloat16) for entry in spec.entries]
    assert per_token == ((sum(staged) if spec.shared_from else max(staged)) + spec.hidden_size * 2) * 9 / 8


def test_plans_for_a_device_that_is_not_here(checkpoint, monkeypatch):
    """As the engine would make them there: with kernels for CUDA, wherever the plan is made."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(kernels, "_installed", lambda: False)
    config = EngineConfig(device="cuda", dtype="bfloat16")
    assert isinstance(set_up(str(checkpoint), 256, config, must_exist=False).backend, TritonAttention)
    plan = plan_of(checkpoint, "cuda", max_model_len=4096)
    assert plan.workspace > LIBRARY_WORKSPACE
    assert plan.steady == plan.total
    stock = EngineConfig(device="cuda", dtype="bfloat16", attention="sdpa", max_model_len=2**17)
    setup = set_up(str(checkpoint), 256, stock, must_exist=False)
    assert isinstance(setup.backend, SdpaAttention)
    masks = 512 * 2**17 * 20
    # Torch has no flash kernel for latents, nor for capped logits.
    is_masked = setup.spec.latent is not None or setup.spec.attention_cap > 0
    assert (plan_engine(setup).ours.workspace > masks) == is_masked
