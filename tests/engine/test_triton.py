"""The engine on Triton's kernels, as on a GPU: in the interpreter where there is none."""

from dataclasses import replace

import pytest
import torch

from snapstream import CacheBudget
from snapstream.engine.prefill import prefill
from snapstream.engine.settings import choose_device
from snapstream.kernels import triton as kernels
from tests.checkpoints import prompt, save_checkpoint, save_next_token
from tests.conftest import save_tokenizer
from tests.engine.test_engine import BUDGET, greedy, make
from tests.engine.test_next_token import watched
from tests.engine.test_speculation import drafting
from tests.engine.test_stored_weights import MODELS, widened

pytest.importorskip("triton")
DEVICE = choose_device("auto").type
# The interpreter takes its time for latents and experts: they are in `make test-slow`.
FAMILIES = ["qwen3", *(pytest.param(each, marks=pytest.mark.slow) for each in ("deepseek-v3", "gemma2", "gpt-oss"))]


def dtype_of(family):
    """On CUDA torch multiplies experts in bfloat16 only."""
    return "bfloat16" if DEVICE == "cuda" and family in ("deepseek-v3", "gpt-oss") else "float32"


@pytest.fixture(autouse=True)
def _back_to_other_kernels(monkeypatch):
    """Other tests on the CPU are not for the interpreter."""
    monkeypatch.setattr(kernels, "interpreting", False)


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_of_the_cpu(tmp_path, family):
    """Prompts shorter and longer than the cache, greedy and sampled, other budgets and policies, turn by turn."""
    save_checkpoint(tmp_path, family)
    save_tokenizer(tmp_path)
    settings = {"dtype": dtype_of(family), "max_model_len": 200}
    prompts = [prompt(n, seed=n) for n in (1, 20, 130 if DEVICE == "cuda" else 80, 47)]
    params = [
        greedy(7),
        greedy(5, temperature=0.8, top_p=0.9, seed=4, logprobs=2),
        greedy(
            4, kv_budget=CacheBudget(2, 20, 9, window=4, pooling="max", normalize="candidates"), return_kept_tokens=True
        ),
        greedy(8, forced=tuple(prompt(5, seed=3)), prompt_logprobs=1),
    ]
    cpu = make(tmp_path, device="cpu", attention="auto", sessions=1, **settings)
    want = cpu.generate(prompts, params)
    llm = make(tmp_path, device=DEVICE, attention="triton", sessions=1, **settings)
    assert llm.engine.model_runner.decoder.program.captured
    if settings["dtype"] == "bfloat16":  # rounding decides between two tokens that are about as likely
        params = [replace(each, forced=out.token_ids, logprobs=2) for each, out in zip(params, want, strict=True)]
        outputs = (each.generate(prompts, params) for each in (llm, cpu))
        for got, known in zip(*outputs, strict=True):
            mine, theirs = ([each.logprob for each in one.logprobs] for one in (got, known))
            assert mine == pytest.approx(theirs, abs=0.1)
        return
    got = llm.generate(prompts, params)
    assert [o.token_ids for o in got] == [o.token_ids for o in want]
    assert got[2].cache.kept.positions == want[2].cache.kept.positions
    for a, b in zip(got, want, strict=True):
        for mine, theirs in zip(a.logprobs or (), b.logprobs or (), strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)
    answers = []
    for each in (cpu, llm):
        saved, tokens = None, []
        for turn in range(3):
            name = each.engine.add_request(prompt(30, seed=turn), greedy(3), past=saved, keep=True)
            last = next(
                o for o in iter(lambda e=each: e.engine.step()[-1], None) if o.finished and o.request_id == name
            )
            saved, tokens = last.saved, [*tokens, *last.token_ids]
        answers.append(tokens)
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["q8_0", pytest.param("q4_k", marks=pytest.mark.slow)])
def test_weights_in_blocks(tmp_path, family, weights, monkeypatch):
    """The tokens that the CPU gets with the very numbers of these blocks; prompts with and without widened weights."""
    if DEVICE == "cuda" and "deepseek" in family:
        pytest.skip("torch multiplies experts in bfloat16 only")
    monkeypatch.setattr(prefill, "least_tokens", lambda device: 40)
    source = tmp_path / "model"
    save_checkpoint(source, family, **MODELS.get(family, {}))
    save_tokenizer(source)
    settings = {"dtype": "float32", "max_model_len": 200}
    prompts, params = [prompt(n, seed=n) for n in (1, 20, 80)], greedy(6, prompt_logprobs=0)
    cpu = make(widened(source, weights, tmp_path / "wide"), device="cpu", attention="auto", **settings)
    llm = make(source, device=DEVICE, attention="triton", weights=weights, **settings)
    assert llm.engine.plan.weights < 0.6 * cpu.engine.plan.weights
    for got, want in zip(llm.generate(prompts, params), cpu.generate(prompts, params), strict=True):
        assert got.token_ids == want.token_ids
        for mine, theirs in zip(got.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)


@pytest.mark.parametrize("family", FAMILIES)
def test_verified_tokens_of_the_cpu(tmp_path, family):
    """With guesses that are mostly right, in a ring that turns; greedy and sampled."""
    config = save_checkpoint(tmp_path, family).config
    save_tokenizer(tmp_path)
    settings = {"dtype": dtype_of(family), "max_model_len": 200}
    prompts, budget = [prompt(n, seed=n) for n in (20, 60)], CacheBudget(2, 9, 7, window=8, kernel=5)
    params = [greedy(11), greedy(8, temperature=0.8, top_p=0.9, seed=4)]
    cpu = make(tmp_path, budget, device="cpu", attention="auto", **settings).generate(prompts, params)
    answers = {tuple(tokens): out.token_ids for tokens, out in zip(prompts, cpu, strict=True)}
    for each in (params, params[:1]):
        llm = drafting(tmp_path, answers, budget, share=0.8, device=DEVICE, attention="triton", **settings)
        outputs = llm.generate(prompts[: len(each)], each)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in cpu[: len(each)]]
        assert sum(o.accepted for o in outputs) > 3
    if family != "deepseek-v3":
        return
    # A module guesses the same on both, whatever is verified.
    save_next_token(tmp_path, config)
    guesses = []
    for options in ({"device": "cpu", "attention": "auto"}, {"device": DEVICE, "attention": "triton"}):
        llm = watched(tmp_path, answers, budget, share=0.8, **settings, **options)
        assert llm.generate(prompts[:1], params[:1])[0].token_ids == cpu[0].token_ids
        guesses.append(llm.engine.runner.drafter.guesses)
    assert guesses[0] == guesses[1]
    assert sum(map(len, guesses[0].values())) > 3


def test_nothing_but_kernels_is_asked(tmp_path, monkeypatch):
    """Where there are kernels, nothing falls back to plain torch, in prompts, compression or decoding."""
    save_checkpoint(tmp_path, "qwen3")
    save_tokenizer(tmp_path)
    llm = make(tmp_path, BUDGET, device=DEVICE, attention="triton")

    def refuse(*arguments, **options):
        raise AssertionError("plain torch was asked")

    for module, names in (
        ("kernels.plain", ("norm", "rotate", "gate")),
        ("kernels.compression", ("plain_selected", "plain_smoothed", "plain_window_attention", "plain_copy_rows")),
        ("cache.layer.LayerCache", ("write",)),
        ("attention.sdpa.SdpaAttention", ("prefill", "decode")),
    ):
        for name in names:
            monkeypatch.setattr(f"snapstream.{module}.{name}", refuse)
    assert len(llm.generate(prompt(130), greedy(8))[0].token_ids) == 8


def test_what_is_said_without_triton(tmp_path, monkeypatch, caplog):
    save_checkpoint(tmp_path, "qwen3")
    monkeypatch.setattr(kernels, "_installed", lambda: False)
    monkeypatch.setattr(kernels, "memory_of_processor", lambda device: kernels.MEMORY)
    monkeypatch.setattr("snapstream.attention.flash._is_right", lambda *arguments: True)
    from snapstream.attention import SdpaAttention, choose_backend
    from snapstream.errors import ConfigurationError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    backend = choose_backend("auto", torch.device("cuda"), torch.bfloat16, 128)
    assert isinstance(backend, SdpaAttention)
    assert not backend.reads_all_keys_in_prefill
    assert "triton is not installed (pip install triton)" in caplog.text
    with pytest.raises(ConfigurationError, match="cannot run here: triton is not installed"):
        choose_backend("triton", torch.device("cuda"), torch.bfloat16, 128)


def test_choice_of_backend(monkeypatch):
    from snapstream.attention import SdpaAttention, TritonAttention, choose_backend
    from snapstream.errors import ConfigurationError

    cuda = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(choose_backend("auto", cuda, torch.bfloat16, 128), TritonAttention)
    assert isinstance(choose_backend("auto", cuda, torch.bfloat16, 576, 512), TritonAttention)
    assert isinstance(choose_backend("auto", cuda, torch.float64, 64), SdpaAttention)
    assert choose_backend("auto", cuda, torch.float64, 64).reads_all_keys_in_prefill
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(ConfigurationError, match="the device is cpu, and TRITON_INTERPRET=1 is not set"):
        choose_backend("triton", torch.device("cpu"), torch.float32, 64)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    monkeypatch.setattr(kernels, "memory_of_processor", lambda device: 101_376)
    kernels._missing_here.cache_clear()
    with pytest.raises(ConfigurationError, match="on this device, even sizes up to 256 are supported"):
        choose_backend("triton", cuda, torch.bfloat16, 576, 512)
    with pytest.raises(ConfigurationError, match=r"compute capability 7\.5; kernels need 8\.0"):
        choose_backend("triton", cuda, torch.float16, 64)
    kernels._missing_here.cache_clear()
