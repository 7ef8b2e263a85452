"""The engine on a GPU: captured graphs, flash attention, Triton's kernels; beside the CPU, float64 and transformers.

What can be seen without one: test_triton.py, test_meta_device.py, test_memory.py, and tests/kernels/triton.
"""

import gc

import pytest
import torch

from snapstream import CacheBudget, SamplingParams
from snapstream.attention import SdpaAttention, TritonAttention, flash
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine import conftest
from tests.engine.test_engine import greedy, make, naive_generate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CUDA = torch.device("cuda", 0)
FAMILIES = ["llama3-gqa", "qwen2", "qwen3", "mistral"]


@pytest.mark.parametrize("attention", ["triton", "sdpa"])
def test_captured_graphs_equal_the_cpu(checkpoint, attention):
    lengths = [5, 60, 131, 48, 33, 200, 97]
    prompts = [prompt(n, seed=n) for n in lengths]
    params = [greedy(40), greedy(30, temperature=0.7, seed=4), greedy(20, logprobs=2), greedy(50, kv_budget=36)]
    each = [params[i % 4] for i in range(len(prompts))]
    want = make(checkpoint, device="cpu").generate(prompts, each)
    for eager in (True, False):
        llm = make(checkpoint, device="cuda", enforce_eager=eager, attention=attention)
        for _ in range(2):
            assert [o.token_ids for o in llm.generate(prompts, each)] == [o.token_ids for o in want]


@pytest.mark.parametrize("ring", ["elastic", "paper"])
@pytest.mark.parametrize("length", [1, 4, 28, 47, 48, 49, 130])
def test_equals_naive_decoding(checkpoint, ring, length):
    budget = CacheBudget(sink=4, recent=24, top_k=20, window=8, kernel=5, ring=ring)
    got = make(checkpoint, budget, device="cuda", dtype="float32").generate(prompt(length), greedy(120))[0]
    assert got.token_ids == naive_generate(checkpoint, prompt(length), budget, 120)


@pytest.mark.parametrize("family", FAMILIES)
def test_full_cache_equals_transformers(tmp_path, family):
    peer = save_checkpoint(tmp_path, family)
    save_tokenizer(tmp_path)
    tokens = prompt(90, 3)
    with torch.no_grad():
        want = peer.generate(torch.tensor([tokens]), max_new_tokens=40, do_sample=False, eos_token_id=None)
    got = make(tmp_path, budget=None, device="cuda", dtype="float32").generate(tokens, greedy(40))[0]
    assert got.token_ids == tuple(want[0, 90:].tolist())


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3"])
def test_half_precision_says_nearly_what_the_cpu_says(tmp_path, family):
    """Experts are multiplied in bfloat16 only; a token may differ where two are about as likely."""
    save_checkpoint(tmp_path, family)
    save_tokenizer(tmp_path)
    params = SamplingParams(max_tokens=1, logprobs=5, ignore_eos=True)
    prompts = [prompt(n, seed=n) for n in (5, 48, 130)]
    engines = [
        make(tmp_path, device=device, dtype=dtype) for device, dtype in (("cuda", "bfloat16"), ("cpu", "float32"))
    ]
    for got, want in zip(*(engine.generate(prompts, params) for engine in engines), strict=True):
        mine, theirs = got.logprobs[0].top, want.logprobs[0].top
        common = [token for token in mine if token in theirs]
        assert len(common) >= 3
        assert [mine[token] for token in common] == pytest.approx([theirs[token] for token in common], abs=0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [64, 96, 128, 192, 256])
def test_flash_attention_works(dtype, size):
    """If it did not, prompts would be read by a slower kernel, and a warning would say so."""
    assert flash.fits(CUDA, dtype, size, size)
    query, keys = torch.randn(77, 8, size, device=CUDA).to(dtype), torch.randn(2, 500, size, device=CUDA).to(dtype)
    values = torch.randn_like(keys)
    keys[:, 277:], values[:, 277:] = float("nan"), float("nan")
    start = torch.tensor(200, device=CUDA)
    from snapstream.kernels.triton.prefill import attend_chunk

    got, mine = (each(query, keys, values, start, 0.1) for each in (flash.attend, attend_chunk))
    torch.testing.assert_close(got, mine, rtol=2e-2, atol=2e-2)


def test_nothing_waits_in_a_step(checkpoint, monkeypatch):
    """Torch raises where the host would wait for the device without saying so."""
    monkeypatch.setattr(conftest, "check_integrity", lambda one: None)  # it looks at numbers
    llm = make(checkpoint, device="cuda", enforce_eager=False)
    for length in (20, 90, 200):
        llm.engine.add_request(prompt(length), greedy(30, temperature=0.5, seed=1) if length == 90 else greedy(30))
    torch.cuda.set_sync_debug_mode("error")
    try:
        outputs = [output for _ in iter(lambda: llm.engine.busy, False) for output in llm.engine.step()]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(output.error is None for output in outputs)
    assert sum(output.finished for output in outputs) == 3


def test_nothing_is_compiled_after_warm_up(checkpoint):
    pytest.importorskip("triton")
    from triton.runtime.jit import JITFunction

    def kernels():
        found = [each for each in gc.get_objects() if isinstance(each, JITFunction)]
        return sum(len(cache[0]) for each in found for cache in each.device_caches.values())

    llm = make(checkpoint, device="cuda", enforce_eager=False)
    ready = kernels()
    assert ready > 10
    lengths = [1, 2, 15, 16, 17, 47, 48, 49, 64, 65, 128, 199]
    params = [greedy(20), greedy(9, temperature=1.0, seed=1), greedy(20, kv_budget=36), greedy(5, prompt_logprobs=2)]
    llm.generate([prompt(n, seed=n) for n in lengths], [params[n % 4] for n in lengths])
    assert kernels() == ready


def test_memory_is_what_was_planned(tmp_path):
    """The peak, within 5 %: weights, slots, staging, workspace and what decoding holds."""
    sizes = {"hidden_size": 2048, "intermediate_size": 8192, "vocab_size": 32000, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4, "head_dim": 128, "max_position_embeddings": 40000}
    save_checkpoint(tmp_path, "llama3-gqa", dtype=torch.bfloat16, **sizes, **heads)
    save_tokenizer(tmp_path)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    settings = {"max_model_len": 32768, "slots": 16, "prefill_chunk": 2048, "dtype": "bfloat16"}
    llm = make(tmp_path, 2048, device="cuda", enforce_eager=False, **settings)
    llm.generate([prompt(32000)] * 2, [greedy(20), greedy(20, temperature=1.0, seed=1)])
    peak = torch.cuda.max_memory_allocated() - before
    # Blocks of a graph's own pool are reserved while it is not running.
    assert torch.cuda.max_memory_reserved() - before < 1.1 * llm.engine.plan.total
    assert 0.8 * llm.engine.plan.total < peak < 1.05 * llm.engine.plan.total


def test_backends(checkpoint):
    assert isinstance(make(checkpoint, device="cuda").engine.model_runner.decoder.backend, TritonAttention)
    stock = make(checkpoint, device="cuda", attention="sdpa").engine.model_runner.decoder.backend
    assert isinstance(stock, SdpaAttention)
