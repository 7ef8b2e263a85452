"""Rounds weights to formats in blocks (:mod:`snapstream.kernels.formats`), in the layout of GGUF files.

The simple formats are what llama.cpp makes of the same numbers. The nested ones, Q4_K, Q5_K and Q6_K, have scales of
scales; here those are fitted to the numbers by least squares, in turn with rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from snapstream.kernels.formats import Format

FITS = 6
"""Times that scales are fitted to rounded numbers, which are then rounded anew."""


def quantize(kind: Format, numbers: Tensor) -> Tensor:
    """Round rows to a format.

    Args:
        kind: The format.
        numbers: Float ``[rows, columns]``; columns must be whole blocks.

    Returns:
        uint8 ``[rows, row_bytes]``, as GGUF stores them.
    """
    blocks = numbers.float().reshape(-1, kind.columns)
    return _MADE[kind.name](blocks).reshape(len(numbers), -1)


def _half(numbers: Tensor) -> Tensor:
    """Numbers as the two bytes of a float16 each: ``[...]`` to uint8 ``[..., 2]``."""
    return numbers.to(torch.float16)[..., None].view(torch.uint8)


def _inverse(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 0, 1 / scale)


def _rounded(x: Tensor) -> Tensor:
    """To the nearest integer, halves away from zero."""
    return x.sign() * (x.abs() + 0.5).floor()


def _q8_0(blocks: Tensor) -> Tensor:
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    numbers = _rounded(blocks * _inverse(scale)).to(torch.int8)
    return torch.cat((_half(scale[:, 0]), numbers.view(torch.uint8)), -1)


def _centred(blocks: Tensor, *, bits: int) -> Tensor:
    """Q4_0 and Q5_0: the number that is furthest from 0 becomes the lowest one."""
    half = 2 ** (bits - 1)
    furthest = blocks.gather(1, blocks.abs().argmax(-1, keepdim=True))
    scale = furthest / -half
    numbers = (blocks * _inverse(scale) + (half + 0.5)).floor().clamp(0, 2 * half - 1).to(torch.uint8)
    return torch.cat((_half(scale[:, 0]), *_packed(numbers, bits)), -1)


def _ranged(blocks: Tensor, *, bits: int) -> Tensor:
    """Q4_1 and Q5_1: from the least number to the largest."""
    least = blocks.amin(-1, keepdim=True)
    scale = (blocks.amax(-1, keepdim=True) - least) / (2**bits - 1)
    numbers = ((blocks - least) * _inverse(scale) + 0.5).floor().clamp(0, 2**bits - 1).to(torch.uint8)
    return torch.cat((_half(scale[:, 0]), _half(least[:, 0]), *_packed(numbers, bits)), -1)


def _packed(numbers: Tensor, bits: int) -> Iterator[Tensor]:
    """High bits, if there are any, and halves of bytes of 32 numbers."""
    if bits == 5:
        eight = torch.unflatten(numbers >> 4, -1, (4, 8))
        yield (eight << torch.arange(8, dtype=torch.uint8)).sum(-1).to(torch.uint8)
    low, high = (numbers & 15).chunk(2, -1)
    yield low | high << 4


def _nested(blocks: Tensor, *, bits: int) -> Tensor:
    """Q4_K and Q5_K: a scale and a minimum, which is subtracted, of six bits per 32 numbers."""
    x, most = blocks.view(-1, 8, 32), 2**bits - 1
    # 1. Scale and minimum of every 32 numbers: from their range, then fitted.
    least = (-x.amin(-1, keepdim=True)).clamp(min=0)
    scale = (x.amax(-1, keepdim=True) + least) / most
    best, lowest = (scale, least), torch.full_like(scale, torch.inf)
    for _ in range(FITS):
        numbers = ((x + least) * _inverse(scale)).round().clamp(0, most)
        error = (numbers * scale - least - x).square().sum(-1, keepdim=True)
        better = error < lowest
        best = torch.where(better, scale, best[0]), torch.where(better, least, best[1])
        lowest = torch.where(better, error, lowest)
        mean, middle = numbers.mean(-1, keepdim=True), x.mean(-1, keepdim=True)
        spread = (numbers - mean).square().sum(-1, keepdim=True)
        scale = ((numbers - mean) * (x - middle)).sum(-1, keepdim=True) * _inverse(spread)
        least = (scale * mean - middle).clamp(min=0)
    # 2. Both in six bits, times a factor for all eight.
    scales, minima = (part[..., 0].clamp(min=0) for part in best)
    factor, smallest = (part.amax(-1, keepdim=True) / 63 for part in (scales, minima))
    a = (scales * _inverse(factor)).round().clamp(0, 63)
    b = (minima * _inverse(smallest)).round().clamp(0, 63)
    # 3. Numbers for the scales and minima that this leaves.
    scale, least = (a * factor.half().float())[..., None], (b * smallest.half().float())[..., None]
    numbers = ((x + least) * _inverse(scale)).round().clamp(0, most).to(torch.uint8)
    a, b = a.to(torch.uint8), b.to(torch.uint8)
    scales = torch.cat(
        (a[:, :4] | a[:, 4:] >> 4 << 6, b[:, :4] | b[:, 4:] >> 4 << 6, (a[:, 4:] & 15) | b[:, 4:] << 4), -1
    )
    made = [_half(factor[:, 0]), _half(smallest[:, 0]), scales]
    if bits == 5:
        made.append((numbers >> 4 << torch.arange(8, dtype=torch.uint8)[:, None]).sum(1).to(torch.uint8))
    low, high = (numbers & 15).view(-1, 4, 2, 32).unbind(2)
    return torch.cat((*made, (low | high << 4).flatten(1)), -1)


def _q6_k(blocks: Tensor) -> Tensor:
    """A scale of eight bits per 16 numbers."""
    x = blocks.view(-1, 16, 16)
    # 1. Scale of every 16 numbers: the one that is furthest from 0 becomes the lowest; then fitted.
    scale = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / -32
    best, lowest = scale, torch.full_like(scale, torch.inf)
    for _ in range(FITS):
        numbers = (x * _inverse(scale)).round().clamp(-32, 31)
        error = (numbers * scale - x).square().sum(-1, keepdim=True)
        best, lowest = torch.where(error < lowest, scale, best), torch.minimum(error, lowest)
        scale = (numbers * x).sum(-1, keepdim=True) * _inverse(numbers.square().sum(-1, keepdim=True))
    # 2. In eight bits, times a factor for all.
    factor = best.gather(1, best.abs().argmax(1, keepdim=True))[:, 0] / -128
    eight = (best[..., 0] * _inverse(factor)).round().clamp(-128, 127)
    # 3. Numbers for the scales that this leaves.
    scale = (eight * factor.half().float())[..., None]
    numbers = ((x * _inverse(scale)).round().clamp(-32, 31) + 32).to(torch.uint8).view(-1, 2, 4, 32)
    one, two, three, four = (numbers & 15).unbind(2)
    low = torch.cat((one | three << 4, two | four << 4), -1).flatten(1)
    high = (numbers >> 4 << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]).sum(2).to(torch.uint8).flatten(1)
    return torch.cat((low, high, eight.to(torch.int8).view(torch.uint8), _half(factor[:, 0])), -1)


_MADE: dict[str, Callable[[Tensor], Tensor]] = {
    "q4_0": partial(_centred, bits=4),
    "q5_0": partial(_centred, bits=5),
    "q4_1": partial(_ranged, bits=4),
    "q5_1": partial(_ranged, bits=5),
    "q8_0": _q8_0,
    "q4_k": partial(_nested, bits=4),
    "q5_k": partial(_nested, bits=5),
    "q6_k": _q6_k,
}
