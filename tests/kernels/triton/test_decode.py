"""Attention of a decode step against the definition in float64: one token per slot, and several."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.cache import EntryShape
from snapstream.kernels.buffers import Slots
from tests.kernels.triton.devices import DEVICE, DTYPES, SIZES, TOLERANCE, column, random
from tests.reference import naive_attention

pytest.importorskip("triton")
from snapstream.kernels.triton import decode

ENTRIES = 150
BORDERS = (0, 1, 31, 32, 33, 63, 64, 65, 128, ENTRIES - 1, ENTRIES)


def slots_of(layouts, tokens, active):
    """Slots with ``(base, count, limit)`` each."""
    base, count, limit = (column(each) for each in zip(*layouts, strict=True))
    nothing = torch.zeros_like(base)
    return Slots(
        token=torch.zeros(len(layouts), tokens, dtype=torch.int64, device=DEVICE),
        position=nothing,
        base=base[None],
        count=count[None],
        limit=limit[None],
        active=torch.tensor(active, device=DEVICE),
        forced=nothing[:, None],
        taken=nothing[None],
    )


def check(size, dtype, group, layouts, tokens, splits, seed, active=None, cap=0.0, has_sinks=False):
    """Compare a launch with what each token is to see, token by token and head by head."""
    B, N, latent = len(layouts), 1 if size > 256 else 2, size > 256
    H, columns = N * group, 512 if size == 576 else size
    active = [True] * B if active is None else active
    shape = EntryShape(N, size, latent=latent)
    cache, pending = (shape.empty(B, entries, entry_type=dtype, device=DEVICE) for entries in (ENTRIES, tokens))
    for index, tensor in enumerate((*cache.tensors, *pending.tensors)):
        tensor.copy_(random(*tensor.shape, seed=seed + index, dtype=dtype))
    stored = [min(count + (tokens == 1), limit) for _, count, limit in layouts]
    for slot, entries in enumerate(stored):
        for tensor in cache.tensors:
            tensor[slot, :, entries:] = float("nan")  # what was never written must not be looked at
    query = random(B * tokens, H, size, seed=seed + 9, dtype=dtype, scale=3.0)
    out = torch.full((B * tokens, H, columns), 7.0, dtype=dtype, device=DEVICE)
    scale = size**-0.5
    waiting = pending if tokens > 1 else None
    sinks = random(H, seed=seed + 5, dtype=torch.float32, scale=4.0) if has_sinks else None
    slots = slots_of(layouts, tokens, active)
    decode.attend_slots(query, out, cache, waiting, slots, scale, cap=cap, sinks=sinks, splits=splits)
    for slot, (base, count, limit) in enumerate(layouts):
        if not active[slot]:
            assert (out[slot * tokens : (slot + 1) * tokens] == 7.0).all()
            continue
        for head in range(N):
            keys = [cache.keys[slot, head, e].double().cpu() for e in range(stored[slot])]
            values = [cache.values[slot, head, e, :columns].double().cpu() for e in range(stored[slot])]
            for t in range(tokens):
                if tokens > 1:  # put the token where it will be once it is certain
                    entry = count + t if count + t < limit else base + (count + t - base) % (limit - base)
                    for old, new in ((keys, pending.keys), (values, pending.values)):
                        row = new[slot, head, t, : columns if old is values else size].double().cpu()
                        old[entry : entry + 1] = [row]
                for member in range(head * group, (head + 1) * group):
                    row = slot * tokens + t
                    sink = None if sinks is None else sinks[member].cpu()
                    want = naive_attention(query[row, member].cpu(), torch.stack(keys), torch.stack(values), cap, sink)
                    torch.testing.assert_close(
                        out[row, member].double().cpu(), want, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
                    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@settings(deadline=None, max_examples=4)
@given(
    group=st.sampled_from((1, 3, 4)),
    counts=st.lists(st.integers(0, ENTRIES + 40) | st.sampled_from(BORDERS), min_size=1, max_size=3),
    splits=st.sampled_from((1, 4)),
    cap=st.sampled_from((0.0, 0.0, 2.5)),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_one_token(size, dtype, group, counts, splits, cap, has_sinks, seed):
    layouts = [(20, count, ENTRIES) for count in counts]
    check(size, dtype, group, layouts, 1, splits, seed, cap=cap, has_sinks=has_sinks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@settings(deadline=None, max_examples=3)
@given(
    group=st.sampled_from((1, 4)),
    counts=st.lists(st.integers(0, 3 * ENTRIES) | st.sampled_from(BORDERS), min_size=1, max_size=2),
    base=st.integers(0, 140),
    ring=st.integers(1, 60),
    tokens=st.sampled_from((2, 5)),
    splits=st.sampled_from((1, 4)),
    cap=st.sampled_from((0.0, 0.0, 2.5)),
    has_sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_several_tokens(size, dtype, group, counts, base, ring, tokens, splits, cap, has_sinks, seed):
    """Each sees those before it, and what they have not taken the place of; rings may be shorter than the step."""
    layouts = [(base, count, min(base + ring, ENTRIES)) for count in counts]
    check(size, dtype, group, layouts, tokens, splits, seed, cap=cap, has_sinks=has_sinks)


@pytest.mark.parametrize("splits", [1, 2, 8])
def test_every_border(splits):
    check(64, torch.float32, 2, [(10, count, ENTRIES) for count in BORDERS], 1, splits, seed=3)


def test_more_heads_than_rows_of_a_tile():
    """As latents have: several tiles read the same entries."""
    check(576, torch.float32, 80, [(10, 70, ENTRIES)], 1, 2, seed=1)
    check(64, torch.float32, 40, [(10, 149, ENTRIES)], 4, 2, seed=1)


@pytest.mark.parametrize("tokens", [1, 3])
def test_free_slots_are_left_alone(tokens):
    layouts = [(10, 50, ENTRIES), (10, 60, ENTRIES), (10, 400, ENTRIES)]
    check(64, torch.bfloat16, 2, layouts, tokens, 4, seed=2, active=[True, False, True])
    check(64, torch.bfloat16, 2, layouts, tokens, 1, seed=2, active=[False, False, False])


def test_large_logits_and_a_rescaled_maximum():
    """The running maximum grows from tile to tile; nothing overflows or is lost."""
    cache = EntryShape(1, 64, latent=False).empty(1, ENTRIES, entry_type=torch.float32, device=DEVICE)
    cache.tensors[0].copy_(torch.linspace(-4, 4, ENTRIES)[:, None].expand(1, 1, ENTRIES, 64))
    cache.tensors[1].copy_(random(1, 1, ENTRIES, 64, seed=0, dtype=torch.float32))
    query, out = torch.full((1, 1, 64), 4.0, device=DEVICE), torch.zeros(1, 1, 64, device=DEVICE)
    decode.attend_slots(query, out, cache, None, slots_of([(4, ENTRIES - 1, ENTRIES)], 1, [True]), 1.0, splits=2)
    want = naive_attention(query[0, 0].cpu() * 8, cache.keys[0, 0].cpu(), cache.values[0, 0].cpu())
    torch.testing.assert_close(out[0, 0].double().cpu(), want, rtol=1e-3, atol=1e-4)


def test_splits():
    """Few slots are split, many are not, and never into more parts than are of use."""
    assert decode.splits_of(1, 8, 4096, 132) == 32
    assert decode.splits_of(64, 8, 4096, 132) == 4
    assert decode.splits_of(256, 8, 4096, 132) == 1
    assert decode.splits_of(1, 8, 128, 132) == 1
    assert decode.splits_of(16, 8, 4096, 132) == 16
