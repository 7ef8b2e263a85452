"""Codes of cache entries: written as plain torch writes them, and attended to as to what they stand for."""

import itertools

import pytest
import torch

from snapstream.cache import CODES, EntryShape, QuantizedType
from snapstream.cache.codes import rotation_of
from snapstream.cache.quantized import plain_encode
from snapstream.kernels import operations as ops
from snapstream.kernels.buffers import BufferView, StepBuffers
from snapstream.kernels.operations import PlainProgram, Store
from snapstream.kernels.taking import Commit
from tests.kernels.triton.devices import DEVICE, column, random
from tests.kernels.triton.test_decode import slots_of

pytest.importorskip("triton")
from snapstream.kernels.triton import codes as kernels
from snapstream.kernels.triton.program import TritonProgram

KINDS = [QuantizedType(CODES[a], CODES[b], torch.float32) for a, b in itertools.product(CODES, repeat=2)]
SHAPES = [EntryShape(2, 64, latent=False), EntryShape(1, 96, latent=False), EntryShape(1, 160, latent=True)]
ENTRIES = 90


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [32, 96, 128, 160])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_same_codes(size, bits, dtype):
    """But for numbers in the middle between two codes."""
    codes = next(each for each in CODES.values() if each.bits == bits)
    numbers = (random(2, 21, size, seed=1, dtype=torch.float32) * random(size, seed=2, dtype=torch.float32).exp()).to(
        dtype
    )
    numbers[0, 3], numbers[1, 2, 5], numbers[1, 7, 1] = 0, torch.nan, torch.inf
    frame = random(2, 2, size, seed=3, dtype=torch.float32)
    frame[:, 1] = frame[:, 1].abs() + 0.1
    for given, latent in itertools.product((frame, None), (False, True)):
        mine, plain = torch.zeros(2, 2, 30, codes.nbytes(size), dtype=torch.uint8, device=DEVICE)
        width = rotation_of(size, latent=latent)
        kernels.encode(numbers, given, width, bits, mine[:, :21])
        plain_encode(numbers, given, width, bits, plain[:, :21])
        a, b = codes.decoded(mine[:, :21]), codes.decoded(plain[:, :21])
        assert torch.equal(a.isnan(), b.isnan())
        assert (mine != plain).float().mean() < 0.01
        torch.testing.assert_close(a, b, rtol=0.3, atol=0.02 * float(b.nan_to_num().abs().max()), equal_nan=True)
        assert not mine[:, 21:].any()


def work(shape, kind, tokens, seed=0, size_of_values=1.0):
    """A step over random caches of codes, with tokens to store."""
    layouts = [(20, 5, ENTRIES), (20, ENTRIES + 33, ENTRIES), (10, 60, 75), (4, 40, ENTRIES)]
    active = [True, True, False, True]
    B, group = len(layouts), 3
    H, columns = shape.heads * group, 128 if shape.latent else shape.size
    cache = shape.empty(B, ENTRIES, entry_type=kind, device=DEVICE)
    numbers = [random(B, ENTRIES, shape.heads, shape.size, seed=seed + n, dtype=torch.float32) for n in range(2)]
    numbers[0][..., 5] += 30.0
    numbers[1] *= size_of_values
    cache.frames[:, :, 0], cache.frames[:, :, 1] = numbers[0].mean(1), numbers[0].std(1).sqrt()
    cache.write(torch.arange(ENTRIES, device=DEVICE).expand(B, ENTRIES), *numbers)
    key = BufferView("kv", shape.size, shape.heads)
    value = BufferView("kv", shape.size, shape.heads, shape.heads * shape.size)
    operations = [
        Store(key, None if shape.latent else value, 0),
        ops.Attend(BufferView("q", shape.size, H), BufferView("out", columns, H), 0, shape.size**-0.5),
    ]
    rows = B * tokens
    buffers = {
        "kv": random(rows, 2 * shape.heads * shape.size, seed=seed + 7, dtype=torch.float32),
        "q": random(rows, H * shape.size, seed=seed + 8, dtype=torch.float32),
        "out": torch.full((rows, H * columns), 7.0, device=DEVICE),
    }
    slots = slots_of(layouts, tokens, active)
    pending = [cache.pending(tokens)] if tokens > 1 else []
    return operations, StepBuffers(buffers, slots, [cache], pending, torch.float32)


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("shape", SHAPES, ids=["grouped", "odd", "latent"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_step_equals_plain_torch(kind, shape, tokens, splits):
    operations, mine = work(shape, kind, tokens)
    _, plain = work(shape, kind, tokens)
    TritonProgram(operations, mine, splits=splits).run()
    PlainProgram(operations, plain).run()
    for got, want in zip((*mine.caches, *mine.pending), (*plain.caches, *plain.pending), strict=True):
        for a, b in zip(got.tensors, want.tensors, strict=True):
            assert (a != b).float().mean() < 0.01
    torch.testing.assert_close(mine.buffers["out"], plain.buffers["out"], rtol=2e-2, atol=2e-2)
    assert (mine.buffers["out"].view(4, tokens, -1)[2] == 7.0).all()


@pytest.mark.parametrize("shape", SHAPES, ids=["grouped", "odd", "latent"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_accepted_tokens_are_stored_as_they_are(kind, shape):
    (_, mine), (_, plain) = work(shape, kind, 3), work(shape, kind, 3)
    for each in (mine, plain):
        each.slots = slots_of([(20, 5, ENTRIES), (20, 400, ENTRIES), (10, 60, 75), (4, 89, ENTRIES)], 3, [True] * 4)
        object.__setattr__(each.slots, "accepted", column([3, 2, 0, 1]))
        for number, tensor in enumerate(each.pending[0].tensors[: each.pending[0].stored]):
            tensor.copy_(torch.arange(tensor.numel(), device=DEVICE).view(tensor.shape) * (number + 3) % 251)
    TritonProgram([Commit()], mine).run()
    PlainProgram([Commit()], plain).run()
    for a, b in zip(mine.caches[0].tensors, plain.caches[0].tensors, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [*SHAPES, EntryShape(2, 128, latent=False)], ids=str)
@pytest.mark.parametrize("kind", KINDS[::3], ids=str)
def test_narrow_activations(kind, shape, dtype):
    operations, mine = work(shape, kind, 1)
    _, plain = work(shape, kind, 1)
    for each in (mine, plain):
        each.dtype = dtype
        each.buffers = {name: buffer.to(dtype) for name, buffer in each.buffers.items()}
    TritonProgram(operations, mine, splits=2).run()
    PlainProgram(operations, plain).run()
    torch.testing.assert_close(mine.buffers["out"], plain.buffers["out"], rtol=0.05, atol=0.05)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="the interpreter multiplies in float32")
@pytest.mark.parametrize("kind", KINDS[::3], ids=str)
def test_small_values_in_float16(kind):
    """A weight times the scale of an entry would have few digits."""
    shape, size = SHAPES[0], 1e-3
    operations, mine = work(shape, kind, 1, size_of_values=size)
    _, exact = work(shape, kind, 1, size_of_values=size)
    mine.dtype = torch.float16
    mine.buffers = {name: buffer.half() for name, buffer in mine.buffers.items()}
    for each in (mine, exact):
        each.buffers["q"] *= 0.1  # so that all weights are alike, and small
    TritonProgram(operations[1:], mine, splits=2).run()
    PlainProgram(operations[1:], exact).run()
    off = (mine.buffers["out"].float() - exact.buffers["out"]).view(4, -1)[[0, 1, 3]]
    assert off.norm() < 5e-3 * exact.buffers["out"].view(4, -1)[[0, 1, 3]].norm()


def test_caps_and_sinks_see_the_centers_of_keys():
    """Without them, what the centers add to all logits alike changes nothing."""
    shape, kind = SHAPES[0], KINDS[0]
    operations, mine = work(shape, kind, 1)
    _, plain = work(shape, kind, 1)
    attend = operations[1]
    sinks = random(attend.query.heads, seed=5, dtype=torch.float32)
    for cap, own in ((3.0, None), (0.0, sinks), (3.0, sinks)):
        step = [operations[0], ops.Attend(attend.query, attend.target, 0, attend.scale, cap=cap, sinks=own)]
        TritonProgram(step, mine).run()
        PlainProgram(step, plain).run()
        torch.testing.assert_close(mine.buffers["out"], plain.buffers["out"], rtol=2e-2, atol=2e-2)
