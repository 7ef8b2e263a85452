"""Several ranks: each compresses what it holds, and all of them keep the same tokens.

Each of these tests starts at least two processes, which takes most of a minute. `make test-vllm` runs one of each kind;
ranks whose caches travel compress as ranks whose caches do not.
"""

import pytest

from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.integrations.vllm.engines import BUDGET, MIXED, MLA
from tests.integrations.vllm.offline import run_offline
from tests.peers import peer_generate

pytest.importorskip("vllm")

LENGTHS = (700, 300, 37, 513)
# Eager, stock vLLM 0.32 fails on a CPU: its buffers come from the warm-up.
PIPELINE = {"pipeline_parallel_size": 2, "enforce_eager": False}


@pytest.fixture(scope="module")
def prompts():
    return [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.mark.slow
def test_tensor_parallel_with_a_kv_head_per_rank(llama, prompts):
    got = run_offline(llama, prompts, 60, BUDGET, tensor_parallel_size=2, max_num_batched_tokens=333)
    assert got == [peer_generate(llama, tokens, BUDGET, 60) for tokens in prompts]


@pytest.mark.slow
def test_tensor_parallel_with_one_kv_head_on_both_ranks(tmp_path, prompts):
    """Each rank sees half of the query heads that share the KV head: their votes are summed."""
    save_checkpoint(tmp_path, "qwen3", num_key_value_heads=1)
    save_tokenizer(tmp_path)
    got = run_offline(tmp_path, prompts, 60, MIXED, tensor_parallel_size=2)
    assert got == [peer_generate(tmp_path, tokens, MIXED, 60) for tokens in prompts]


@pytest.mark.slow
def test_tensor_parallel_latent_attention(deepseek, prompts):
    got = run_offline(deepseek, prompts, 60, BUDGET, tensor_parallel_size=2, **MLA)
    assert got == [peer_generate(deepseek, tokens, BUDGET, 60, latent=True) for tokens in prompts]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["latents", "a head on both", "a head per rank"])
def test_caches_travel_rank_by_rank(request, tmp_path, prompts, kind):
    settings = {"tensor_parallel_size": 2, "travels": str(tmp_path / "payloads")}
    if kind == "latents":
        model, settings = request.getfixturevalue("deepseek"), settings | MLA
    elif kind == "a head on both":
        model = tmp_path
        save_checkpoint(tmp_path, "qwen3", num_key_value_heads=1)
        save_tokenizer(tmp_path)
    else:
        model = request.getfixturevalue("llama")
    got = run_offline(model, prompts, 60, BUDGET, **settings)
    assert got == [peer_generate(model, tokens, BUDGET, 60, latent=kind == "latents") for tokens in prompts]
    assert not list((tmp_path / "payloads").iterdir())


@pytest.mark.parametrize(
    ("kind", "reading", "decoding"), [("heads", 2, 1), ("heads", 1, 2), ("a head on both", 2, 1), ("latents", 2, 1)]
)
def test_caches_travel_between_other_numbers_of_ranks(request, tmp_path, prompts, kind, reading, decoding):
    """Heads are cut and joined; of what several ranks hold, one sends it."""
    settings = MLA if kind == "latents" else {}
    model = request.getfixturevalue("deepseek" if kind == "latents" else "llama")
    if kind == "a head on both":
        model = tmp_path
        save_checkpoint(tmp_path, "qwen3", num_key_value_heads=1)
        save_tokenizer(tmp_path)
    settings = settings | {"travels": str(tmp_path / "payloads")}
    departures = run_offline(
        model,
        prompts,
        1,
        BUDGET,
        tensor_parallel_size=reading,
        stage="read",
        transfer={"ranks": decoding},
        **settings,
    )
    # One rank sends all that another one needs, but for heads that are on two.
    assert len(list((tmp_path / "payloads").iterdir())) == len(prompts) * (2 if kind == "heads" else 1)
    got = run_offline(model, prompts, 60, BUDGET, tensor_parallel_size=decoding, departures=departures, **settings)
    assert got == [peer_generate(model, tokens, BUDGET, 60, latent=kind == "latents") for tokens in prompts]
    assert not list((tmp_path / "payloads").iterdir())


@pytest.mark.slow
def test_pipeline_parallel(llama, prompts):
    got = run_offline(llama, prompts, 60, BUDGET, max_num_batched_tokens=333, **PIPELINE)
    assert got == [peer_generate(llama, tokens, BUDGET, 60) for tokens in prompts]


def test_pipeline_parallel_with_preemptions(llama):
    """Several batches are in flight when blocks run out; who comes back does so with what it had said by then."""
    some = [prompt(40 + n, n) for n in range(8)] + [prompt(150 + n, n) for n in range(2)]
    settings = PIPELINE | {"num_gpu_blocks_override": 35, "max_model_len": 384}
    got, preempted = run_offline(llama, some, 70, BUDGET, counted=True, **settings)
    assert preempted
    assert got == [peer_generate(llama, tokens, BUDGET, 70) for tokens in some]
