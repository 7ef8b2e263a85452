"""Decode attention over codes, beside float64 over the numbers that they stand for."""

import itertools

import pytest
import torch

from snapstream.cache import CODES, EntryShape, QuantizedType
from snapstream.cache.codes import rotated
from snapstream.kernels import cpu as kernels
from snapstream.kernels import operations as ops
from snapstream.kernels.buffers import BufferView, Slots, StepBuffers
from snapstream.kernels.cpu.program import CpuProgram
from snapstream.kernels.operations import PlainProgram
from snapstream.kernels.taking import Commit

pytestmark = pytest.mark.skipif(not kernels.library.available(), reason="no kernels, and no C++ compiler")
KINDS = [QuantizedType(CODES[a], CODES[b], torch.float32) for a, b in itertools.product(CODES, repeat=2)]
SHAPES = [  # query heads, KV heads, size of a key, of a value
    (4, 2, 32, 32),
    (9, 3, 64, 64),
    (2, 1, 96, 96),
    (12, 2, 128, 128),
    (10, 1, 256, 256),
    (3, 1, 288, 256),
    (16, 1, 576, 512),
    (4, 2, 192, 192),
    (2, 2, 1024, 1024),
]
VALID = (1, 40, 515, 700)
C = 700


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def filled(shape, kind):
    B = len(VALID)
    cache = shape.empty(B, C, entry_type=kind)
    keys, values = random(B, C, shape.heads, shape.size, seed=1), random(B, C, shape.heads, shape.size, seed=2)
    keys[..., 3] += 40
    keys[..., 7] *= 6
    cache.tensors[-1][:, :, 0], cache.tensors[-1][:, :, 1] = keys.mean(1), keys.std(1).sqrt()
    cache.write(torch.arange(C).expand(B, C), keys, values)
    return cache


def attend(cache, query, size, columns, *, sinks=None, cap=0.0, valid=VALID):
    H = query.shape[1]
    attention = ops.Attend(BufferView("q", size, H), BufferView("out", columns, H), 0, size**-0.5, cap=cap, sinks=sinks)
    buffers = {"q": query.flatten(1).clone(), "out": query.new_zeros(len(query), H * columns)}
    slots = Slots.that_see(torch.tensor(valid), cache.entries)
    CpuProgram([attention], StepBuffers(buffers, slots, [cache], [], query.dtype)).run()
    return buffers["out"].view(len(query), H, columns)


def with_rounded_query(query, cache):
    """A query as kernels multiply it: 8 bits per channel, after it is brought to the frame and rotated."""
    spread = cache.frames[:, :, 1].repeat_interleave(query.shape[1] // cache.heads, 1)
    mixed = rotated(query * spread, cache.rotation)
    step = mixed.abs().amax(-1, keepdim=True) / 127
    return (rotated((mixed / step).round() * step, cache.rotation) / spread).double()


def reference(cache, query, given, columns, *, sinks=None, cap=0.0, valid=VALID):
    """Attention in float64, and how far rounded weights may be off (the norm of a head's result).

    ``given`` is the query before it was rounded, which is multiplied with the centers of the channels.
    """
    numbers = cache.converted(torch.float32)
    group = query.shape[1] // cache.heads
    center = cache.frames[:, :, 0].double().repeat_interleave(group, 1)
    out, bound = torch.zeros(*query.shape[:2], columns).double(), torch.zeros(query.shape[:2]).double()
    for b, h in itertools.product(range(query.shape[0]), range(query.shape[1])):
        n, head = valid[b], h // group
        keys, values = (each[b, head, :n].double() for each in (numbers.keys, numbers.values))
        scale = query.shape[2] ** -0.5
        logits = ((keys - center[b, h]) @ query[b, h] + center[b, h] @ given[b, h].double()) * scale
        logits = cap * torch.tanh(logits / cap) if cap else logits
        extra = [] if sinks is None else [sinks[h].double()]
        weights = torch.cat([logits, *(each[None] for each in extra)]).softmax(0)[:n]
        out[b, h] = weights @ values[:, :columns]
        # Codes are at most 8 or 127 times their scale; in a block, weights times scales are rounded to one step.
        is_coarse = (cache.entry_type.keys if cache.entry.latent else cache.entry_type.values).bits == 4
        most = values.abs().amax() * (8 if is_coarse else 127) / (7 if is_coarse else 127)
        for start in range(0, n, 64):
            block = weights[start : start + 64]
            bound[b, h] += block.max() * most * len(block) * columns**0.5 * (0.5 / (127 if is_coarse else 16383))
    return out, bound


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=lambda sizes: "-".join(map(str, sizes)))
@torch.inference_mode()
def test_attention_equals_float64(sizes, kind):
    """With the rounded query, within what rounded weights can change; and close to what nothing rounded would be."""
    H, N, D, V = sizes
    cache, query = filled(EntryShape(N, D, latent=D != V), kind), random(len(VALID), H, D, seed=3)
    for settings in ({}, {"sinks": random(H, seed=4)}, {"cap": 5.0}):
        if "sinks" in settings and D != V:
            continue  # no model has both
        got = attend(cache, query, D, V, **settings).double()
        want, bound = reference(cache, with_rounded_query(query, cache), query, V, **settings)
        assert bool(((got - want).norm(dim=-1) <= bound + 1e-4 * want.norm(dim=-1)).all())
        exact, _ = reference(cache, query.double(), query, V, **settings)
        assert (got - exact).norm() < 0.03 * exact.norm()


@pytest.mark.parametrize("kind", KINDS, ids=str)
@torch.inference_mode()
def test_what_is_not_finite_stays_in_its_sequence(kind):
    cache, query = filled(EntryShape(3, 64, latent=False), kind), random(len(VALID), 9, 64, seed=3)
    clean = attend(cache, query, 64, 64)
    bad = torch.full((len(VALID), 1, 3, 64), torch.nan)
    first = torch.zeros(len(VALID), 1, dtype=torch.int64)
    broken = cache.clone()
    broken.write(first, bad, bad, torch.tensor([False, True, False, False]))
    got = attend(broken, query, 64, 64)
    assert bool(got[1].isnan().all())
    assert torch.equal(got[[0, 2, 3]], clean[[0, 2, 3]])
    values = cache.clone()
    values.write(first + 5, cache.converted(torch.float32).keys[:, :, 5, None].transpose(1, 2), bad)
    assert bool(attend(values, query, 64, 64)[1:].isnan().all())
    nothing = query.clone()
    nothing[3, 4, 2] = torch.inf
    got = attend(cache, nothing, 64, 64)
    assert bool(got[3, 4].isnan().all())
    assert torch.equal(got[:3], clean[:3])


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@torch.inference_mode()
def test_several_tokens_equal_plain_torch(kind, latent):
    """They are pending, see each other, and are kept as they are, also where a short ring turns within the step."""
    shape, T, H = EntryShape(1 if latent else 2, 160, latent=latent), 4, 6
    cache, columns = filled(shape, kind), 128 if latent else 160
    base, count, limit = [10, 690, 20, 4], [5, 3000, 300, 698], [C, 693, C, C]
    rows = len(VALID) * T
    slots = Slots(
        token=torch.zeros(len(VALID), T, dtype=torch.int64),
        position=torch.tensor(count),
        base=torch.tensor([base]),
        count=torch.tensor([count]),
        limit=torch.tensor([limit]),
        active=torch.tensor([True, True, False, True]),
        forced=torch.full((len(VALID), T), -1),
        taken=torch.zeros(T, len(VALID), dtype=torch.int64),
        drafted=torch.tensor([3, 3, 0, 1]),
        accepted=torch.tensor([4, 3, 0, 1]),
    )
    N, D = shape.heads, shape.size
    value = None if latent else BufferView("kv", D, N, N * D)
    operations = [
        ops.Store(BufferView("kv", D, N), value, 0),
        ops.Attend(BufferView("q", D, H), BufferView("out", columns, H), 0, D**-0.5),
        Commit(),
    ]
    works = []
    for _ in range(2):
        buffers = {"kv": random(rows, 2 * N * D, seed=5), "q": random(rows, H * D, seed=6)}
        buffers["out"] = torch.zeros(rows, H * columns)
        mine = cache.clone()
        works.append(StepBuffers(buffers, slots, [mine], [mine.pending(T)], torch.float32))
    CpuProgram(operations, works[0]).run()
    PlainProgram(operations, works[1]).run()
    used = slots.used().flatten()
    got, want = (each.buffers["out"][used] for each in works)
    assert (got - want).norm() < 0.03 * want.norm()
    for a, b in zip(works[0].caches[0].tensors, works[1].caches[0].tensors, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@torch.inference_mode()
def test_neighbors_and_threads_change_no_bit(kind):
    cache, query = filled(EntryShape(2, 128, latent=False), kind), random(len(VALID), 12, 128, seed=3)
    want, before = attend(cache, query, 128, 128), torch.get_num_threads()
    for row in range(len(VALID)):
        alone = attend(cache.row(row).clone(), query[row : row + 1], 128, 128, valid=VALID[row : row + 1])
        assert torch.equal(alone[0], want[row])
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(attend(cache, query, 128, 128), want)
    finally:
        torch.set_num_threads(before)
