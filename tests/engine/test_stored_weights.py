"""Engines with weights in blocks, beside engines with the very numbers of these blocks."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from snapstream import LLM, CacheBudget, ConfigurationError, SamplingParams
from snapstream.config import EngineConfig
from snapstream.engine.memory.planner import plan_engine
from snapstream.engine.prefill import prefill
from snapstream.engine.settings import set_up
from snapstream.errors import CacheFileError
from snapstream.kernels import cpu
from snapstream.kernels.formats import FORMATS
from snapstream.kernels.quantizing import quantize
from snapstream.kernels.weight import BlockWeight
from snapstream.models.families import tensor_places
from snapstream.models.storage import quantized_formats
from snapstream.models.weights import load_spec
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine.test_engine import greedy

pytestmark = pytest.mark.skipif(not cpu.available(), reason="no CPU kernels")
BUDGET = CacheBudget(sink=4, recent=24, top_k=36, window=8)
# Rows of 256 columns consist of whole blocks of Q4_K, those of 160 do not.
WIDE = {"hidden_size": 256, "intermediate_size": 160}
MODELS = {"llama3-gqa": WIDE, "qwen3": WIDE, "deepseek-v3": {"hidden_size": 256, "intermediate_size": 320}}


@pytest.fixture(scope="module", params=MODELS)
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    save_checkpoint(path, request.param, **MODELS[request.param])
    save_tokenizer(path)
    return path


@pytest.fixture(params=["q8_0", "q4_k", "q5_0"])
def weights(request):
    return request.param


def widened(checkpoint, weights, target):
    """A copy of a checkpoint with the numbers that are left of its weights."""
    shutil.copytree(checkpoint, target)
    tensors = load_file(target / "model.safetensors")
    formats = quantized_formats(tensor_places(load_spec(checkpoint)), FORMATS[weights])
    for name in tensors.keys() & formats.keys():
        if tensors[name].dim() == 2 and ".gate.weight" not in name and "kv_b_proj" not in name:
            kind = formats[name]
            rows = quantize(kind, tensors[name])
            tensors[name] = BlockWeight(kind.pack(rows), kind, len(rows)).dense(torch.float32)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def make(path, budget=BUDGET, **settings):
    defaults = {"max_model_len": 512, "slots": 2, "prefill_chunk": 64, "dtype": "float32"}
    return LLM(str(path), budget=budget, **(defaults | settings))


def logprobs_of(llm):
    """Log-probabilities of the same tokens, read and then decoded."""
    forced = SamplingParams(max_tokens=40, forced=tuple(prompt(40, 9)), logprobs=0, prompt_logprobs=0, ignore_eos=True)
    (output,) = llm.generate([prompt(150, 3)], forced)
    read = [one.logprob for one in output.prompt_logprobs if one is not None]
    return torch.tensor(read), torch.tensor([one.logprob for one in output.logprobs])


def test_as_with_the_numbers_of_the_blocks(checkpoint, weights, tmp_path):
    # In full caches: in others, a small difference may change what is kept.
    llm, plain = make(checkpoint, None, weights=weights), make(checkpoint, None)
    assert llm.engine.plan.weights < 0.6 * plain.engine.plan.weights
    assert llm.engine.plan.weights == sum(each.nbytes for each in llm.engine.model_runner.prefiller.model.parameters())
    want = make(widened(checkpoint, weights, tmp_path / "wide"), None)
    for got, expected, original in zip(*map(logprobs_of, (llm, want, plain)), strict=True):
        off, lost = (got - expected).abs().mean(), (original - expected).abs().mean()
        # Random models are sharp: their activations in bfloat16 are off by as much.
        assert off < 0.5, off
        assert weights == "q8_0" or off < lost / 2, (off, lost)  # rounding activations costs less than rounding weights


def test_answers_do_not_depend_on_company_or_steps(checkpoint, weights):
    prompts = [prompt(length, length) for length in (150, 9, 70, 200, 33)]
    alone = make(checkpoint, weights=weights, slots=1, decode_steps=1)
    want = [alone.generate([each], greedy(20))[0].token_ids for each in prompts]
    for settings in ({"slots": 5}, {"slots": 3, "decode_steps": 5}, {"speculative": "lookup", "speculative_tokens": 3}):
        llm = make(checkpoint, weights=weights, **settings)
        assert [output.token_ids for output in llm.generate(prompts, greedy(20))] == want


def test_a_draft_model_in_blocks(checkpoint):
    settings = {"speculative": "draft-model", "draft_model": str(checkpoint), "speculative_tokens": 3}
    llm, plain = make(checkpoint, weights="q8_0", **settings), make(checkpoint, weights="q8_0")
    assert llm.engine.plan.drafter < make(checkpoint, **settings).engine.plan.drafter
    prompts = [prompt(100, 1), prompt(40, 2)]
    got, want = (each.generate(prompts, greedy(30)) for each in (llm, plain))
    assert [output.token_ids for output in got] == [output.token_ids for output in want]


def test_a_draft_model_that_is_in_blocks_already(tmp_path):
    gguf = pytest.importorskip("gguf")
    from tests.models.gguf.files import write

    for name, kind in (("target", gguf.GGMLQuantizationType.F32), ("draft", gguf.GGMLQuantizationType.Q4_0)):
        write(tmp_path / f"{name}.gguf", "qwen2", kind)
    settings = {"speculative": "draft-model", "draft_model": str(tmp_path / "draft.gguf"), "speculative_tokens": 3}
    llm = make(tmp_path / "target.gguf", None, weights="q8_0", **settings)
    plain = make(tmp_path / "target.gguf", None, weights="q8_0")
    got, want = (each.generate([list(range(50))], greedy(20))[0].token_ids for each in (llm, plain))
    assert got == want


def test_weights_whose_tensors_begin_within_a_tile_stay_numbers(tmp_path, caplog):
    """Keys and values of one head of 8 numbers: values begin at a row that is not a multiple of 16."""
    sizes = {"hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 8}
    save_checkpoint(tmp_path, "qwen3", **sizes)
    save_tokenizer(tmp_path)
    llm = make(tmp_path, None, weights="q8_0")
    assert "weights are not kept in blocks" in caplog.text
    stored = llm.engine.spec.stored_as
    assert not any("qkv" in name for name in stored)
    assert any("gate_up" in name for name in stored)
    for got, want in zip(logprobs_of(llm), logprobs_of(make(tmp_path, None)), strict=True):
        assert (got - want).abs().mean() < 0.5


def test_saved_sequences_belong_to_weights(checkpoint, tmp_path):
    saved = []
    for weights in ("q8_0", "auto"):
        llm = make(checkpoint, weights=weights, sessions=1)
        llm.engine.add_request(prompt(100, 1), greedy(3), keep=True)
        while llm.engine.busy:
            saved += [output.saved for output in llm.engine.step() if output.finished]
        llm.engine.files.save(saved[-1], tmp_path / weights)
    assert llm.engine.files.load(tmp_path / "auto").tokens == saved[-1].tokens
    with pytest.raises(CacheFileError, match="with other --weights"):
        llm.engine.files.load(tmp_path / "q8_0")


def test_weights_that_would_fit_are_suggested(checkpoint):
    setup = set_up(str(checkpoint), BUDGET, EngineConfig(max_model_len=512, dtype="bfloat16", device="cpu"))
    full = plan_engine(setup, 2**40).ours.weights
    assert "in q8_0 they would (weights)" in plan_engine(setup, int(0.8 * full)).advice
    assert "in q4_k they would (weights)" in plan_engine(setup, int(0.5 * full)).advice
    assert "vLLM splits a model" in plan_engine(setup, full // 20).advice


def test_prefixes_that_were_read_in_another_way_are_not_used(checkpoint, monkeypatch):
    """Long prompts are read with widened weights, short ones are not: neither may begin behind the other's entries."""
    monkeypatch.setattr(prefill, "least_tokens", lambda device: 200)
    start = prompt(130, 1)
    prompts = [start + prompt(length, length) for length in (20, 21, 90, 91, 22, 92)]
    settings, reused = {"weights": "q8_0", "slots": 1, "prefill_chunk": 32}, []
    cached, plain = make(checkpoint, prefix_cache=2**22, **settings), make(checkpoint, **settings)
    for each in prompts:
        params = SamplingParams(max_tokens=8, logprobs=0, ignore_eos=True)
        got, want = (llm.generate([each], params)[0] for llm in (cached, plain))
        assert got.token_ids == want.token_ids
        assert [one.logprob for one in got.logprobs] == [one.logprob for one in want.logprobs]
        reused.append(got.reused)
    assert reused == [0, 64, 0, 128, 64, 128]


def test_what_cannot_be_multiplied_is_refused(checkpoint, monkeypatch):
    with pytest.raises(ConfigurationError, match="weights is 'q4'; allowed: auto, dense, q8_0"):
        make(checkpoint, weights="q4")
    with pytest.raises(ConfigurationError, match=r"no kernel here multiplies it with torch\.float16 on cpu"):
        make(checkpoint, weights="q8_0", dtype="float16")
    monkeypatch.setattr(cpu, "available", lambda: False)
    with pytest.raises(ConfigurationError, match="there must be CPU kernels"):
        make(checkpoint, weights="q8_0")


def test_long_prompts_with_widened_weights(checkpoint, weights, tmp_path, monkeypatch):
    """As with the numbers of the blocks, without rounding; it is done on a GPU, and here as it would be there."""
    monkeypatch.setattr(prefill, "least_tokens", lambda device: 100)
    llm = make(checkpoint, None, weights=weights)
    want = make(widened(checkpoint, weights, tmp_path / "wide"), None)
    assert llm.engine.plan.staging > want.engine.plan.staging
    read, decoded = logprobs_of(llm)
    expected, _ = logprobs_of(want)
    # The output product rounds as ever, and experts stay in blocks.
    routed = llm.engine.spec.experts is not None
    assert (read - expected).abs().mean() < (0.5 if routed else 0.05)
    short = SamplingParams(max_tokens=1, prompt_logprobs=0)
    (got,), (again,) = (
        each.generate([prompt(60, 5)], short) for each in (llm, make(checkpoint, None, weights=weights))
    )
    assert got.prompt_logprobs == again.prompt_logprobs  # short prompts are read as ever
    assert torch.isfinite(decoded).all()
