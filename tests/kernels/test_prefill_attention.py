"""The prefill kernels, with whatever instructions this processor has, against float64 and against torch's own."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from snapstream.kernels import cpu as kernels
from tests.kernels.threads import on_threads

pytestmark = pytest.mark.skipif(not kernels.library.available(), reason="no kernels, and no C++ compiler")
BFLOAT16 = [name for name in kernels.INSTRUCTIONS if kernels.library.available() and kernels.available()]
BFLOAT16 = [name for name in BFLOAT16 if kernels.has_instructions(name)]
KINDS = [(torch.float32, "portable"), *((torch.bfloat16, name) for name in BFLOAT16)]
SIZES = [*range(32, 257, 32), 576]


def draw(seed, dtype, *, heads, group, size, start, tokens, spare=0, loud=1.0):
    """Query, keys and values of a chunk; of latents, values are the first numbers of keys."""
    generator = torch.Generator().manual_seed(seed)
    query = (torch.randn(tokens, heads * group, size, generator=generator) * loud).to(dtype)
    keys, values = torch.randn(2, heads, start + tokens + spare, size, generator=generator).to(dtype)
    return query, keys, keys[..., :512] if size > 512 else values


def attend(query, keys, values, start, instructions, scale=None, **how):
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return kernels.prefill_attention(query, keys, values, torch.tensor(start), scale, instructions=instructions, **how)


def peer(query, keys, values, start, dtype=torch.float64, window=0, cap=0.0, sinks=None):
    """The same by torch, in its layout: every head with keys and values of its own."""
    end, group = start + query.shape[0], query.shape[1] // keys.shape[0]
    mask = torch.ones(query.shape[0], end).tril(start).bool()
    if window:
        mask &= torch.ones(query.shape[0], end).triu(start + 1 - window).bool()
    query = query.transpose(0, 1).to(dtype)
    keys, values = (each[:, :end].repeat_interleave(group, 0).to(dtype) for each in (keys, values))
    if not cap and sinks is None:
        out = F.scaled_dot_product_attention(query[None], keys[None], values[None], attn_mask=mask)[0]
        return out.transpose(0, 1)
    logits = query @ keys.transpose(1, 2) * query.shape[-1] ** -0.5
    logits = torch.where(mask, cap * (logits / cap).tanh() if cap else logits, -torch.inf)
    own = torch.full((len(query), 1), -torch.inf) if sinks is None else sinks[:, None]
    total = logits.logsumexp(-1).logaddexp(own.to(dtype))
    return ((logits - total[..., None]).exp() @ values).transpose(0, 1)


def chunks_of(length, cuts):
    edges = sorted({0, length, *(cut % length for cut in cuts)})
    return list(itertools.pairwise(edges))


@pytest.mark.parametrize(("dtype", "instructions"), KINDS)
@settings(deadline=None, max_examples=40)
@given(
    size=st.sampled_from(SIZES),
    heads=st.integers(1, 3),
    group=st.integers(1, 8),
    start=st.integers(0, 300),
    tokens=st.integers(1, 200),
    spare=st.integers(0, 100),
    loud=st.sampled_from([0.1, 1.0, 6.0]),
    window=st.sampled_from([0, 1, 5, 63, 64, 65, 130, 1000]),
    cap=st.sampled_from([0.0, 0.0, 2.5, 50.0]),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_equals_float64(
    dtype, instructions, size, heads, group, start, tokens, spare, loud, window, cap, has_sinks, seed
):
    shape = {"heads": heads, "group": group, "size": size, "start": start, "tokens": tokens}
    query, keys, values = draw(seed, dtype, **shape, spare=spare, loud=loud)
    keys[:, start + tokens :] = float("nan")  # nobody may look at what has not been written
    values[:, start + tokens :] = float("nan")
    sinks = torch.randn(heads * group, generator=torch.Generator().manual_seed(seed)) * 4 if has_sinks else None
    how = {"window": window, "cap": cap, "sinks": sinks}
    got = attend(query, keys, values, start, instructions, **how)
    assert got.dtype == dtype
    assert got.shape == (tokens, heads * group, values.shape[-1])
    assert got.is_contiguous()
    tolerance = 2e-5 * max(1, loud) if dtype == torch.float32 else 2e-2  # errors of scores grow with them
    want = peer(query, keys, values, start, **how)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("instructions", BFLOAT16)
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("loud", [0.3, 1.0, 4.0])
def test_errors_in_bfloat16_are_no_larger_than_torchs(instructions, size, loud):
    query, keys, values = draw(1, torch.bfloat16, heads=2, group=3, size=size, start=700, tokens=512, loud=loud)
    exact = peer(query, keys, values, 700)
    ours = (attend(query, keys, values, 700, instructions).double() - exact).abs()
    theirs = (peer(query, keys, values, 700, torch.bfloat16).double() - exact).abs()
    assert ours.mean() <= 1.01 * theirs.mean()
    worst = [errors.flatten().topk(100).values.mean() for errors in (ours, theirs)]  # one alone is chance
    assert worst[0] <= 1.02 * worst[1]


@pytest.mark.parametrize(("dtype", "instructions"), KINDS)
@settings(deadline=None, max_examples=15)
@given(
    size=st.sampled_from(SIZES),
    group=st.sampled_from([1, 3, 8]),
    length=st.integers(1, 400),
    cuts=st.lists(st.integers(0, 399), max_size=4),
    window=st.sampled_from([0, 1, 30, 64, 150]),
    seed=st.integers(0, 99),
)
def test_chunks_do_not_change_a_bit(dtype, instructions, size, group, length, cuts, window, seed):
    """Nor does it matter whether values are packed once, chunk by chunk, or anew each time."""
    query, keys, values = draw(seed, dtype, heads=2, group=group, size=size, start=0, tokens=length, loud=3.0)
    whole = attend(query, keys, values, 0, instructions, window=window)
    packed = torch.full(kernels.packed_shape(values.shape, instructions), float("nan"), dtype=dtype)
    written = torch.full_like(keys, float("nan"))
    written_values = written[..., : values.shape[-1]] if size > 512 else torch.full_like(values, float("nan"))
    for start, end in chunks_of(length, cuts):
        written[:, start:end], written_values[:, start:end] = keys[:, start:end], values[:, start:end]
        at = torch.tensor(start)
        got = kernels.prefill_attention(
            query[start:end],
            written,
            written_values,
            at,
            size**-0.5,
            window=window,
            packed=packed,
            packed_until=at,
            instructions=instructions,
        )
        assert torch.equal(got, whole[start:end])
        alone = attend(query[start:end], keys, values, start, instructions, window=window)
        assert torch.equal(alone, whole[start:end])


@pytest.mark.parametrize(("dtype", "instructions"), KINDS)
def test_threads_do_not_change_a_bit(dtype, instructions):
    query, keys, values = draw(5, dtype, heads=3, group=5, size=96, start=130, tokens=333, loud=3.0)
    on_threads(lambda: attend(query, keys, values, 130, instructions))


@pytest.mark.parametrize(("dtype", "instructions"), KINDS)
def test_rows_may_lie_anywhere(dtype, instructions):
    """Heads and tokens in another order, and rows of a larger buffer."""
    query, keys, values = draw(2, dtype, heads=2, group=3, size=64, start=40, tokens=70)
    want = attend(query, keys, values, 40, instructions)
    by_head = query.transpose(0, 1).contiguous().transpose(0, 1)
    by_token = keys.transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.zeros(2, 110, 160, dtype=dtype)
    wide[..., 64:128] = values
    assert torch.equal(attend(by_head, by_token, wide[..., 64:128], 40, instructions), want)


@pytest.mark.parametrize(("dtype", "instructions"), KINDS)
@pytest.mark.parametrize("rising", [True, False])
def test_large_logits(dtype, instructions, rising):
    """The running maximum grows in every block, or is far above all later ones; nothing overflows or is lost."""
    length, size = 500, 32
    slope = torch.linspace(-6, 6, length) * (1 if rising else -1)
    keys = slope[:, None].expand(length, size).contiguous()[None].to(dtype)
    values = torch.randn(1, length, size, generator=torch.Generator().manual_seed(0)).to(dtype)
    query = torch.full((3, 2, size), 9.0, dtype=dtype)
    got = attend(query, keys, values, length - 3, instructions)
    tolerance = 1e-3 if dtype == torch.float32 else 1e-2
    want = peer(query, keys, values, length - 3)
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance)


def test_arguments_are_checked():
    query, keys, values = torch.randn(4, 2, 64), torch.randn(1, 9, 64), torch.randn(1, 9, 64)
    with pytest.raises(ValueError, match="tokens 6 to 10 do not fit into a cache of 9"):
        attend(query, keys, values, 6, "portable")
    with pytest.raises(ValueError, match="tokens -1 to 3"):
        attend(query, keys, values, -1, "portable")
    with pytest.raises(ValueError, match="multiples of 32"):
        attend(query[..., :40], keys[..., :40], values, 0, "portable")
    with pytest.raises(ValueError, match="shapes do not match"):
        attend(query, keys, values[:, :5], 0, "portable")
    with pytest.raises(ValueError, match="dtypes do not match"):
        attend(query, keys.bfloat16(), values, 0, "portable")
    with pytest.raises(ValueError, match="float32 or bfloat16"):
        attend(query.half(), keys.half(), values.half(), 0, "portable")
    with pytest.raises(ValueError, match="scale must be positive"):
        attend(query, keys, values, 0, "portable", scale=-1.0)
    with pytest.raises(ValueError, match="elements of a head must be contiguous"):
        attend(query.transpose(0, 2).contiguous().transpose(0, 2), keys, values, 0, "portable")


@pytest.mark.skipif(len(BFLOAT16) < 2, reason="this processor multiplies float32 only")
def test_memory_of_packed_values_is_checked():
    query, keys, values = (torch.randn(*shape).bfloat16() for shape in ((4, 2, 64), (1, 90, 64), (1, 90, 64)))
    small = torch.empty(1, 1, 64, kernels.BLOCK, dtype=torch.bfloat16)
    zero = torch.tensor(0)
    with pytest.raises(ValueError, match="expected packed values"):
        kernels.prefill_attention(
            query, keys, values, torch.tensor(80), 0.1, packed=small, packed_until=zero, instructions=BFLOAT16[-1]
        )
