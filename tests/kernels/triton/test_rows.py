"""Norm, rotation and gate, and their fusion with the write to a cache, against plain torch in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.cache import EntryShape
from snapstream.compression import next_entry
from snapstream.kernels import plain
from tests.kernels.triton.devices import DEVICE, DTYPES, TOLERANCE, column, random

pytest.importorskip("triton")
from snapstream.kernels.triton import rows, store
from snapstream.kernels.triton.places import PENDING, RING, STRAIGHT, Places


def close(got, want, dtype):
    """Norms round twice, and rotations take differences of numbers of up to 4."""
    tolerance = 4 * TOLERANCE[dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=tolerance, atol=tolerance)


def angles(tokens, half, dtype, seed=7):
    turns = random(tokens, half, seed=seed, dtype=torch.float64)
    both = torch.cat((turns.cos(), turns.sin()), -1).to(dtype)
    return both[:, :half], both[:, half:]


def wide(angle):
    """As models have it: equal halves, and an axis for heads."""
    return torch.cat((angle, angle), -1)[:, None].double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 40, 64, 96, 128, 192, 576, 4096])
def test_norm(dtype, size):
    x, weight = random(5, 3, size, seed=0, dtype=dtype), random(size, seed=1, dtype=dtype)
    out = torch.empty_like(x)
    rows.norm(x, out, weight, 1e-5)
    close(out, plain.norm(x.double(), weight.double(), 1e-5), dtype)
    rows.norm(x, x, weight, 1e-5)
    assert torch.equal(x, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [2, 40, 64, 96, 128, 192])
@pytest.mark.parametrize("pairs", [False, True])
def test_rotate(dtype, size, pairs):
    x, (cosine, sine) = random(5, 3, size + 6, seed=0, dtype=dtype)[..., :size], angles(5, size // 2, dtype)
    out = torch.empty(5, 3, size, dtype=dtype, device=DEVICE)
    rows.rotate(x, out, cosine, sine, pairs=pairs)
    close(out, plain.rotate(x.double(), wide(cosine), wide(sine), pairs=pairs), dtype)
    rows.rotate(x, x, cosine, sine, pairs=pairs)
    assert torch.equal(x, out)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 70, 1024, 1500])
def test_gate(dtype, size):
    x, out = random(3, 2 * size, seed=0, dtype=dtype), torch.empty(3, size, dtype=dtype, device=DEVICE)
    rows.gate(x, out)
    close(out, plain.gate(x.double()), dtype)


SLOTS = {"count": (0, 3, 39, 40, 100), "base": (4, 4, 20, 20, 30), "limit": (40, 40, 40, 40, 40)}


def places_of(kind, tokens, active):
    count, base, limit = (column(SLOTS[name]) for name in ("count", "base", "limit"))
    if kind == STRAIGHT:
        count = count.clamp(max=20)
    active = None if active is None else torch.tensor(active, device=DEVICE)
    entries = torch.arange(tokens, device=DEVICE).expand(5, tokens)
    if kind != PENDING:
        entries = entries + count[:, None]
    if kind == RING:
        entries = next_entry(entries, base[:, None], limit[:, None])
    return Places(kind, tokens, count, base, limit, active), entries


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [PENDING, STRAIGHT, RING])
@settings(deadline=None, max_examples=4)
@given(
    size=st.sampled_from((64, 96, 128)),
    heads=st.sampled_from((1, 3)),
    tokens=st.sampled_from((1, 4, 19)),
    normed=st.booleans(),
    active=st.sampled_from((None, (True, False, True, True, False))),
    seed=st.integers(0, 99),
)
def test_grouped_store(dtype, kind, size, heads, tokens, normed, active, seed):
    B, N = 5, 2
    H = N * heads
    if kind == RING:  # in a launch, no two tokens of a slot go to one entry, and the shortest ring has ten
        tokens = min(tokens, 10)
    cache = EntryShape(N, size, latent=False).empty(B, 64, entry_type=dtype, device=DEVICE)
    qkv = random(B * tokens, (H + 2 * N) * size, seed=seed, dtype=dtype)
    cosine, sine = angles(B * tokens, size // 2, dtype)
    weights = [random(size, seed=seed + n, dtype=dtype) for n in (1, 2)]
    places, entries = places_of(kind, tokens, active)
    query, key, value = qkv.double().view(B * tokens, -1, size).split((H, N, N), 1)
    if normed:
        query, key = (plain.norm(x, w.double(), 1e-5) for x, w in zip((query, key), weights, strict=True))
    query, key = (plain.rotate(x, wide(cosine), wide(sine), pairs=False) for x in (query, key))
    target = torch.full_like(qkv, 5.0)
    store.store_grouped(qkv, target, cosine, sine, cache, places, (*weights, 1e-5) if normed else None)
    want = EntryShape(N, size, latent=False).empty(B, 64, entry_type=torch.float64, device=DEVICE)
    is_active = torch.ones(B, dtype=torch.bool, device=DEVICE) if active is None else places.active
    want.write(entries, key.view(B, tokens, N, size), value.view(B, tokens, N, size), is_active)
    for mine, theirs in zip(cache.tensors, want.tensors, strict=True):
        close(mine, theirs, dtype)
    of_active = is_active.repeat_interleave(tokens)
    close(target.view(B * tokens, -1, size)[of_active, :H], query[of_active], dtype)
    assert (target[~of_active] == 5.0).all()
    assert (target[:, H * size :] == 5.0).all()
    store.store_grouped(qkv, qkv, cosine, sine, cache, places, (*weights, 1e-5) if normed else None)
    assert torch.equal(qkv[of_active, : H * size], target[of_active, : H * size])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [PENDING, STRAIGHT, RING])
@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize(("rank", "rope"), [(512, 64), (96, 32), (40, 8)])
@pytest.mark.parametrize("active", [None, (True, False, True, True, False)])
def test_latent_store(dtype, kind, pairs, rank, rope, active):
    B, tokens = 5, 3
    shape = EntryShape(1, rank + rope, latent=True)
    cache = shape.empty(B, 64, entry_type=dtype, device=DEVICE)
    source, weight = random(B * tokens, rank + rope, seed=0, dtype=dtype), random(rank, seed=1, dtype=dtype)
    cosine, sine = angles(B * tokens, rope // 2, dtype)
    places, entries = places_of(kind, tokens, active)
    store.store_latent(source, cosine, sine, cache, places, (weight, 1e-5), pairs=pairs)
    compressed, key = source.double()[:, None].split((rank, rope), -1)
    key = plain.rotate(key, wide(cosine), wide(sine), pairs=pairs)
    latent = torch.cat((plain.norm(compressed, weight.double(), 1e-5), key), -1).view(B, tokens, 1, -1)
    want = shape.empty(B, 64, entry_type=torch.float64, device=DEVICE)
    want.write(entries, latent, latent, places.active)
    close(cache.keys, want.keys, dtype)
