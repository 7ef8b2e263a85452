"""Every backend against a float64 reference and against torch's attention."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.attention import CpuAttention, SdpaAttention, choose_backend
from snapstream.errors import ConfigurationError
from snapstream.kernels import cpu as kernels
from tests.reference import naive_attention

needs_compiler = pytest.mark.skipif(not kernels.library.available(), reason="no kernels, and no C++ compiler")
BACKENDS = [SdpaAttention, pytest.param(CpuAttention, marks=needs_compiler)]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}


@pytest.fixture(scope="module", autouse=True)
def _build_kernels():
    if kernels.library.available():
        assert kernels.available()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@settings(deadline=None, max_examples=25)
@given(
    shape=st.sampled_from([(1, 1, 32), (3, 1, 64), (2, 4, 32), (5, 2, 96), (8, 1, 128)]),
    entries=st.integers(1, 700),
    cap=st.sampled_from([0.0, 0.0, 2.5, 50.0]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_decode_equals_reference(backend, dtype, shape, entries, cap, has_sinks, seed, data):
    G, N, D = shape
    valid = data.draw(st.lists(st.integers(0, entries), min_size=1, max_size=3))
    generator = torch.Generator().manual_seed(seed)
    query = (torch.randn(len(valid), N * G, D, generator=generator) * 3).to(dtype)
    keys, values = torch.randn(2, len(valid), N, entries, D, generator=generator).to(dtype)
    for row, length in enumerate(valid):
        keys[row, :, length:] = 30.0  # what must not be read would win
    sinks = torch.randn(N * G, generator=generator) * 4 if has_sinks else None
    got = backend().decode(query, keys, values, torch.tensor(valid), D**-0.5, cap=cap, sinks=sinks)
    assert got.dtype == dtype
    for b, length in enumerate(valid):
        for h in range(N * G if length else 0):
            sink = None if sinks is None else sinks[h]
            want = naive_attention(query[b, h], keys[b, h // G, :length], values[b, h // G, :length], cap, sink)
            torch.testing.assert_close(got[b, h].double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("backend", BACKENDS)
@settings(deadline=None, max_examples=20)
@given(
    heads=st.sampled_from([(1, 1), (3, 1), (2, 4)]),
    start=st.integers(0, 90),
    chunk=st.integers(1, 33),
    spare=st.integers(0, 40),
    cap=st.sampled_from([0.0, 2.5]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_prefill_equals_the_definition(backend, heads, start, chunk, spare, cap, has_sinks, seed):
    (G, N), D = heads, 32
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(chunk, N * G, D, generator=generator)
    keys, values = torch.randn(2, N, start + chunk + spare, D, generator=generator)
    sinks = torch.randn(N * G, generator=generator) * 4 if has_sinks else None
    got = backend().prefill(query, keys, values, torch.tensor(start), D**-0.5, cap=cap, sinks=sinks)
    for t in range(chunk):
        for h in range(N * G):
            seen = (each[h // G, : start + t + 1] for each in (keys, values))
            want = naive_attention(query[t, h], *seen, cap, None if sinks is None else sinks[h])
            torch.testing.assert_close(got[t, h].double(), want, rtol=1e-5, atol=1e-5)


@needs_compiler
def test_large_logits_and_a_rescaled_maximum():
    """The running maximum grows from block to block; nothing overflows or is lost."""
    D, C = 32, 1500
    keys = torch.linspace(-4, 4, C)[:, None].expand(C, D).contiguous()[None, None]
    values = torch.randn(1, 1, C, D)
    query = torch.full((1, 1, D), 9.0)
    got = CpuAttention().decode(query, keys, values, torch.tensor([C]), 1.0)
    want = naive_attention(query[0, 0] * D**0.5, keys[0, 0], values[0, 0])
    # Logits go up to 1152, where float32 numbers are 1.2e-4 apart: so exact are the weights, and no more.
    torch.testing.assert_close(got[0, 0].double(), want, rtol=1e-3, atol=1e-4)


@needs_compiler
def test_decode_of_a_row_does_not_depend_on_the_batch():
    D, C = 64, 1300
    query, keys, values = torch.randn(3, 6, D), torch.randn(3, 2, C, D), torch.randn(3, 2, C, D)
    valid = torch.tensor([C, 70, 900])
    together = kernels.decode_attention(query, keys, values, valid, 0.1)
    for b in range(3):
        alone = kernels.decode_attention(query[b : b + 1], keys[b : b + 1], values[b : b + 1], valid[b : b + 1], 0.1)
        assert torch.equal(alone[0], together[b])


def test_choice_of_backend():
    cpu = torch.device("cpu")
    if kernels.library.available():
        assert isinstance(choose_backend("auto", cpu, torch.bfloat16, 64), CpuAttention)
    assert isinstance(choose_backend("auto", cpu, torch.float16, 64), SdpaAttention)
    assert isinstance(choose_backend("auto", cpu, torch.float32, 40), SdpaAttention)
    with pytest.raises(ConfigurationError, match="head size is 40"):
        choose_backend("cpu", cpu, torch.float32, 40)
    with pytest.raises(ConfigurationError, match="allowed: auto, cpu, sdpa"):
        choose_backend("fast", cpu, torch.float32, 64)
