"""Several ranks: each compresses what it holds, and all of them keep the same tokens."""

import os

import pytest

from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.integrations.vllm.engines import BUDGET, MLA
from tests.integrations.vllm.offline import run_offline
from tests.peers import peer_generate

pytest.importorskip("vllm")

LENGTHS = (700, 300, 37, 513)
CORES = os.cpu_count() or 1
# Eager, stock vLLM 0.32 fails on a CPU: its buffers come from the warm-up.
PIPELINE = {"pipeline_parallel_size": 2, "enforce_eager": False}


def ranks(number):
    """Where the threads of each rank run; on few cores they share."""
    return {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(rank % CORES) for rank in range(number))}


@pytest.fixture(scope="module")
def prompts():
    return [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


def test_tensor_parallel_with_a_kv_head_per_rank(llama, prompts):
    got = run_offline(llama, prompts, 60, BUDGET, ranks(2), tensor_parallel_size=2, max_num_batched_tokens=333)
    assert got == [peer_generate(llama, tokens, BUDGET, 60) for tokens in prompts]


def test_tensor_parallel_with_one_kv_head_on_both_ranks(tmp_path, prompts):
    """Each rank sees half of the query heads that share the KV head: their votes are summed."""
    save_checkpoint(tmp_path, "qwen3", num_key_value_heads=1)
    save_tokenizer(tmp_path)
    got = run_offline(tmp_path, prompts, 60, BUDGET, ranks(2), tensor_parallel_size=2)
    assert got == [peer_generate(tmp_path, tokens, BUDGET, 60) for tokens in prompts]


def test_tensor_parallel_latent_attention(deepseek, prompts):
    got = run_offline(deepseek, prompts, 60, BUDGET, ranks(2), tensor_parallel_size=2, **MLA)
    assert got == [peer_generate(deepseek, tokens, BUDGET, 60, latent=True) for tokens in prompts]


@pytest.mark.parametrize("kind", ["a head per rank", "a head on both", "latents"])
def test_caches_travel_rank_by_rank(request, tmp_path, prompts, kind):
    settings = {"tensor_parallel_size": 2, "travels": str(tmp_path / "parcels")}
    if kind == "latents":
        model, settings = request.getfixturevalue("deepseek"), settings | MLA
    elif kind == "a head on both":
        model = tmp_path
        save_checkpoint(tmp_path, "qwen3", num_key_value_heads=1)
        save_tokenizer(tmp_path)
    else:
        model = request.getfixturevalue("llama")
    got = run_offline(model, prompts, 60, BUDGET, ranks(2), **settings)
    assert got == [peer_generate(model, tokens, BUDGET, 60, latent=kind == "latents") for tokens in prompts]
    assert not list((tmp_path / "parcels").iterdir())


def test_pipeline_parallel(llama, prompts):
    got = run_offline(llama, prompts, 60, BUDGET, ranks(2), max_num_batched_tokens=333, **PIPELINE)
    assert got == [peer_generate(llama, tokens, BUDGET, 60) for tokens in prompts]


def test_pipeline_parallel_with_preemptions(llama):
    """Several batches are in flight when blocks run out; who comes back does so with what it had said by then."""
    some = [prompt(40 + n, n) for n in range(8)] + [prompt(150 + n, n) for n in range(2)]
    settings = PIPELINE | {"num_gpu_blocks_override": 35, "max_model_len": 384}
    got, preempted = run_offline(llama, some, 70, BUDGET, ranks(2), counted=True, **settings)
    assert preempted
    assert got == [peer_generate(llama, tokens, BUDGET, 70) for tokens in some]
