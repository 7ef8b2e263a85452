"""Entries as codes: what they stand for, and caches of them."""

import itertools

import pytest
import torch

from snapstream import ConfigurationError, EngineConfig
from snapstream.attention import choose_backend  # registers the kernels
from snapstream.cache import CODES, EntryShape, QuantizedType, type_name
from snapstream.cache.codes import BLOCK, INT4, INT8, frame_of, rotated, rotation_of
from snapstream.cache.quantized import encode, plain_encode
from snapstream.engine.cache_settings import choose_entry_type
from snapstream.kernels import cpu

assert choose_backend
TYPES = [QuantizedType(CODES[a], CODES[b], torch.float32) for a, b in itertools.product(CODES, repeat=2)]
SHAPES = [EntryShape(3, 64, latent=False), EntryShape(1, 96, latent=True)]


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def with_outliers(*shape, seed=0):
    """Keys as Qwen2.5 has them: a few channels have a large bias."""
    keys = random(*shape, seed=seed)
    keys[..., 5] += 300.0
    keys[..., 40] -= 120.0
    return keys


def error(got, want):
    return float((got - want).norm() / want.norm())


def test_rotation_is_its_own_inverse():
    for size, latent in ((32, False), (96, False), (128, False), (576, True)):
        x, width = random(4, size), rotation_of(size, latent=latent)
        mixed = rotated(x, width)
        torch.testing.assert_close(rotated(mixed, width), x, rtol=0, atol=1e-5)
        torch.testing.assert_close(mixed.norm(dim=-1), x.norm(dim=-1))
        hadamard = rotated(torch.eye(width), width)
        assert bool((hadamard.abs() - width**-0.5).abs().max() < 1e-6)
    assert [rotation_of(size, latent=False) for size in (96, 128, 192)] == [32, 128, 64]
    assert rotation_of(576, latent=True) == BLOCK


@pytest.mark.parametrize("codes", [INT8, INT4], ids=lambda codes: codes.name)
def test_codes_are_the_nearest_there_are(codes):
    x = random(50, 96, seed=1) * random(50, 1, seed=2).exp()
    stored = codes.encoded(x)
    assert stored.dtype == torch.uint8
    assert stored.shape == (50, codes.nbytes(96))
    parts = x.view(50, -1, 96 if codes is INT8 else BLOCK)
    peak = parts.abs().amax(-1, keepdim=True)
    step = peak / (127 if codes is INT8 else 8)
    # Half a step; with 4 bits there is no 8 where -8 is the furthest number, and scales are bfloat16.
    most = step * (0.5001 if codes is INT8 else 1.04)
    off = (codes.decoded(stored).view_as(parts) - parts).abs()
    assert bool((off <= most).all())
    assert bool(((off <= 0.54 * step) | (parts.abs() > 7.4 * step)).all())


@pytest.mark.parametrize("codes", [INT8, INT4], ids=lambda codes: codes.name)
def test_zeros_and_what_is_not_finite(codes):
    x = random(6, 64)
    x[0] = 0
    x[1] = 1e-38
    x[2, 3], x[3, 40], x[4, 63] = torch.nan, torch.inf, -torch.inf
    numbers = codes.decoded(codes.encoded(x))
    assert bool((numbers[:2].abs() < 1e-30).all())
    for row, place in ((2, 3), (3, 40), (4, 63)):
        in_part = slice(None) if codes is INT8 else slice(place // BLOCK * BLOCK, place // BLOCK * BLOCK + BLOCK)
        assert bool(numbers[row, in_part].isnan().all())
    assert bool(numbers[5].isfinite().all())


@pytest.mark.skipif(not cpu.library.available(), reason="no kernels, and no C++ compiler")
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [32, 96, 128, 256, 576])
def test_the_kernel_gives_the_same_codes(size, dtype, bits):
    assert cpu.available()
    codes = {8: INT8, 4: INT4}[bits]
    numbers = (random(3, 70, size, seed=size) * random(size, seed=1).mul(3).exp()).to(dtype)
    numbers[0, 3], numbers[1, 2, 5], numbers[2, 7, 1] = 0, torch.nan, torch.inf
    numbers[2, 8] *= 1e-35
    frame = random(3, 2, size, seed=2)
    frame[:, 1] = frame[:, 1].abs() + 0.1
    for given in (frame, None):
        mine, plain = torch.zeros(2, 3, 80, codes.nbytes(size), dtype=torch.uint8)
        width = rotation_of(size, latent=size == 576)
        encode(numbers, given, width, bits, mine[:, :70])
        plain_encode(numbers, given, width, bits, plain[:, :70])
        assert torch.equal(mine, plain)


@pytest.mark.parametrize(("kind", "most"), zip(TYPES, (0.02, 0.12, 0.12, 0.12), strict=True), ids=str)
def test_numbers_survive(kind, most):
    """Keys with outliers lose no more than others: without frames and rotation, 4 bits leave nothing of the rest."""
    keys, values = with_outliers(1, 2, 500, 64), random(1, 2, 500, 64, seed=3)
    dense = EntryShape(2, 64, latent=False).made_of([keys, values], torch.float32)
    cache = dense.converted(kind)
    back = cache.converted(torch.float32)
    center = keys.mean(2, keepdim=True)
    assert error(back.keys - center, keys - center) < most
    assert error(back.values, values) < most
    alone = INT4.decoded(INT4.encoded(keys))
    assert error(alone - center, keys - center) > 0.9


def test_a_frame_comes_from_few_keys():
    for entries in (1, 2, 20):
        keys = with_outliers(1, 2, entries, 64)
        frame = frame_of(keys)
        assert frame.shape == (1, 2, 2, 64)
        assert bool(frame.isfinite().all())
        assert bool((frame[:, :, 1] > 0).all())


@pytest.mark.parametrize("kind", TYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=["grouped", "latent"])
def test_caches_of_codes(shape, kind):
    """Each method moves entries as a cache of numbers does, without changing a bit of them."""
    dense = shape.empty(1, 40, entry_type=torch.float32)
    for tensor in dense.tensors:
        tensor.copy_(random(*tensor.shape, seed=tensor.shape[3]))
    cache = dense.converted(kind)
    assert cache.entry_type == kind
    assert cache.nbytes == 40 * shape.nbytes(kind) + shape.fixed_nbytes(kind)
    assert (cache.rows, cache.entries, cache.heads, cache.size) == (1, 40, shape.heads, shape.size)
    numbers = cache.converted(torch.float32)

    def same(some, want):
        wide = some.converted(torch.float32)
        assert all(torch.equal(a, b) for a, b in zip(wide.tensors, want, strict=True))

    slots = shape.empty(3, 50, entry_type=kind)
    slots.row(1, 40).put(cache)
    same(slots.row(1).first(40), numbers.tensors)
    chosen = torch.tensor([7, 3, 30])
    same(slots.take(1, chosen), [each[:, :, chosen] for each in numbers.tensors])
    assert slots.take(1, chosen).tensors[-1].data_ptr() != slots.tensors[-1][1].data_ptr()
    positions = torch.stack([torch.randperm(40)[:5] for _ in range(shape.heads)])
    picked = [
        torch.stack([each[0, head, positions[head]] for head in range(shape.heads)])[None] for each in numbers.tensors
    ]
    same(cache.gathered(positions), picked)
    same(cache.span(3, 9), [each[:, :, 3:9] for each in numbers.tensors])
    same(cache.span(0, 3).joined(cache.span(9, 12)), [each[:, :, [0, 1, 2, 9, 10, 11]] for each in numbers.tensors])
    same(cache.clone(), numbers.tensors)
    # A token has the codes that it would have had in the prompt, also by way of pending entries.
    key = dense.keys[:, :, 7, None].transpose(1, 2).repeat(3, 1, 1, 1)
    value = dense.values[:, :, 7, None].transpose(1, 2).repeat(3, 1, 1, 1)
    place, active = torch.tensor([[45]] * 3), torch.tensor([False, True, False])
    before = slots.clone()
    slots.write(place, key, value, active)
    same(slots.row(1).span(45, 46), [each[:, :, 7:8] for each in numbers.tensors])
    pending = slots.pending(2)
    pending.write(torch.zeros(3, 1, dtype=torch.int64), key, value)
    slots.write_stored(place + 1, pending.read(torch.zeros(3, 1, dtype=torch.int64)), active)
    same(slots.row(1).span(46, 47), [each[:, :, 7:8] for each in numbers.tensors])
    for row in (0, 2):
        assert all(torch.equal(a[row], b[row]) for a, b in zip(slots.tensors, before.tensors, strict=True))


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_turns_in_bfloat16_do_not_add_up(kind):
    """Staging rounds what codes stand for, and channels with a bias have large steps there."""
    dense = EntryShape(2, 64, latent=False).made_of([with_outliers(1, 2, 60, 64), random(1, 2, 60, 64)], torch.float32)
    first = dense.converted(torch.bfloat16).converted(kind)
    again = first
    for _ in range(12):
        again = again.converted(torch.bfloat16).converted(kind, like=first)
    want = dense.converted(torch.bfloat16).converted(torch.float32)
    for mine, once, exact in zip(
        again.converted(torch.float32).tensors, first.converted(torch.float32).tensors, want.tensors, strict=True
    ):
        center = exact.mean(2, keepdim=True)
        assert error(mine - center, exact - center) < 1.2 * error(once - center, exact - center) + 0.01


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_entries_that_are_kept_again_keep_their_codes(kind):
    dense = EntryShape(2, 64, latent=False).made_of([with_outliers(1, 2, 60, 64), random(1, 2, 60, 64)], torch.float32)
    cache = dense.converted(kind)
    again = cache.converted(torch.float32).converted(kind, like=cache)
    off = cache.converted(torch.float32)
    for a, b in zip(again.converted(torch.float32).tensors, off.tensors, strict=True):
        assert error(a, b) < 2e-3


def test_sizes_and_names():
    shape = EntryShape(2, 128, latent=False)
    sizes = [shape.nbytes(kind) for kind in (torch.bfloat16, *TYPES)]
    assert sizes == [1024, 528, 408, 408, 288]
    assert [type_name(kind) for kind in TYPES] == ["int8", "int8/int4", "int4/int8", "int4"]
    assert shape.fixed_nbytes(TYPES[0]) == 2 * 2 * 128 * 4
    with pytest.raises(ValueError, match="are not entries of"):
        shape.of(shape.empty(1, 4, entry_type=TYPES[0]).tensors, TYPES[-1])


def test_a_model_whose_heads_do_not_fit_is_refused():
    class Spec:
        entries = (EntryShape(2, 80, latent=False),)

    assert type_name(choose_entry_type("int8", torch.bfloat16, Spec())) == "int8"
    assert choose_entry_type("float32", torch.bfloat16, Spec()) == torch.float32
    assert choose_entry_type("auto", torch.bfloat16, Spec()) == torch.bfloat16
    with pytest.raises(ConfigurationError, match="int4 needs heads whose size is a multiple of 32, not 80; use int8"):
        choose_entry_type("int8/int4", torch.bfloat16, Spec())
    with pytest.raises(ConfigurationError, match=r"kv_dtype is 'int5'; allowed: auto, float32, .*int8/int4"):
        EngineConfig(kv_dtype="int5")
