"""Key differences against the definition in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.compression.keys import EVERYWHERE
from tests.kernels.test_choice import differences_in_float64
from tests.kernels.triton.devices import DEVICE, DTYPES, SIZES, column, random

pytest.importorskip("triton")
from snapstream.kernels.triton.keys import PIECE, key_differences


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@settings(deadline=None, max_examples=5)
@given(
    length=st.integers(1, 300) | st.sampled_from((PIECE - 1, PIECE, PIECE + 1)),
    sink=st.sampled_from((0, 1, 4)),
    odd=st.sampled_from((None, float("inf"), float("nan"), 0.0)),
    near=st.sampled_from((EVERYWHERE, 1, 7, 32, 100)),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_differences(size, dtype, length, sink, odd, near, seed, data):
    near = min(near, length)
    ends = [data.draw(st.integers(0, length)) for _ in range(2)]
    rows = random(2, length + 1, 2, size, seed=seed, dtype=dtype).transpose(1, 2)[:, :, 1:]
    rows = rows + random(size, seed=seed + 1, dtype=dtype)
    if odd is not None:
        rows[0, 1, length // 2, :: 1 if odd == 0 else 3] = odd  # a key of no length, or with numbers that are none
    want = differences_in_float64(rows, torch.tensor(ends), sink, near)
    for b, end in enumerate(ends):
        rows[b, :, end:] = float("nan")
    got = key_differences(rows, column(ends), sink, near)
    torch.testing.assert_close(got.cpu().double(), want, rtol=0, atol=3e-6)


def test_a_longer_buffer_changes_nothing():
    keys = random(1, 2, 2000, 64, seed=0, dtype=torch.float32)
    for near in (EVERYWHERE, 32):
        long, short = (key_differences(each, column([1500]), 4, near) for each in (keys, keys[:, :, :1500]))
        torch.testing.assert_close(long[..., :1500], short, rtol=0, atol=1e-6)
        assert not long[..., 1500:].any()
        assert long.device.type == DEVICE.type
