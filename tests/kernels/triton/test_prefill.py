"""Attention of a chunk of a prompt against torch's in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.triton.devices import DEVICE, DTYPES, SIZES, TOLERANCE, random

pytest.importorskip("triton")
from snapstream.attention.triton import TritonAttention
from snapstream.kernels import plain
from snapstream.kernels.triton.prefill import attend_chunk


def check(attend, size, dtype, group, start, chunk, spare, seed, cap=0.0, has_sinks=False):
    N, L = (1 if size == 576 else 2), start + chunk + spare
    query = random(chunk, N * group, size, seed=seed, dtype=dtype, scale=2.0)
    keys = random(N, L, size, seed=seed + 1, dtype=dtype)
    values = keys[..., :512] if size == 576 else random(N, L, size, seed=seed + 2, dtype=dtype)
    end = start + chunk
    keys[:, end:] = float("nan")
    values[:, end:] = float("nan")
    sinks = random(N * group, seed=seed + 3, dtype=torch.float32, scale=4.0) if has_sinks else None
    got = attend(query, keys, values, torch.tensor(start, device=DEVICE), size**-0.5, cap=cap, sinks=sinks)
    want = plain.attend(
        query.transpose(0, 1).double(),
        keys[:, :end].double().repeat_interleave(group, 0),
        values[:, :end].double().repeat_interleave(group, 0),
        torch.ones(chunk, end, device=DEVICE).tril(start).bool(),
        size**-0.5,
        cap,
        None if sinks is None else sinks[:, None],
    ).transpose(0, 1)
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@settings(deadline=None, max_examples=5)
@given(
    group=st.sampled_from((1, 3)),
    start=st.integers(0, 150) | st.sampled_from((0, 31, 32, 63, 64, 128)),
    chunk=st.integers(1, 140) | st.sampled_from((1, 16, 32, 64, 65, 128, 129)),
    spare=st.integers(0, 40),
    cap=st.sampled_from((0.0, 0.0, 2.5)),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_a_chunk(size, dtype, group, start, chunk, spare, cap, has_sinks, seed):
    check(attend_chunk, size, dtype, group, start, chunk, spare, seed, cap, has_sinks)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "chunk"), [(0, 1), (200, 1), (70, 50)])
@pytest.mark.parametrize("special", [False, True])
def test_whatever_the_backend_chooses(size, dtype, start, chunk, special):
    """A single token is decoded; where there is a device, torch's flash kernels take what they can."""
    backend = TritonAttention.for_heads(DEVICE, dtype, size, 512 if size == 576 else size)
    check(backend.prefill, size, dtype, 2, start, chunk, 10, 5, 3.0 * special, special)
