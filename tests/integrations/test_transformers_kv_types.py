"""The cache for transformers with entries of 8 and 4 bits: against the engine, and row by row."""

import pytest
import torch
from torch._dynamo.utils import counters

from snapstream import LLM, CacheBudget, ConfigurationError, SamplingParams
from snapstream.cache import CODES
from snapstream.integrations.transformers import SnapStreamCache
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import needs_compiler, save_tokenizer
from tests.integrations.test_transformers import generate, load

BUDGET = CacheBudget(sink=2, recent=12, top_k=18, window=4, kernel=3)
KINDS = ("int8", "int4", "int8/int4", "int4/int8")


@pytest.fixture(scope="module", params=["qwen3", "gpt-oss", "gemma3"])
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    save_checkpoint(path, request.param, head_dim=32)
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def model(checkpoint):
    return load(checkpoint)


def cache_of(model, kind, budget=BUDGET, **settings):
    return SnapStreamCache(model.config, budget, kv_dtype=kind, **settings)


def read(model, prompts, kind):
    """The layers of a cache after prompts, which are padded on the left."""
    longest, cache = max(map(len, prompts)), cache_of(model, kind)
    ids = torch.tensor([[0] * (longest - len(one)) + list(one) for one in prompts])
    mask = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    return cache._ours


def same_codes(codes, mine, theirs):
    """But for numbers in the middle between two codes: those who compute them add in orders of their own."""
    assert mine.shape == theirs.shape
    a, b = codes.decoded(mine), codes.decoded(theirs)
    assert (a - b).norm() < 0.02 * b.norm()


def formats(kind):
    keys, _, values = kind.partition("/")
    return CODES[keys], CODES[values or keys]


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_engine(tmp_path, kind):
    save_checkpoint(tmp_path, "qwen3", head_dim=32)
    save_tokenizer(tmp_path)
    model = load(tmp_path)
    settings = {"budget": BUDGET, "max_model_len": 256, "kv_dtype": kind, "sessions": 1}
    llm = LLM(str(tmp_path), attention="sdpa", **settings)
    for length in (2, 20, 32, 33, 100):
        llm.engine.add_request(prompt(length), SamplingParams(max_tokens=0), keep=True)
        while llm.engine.busy:
            saved = [output.saved for output in llm.engine.step() if output.finished]
        for mine, theirs in zip(read(model, [prompt(length)], kind), saved[0].layers, strict=True):
            used = int(mine.valid()[0])
            for codes, a, b in zip(formats(kind), (mine.keys, mine.values), theirs.tensors, strict=False):
                same_codes(codes, a[:, :, :used], b[:, :, :used])
            torch.testing.assert_close(mine.frames, theirs.frames, rtol=1e-4, atol=1e-5)
        if kind == "int8":
            (expected,) = llm.generate([prompt(length)], SamplingParams(max_tokens=40, ignore_eos=True))
            assert generate(model, [prompt(length)], cache_of(model, kind), 40) == [list(expected.token_ids)]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_padded_batch_equal_each_row_alone(model, kind):
    prompts = [prompt(n, n) for n in (60, 2, 90, 32, 33, 3)]
    together = read(model, prompts, kind)
    for row, one in enumerate(prompts):
        for mine, alone in zip(together, read(model, [one], kind), strict=True):
            used = int(alone.valid()[0])
            pairs = (mine.keys, alone.keys), (mine.values, alone.values)
            for codes, (a, b) in zip(formats(kind), pairs, strict=True):
                same_codes(codes, a[row, :, :used], b[0, :, :used])
            torch.testing.assert_close(mine.frames[row], alone.frames[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_turns_resets_and_beams(model, kind):
    prompts = [prompt(50, 1), prompt(20, 2)]
    used, new = cache_of(model, kind), cache_of(model, kind)
    first = generate(model, prompts, used, 10)
    longer = [one + two + [5, 6, 7] for one, two in zip(prompts, first, strict=True)]
    after = generate(model, [longer[0]], cache_of(model, kind), 10)
    assert len(after[0]) == 10
    used.reset()
    assert generate(model, prompts, used, 10) == first == generate(model, prompts, new, 10)
    beams = generate(model, prompts[:1], cache_of(model, kind), 12, num_beams=3)
    assert len(beams[0]) == 12


def test_memory_is_what_codes_need(checkpoint, model):
    held = {}
    for kind in ("auto", *KINDS):
        cache = cache_of(model, kind)
        generate(model, [prompt(90)], cache, 5)
        held[kind] = sum(layer.nbytes for layer in cache._ours)
        assert cache.nbytes_uncompressed == cache_of_numbers(model).nbytes_uncompressed
    assert held["int4"] < held["int8/int4"] <= held["int8"] < held["auto"]


def test_nothing_wide_outlives_a_step(model):
    """A decode step widens one layer after the other."""
    cache = cache_of(model, "int8")
    token = torch.tensor([prompt(60)])
    with torch.no_grad():
        for _ in range(3):
            token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
    for layer in cache._ours:
        held = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        assert {each.dtype for each in held if each.dim() == 4 and each.shape[2] == BUDGET.capacity} == {torch.uint8}
        assert layer._given() is None


def cache_of_numbers(model):
    cache = cache_of(model, "auto")
    generate(model, [prompt(90)], cache, 5)
    return cache


@needs_compiler
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_a_compiled_decode_step_is_compiled_once(tmp_path, kind):
    save_checkpoint(tmp_path, "qwen3", head_dim=32)
    model = load(tmp_path)
    expected = generate(model, [prompt(60)], cache_of(model, kind), 30)
    torch._dynamo.reset()
    counters.clear()
    cache = cache_of(model, kind)
    step = torch.compile(model.forward, fullgraph=True, dynamic=False)
    tokens = torch.tensor([prompt(60)])
    with torch.no_grad():
        token = model(tokens, past_key_values=cache).logits[:, -1:].argmax(-1)
        got = [int(token)]
        for _ in range(29):
            token = step(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            got.append(int(token))
    assert [got] == expected
    assert counters["stats"]["unique_graphs"] == 1


def test_what_does_not_fit_is_refused(tmp_path, model):
    with pytest.raises(ConfigurationError, match=r"kv_dtype is 'fp8'; allowed: auto, int8, int4, int8/int4, int4/int8"):
        cache_of(model, "fp8")
    save_checkpoint(tmp_path, "qwen3", head_dim=16)
    narrow = load(tmp_path)
    with pytest.raises(ConfigurationError, match="multiple of 32, not 16; use int8"):
        generate(narrow, [prompt(20)], cache_of(narrow, "int4"))
    generate(narrow, [prompt(20)], cache_of(narrow, "int8"))
