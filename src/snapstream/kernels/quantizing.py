"""Rounds weights to formats in blocks (:mod:`snapstream.kernels.formats`), in the layout of GGUF files.

Q8_0 and Q4_0 have one scale per block, and are what llama.cpp makes of the same numbers. Q4_K has a scale and a minimum
of six bits per 32 numbers; here both are fitted to the numbers by least squares, in turn with rounding.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from snapstream.kernels.formats import Format

FITS = 6
"""Times that Q4_K fits scales and minima to rounded numbers, and rounds anew."""


def quantize(kind: Format, numbers: Tensor) -> Tensor:
    """Round rows to a format.

    Args:
        kind: ``q8_0``, ``q4_0`` or ``q4_k``.
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


def _q4_0(blocks: Tensor) -> Tensor:
    most = blocks.gather(1, blocks.abs().argmax(-1, keepdim=True))  # becomes -8 exactly
    scale = most / -8
    numbers = (blocks * _inverse(scale) + 8.5).floor().clamp(0, 15).to(torch.uint8)
    low, high = numbers.chunk(2, -1)
    return torch.cat((_half(scale[:, 0]), low | high << 4), -1)


def _q4_k(blocks: Tensor) -> Tensor:
    x = blocks.view(-1, 8, 32)
    # 1. Scale and minimum of every 32 numbers: from their range, then fitted. A minimum is what is subtracted.
    least = (-x.amin(-1, keepdim=True)).clamp(min=0)
    scale = (x.amax(-1, keepdim=True) + least) / 15
    best, lowest = (scale, least), torch.full_like(scale, torch.inf)
    for _ in range(FITS):
        numbers = ((x + least) * _inverse(scale)).round().clamp(0, 15)
        error = (numbers * scale - least - x).square().sum(-1, keepdim=True)
        better = error < lowest
        best = torch.where(better, scale, best[0]), torch.where(better, least, best[1])
        lowest = torch.where(better, error, lowest)
        mean, middle = numbers.mean(-1, keepdim=True), x.mean(-1, keepdim=True)
        spread = (numbers - mean).square().sum(-1, keepdim=True)
        scale = ((numbers - mean) * (x - middle)).sum(-1, keepdim=True) * _inverse(spread)
        least = (scale * mean - middle).clamp(min=0)
    scales, minima = best[0][..., 0], best[1][..., 0]
    # 2. Both in six bits, times a factor for all eight.
    factor, smallest = (part.amax(-1, keepdim=True) / 63 for part in (scales, minima))
    six = (scales * _inverse(factor)).round().clamp(0, 63)
    six_minima = (minima * _inverse(smallest)).round().clamp(0, 63)
    # 3. Numbers for the scales and minima that this leaves.
    scale = (six * factor.half().float())[..., None]
    least = (six_minima * smallest.half().float())[..., None]
    numbers = ((x + least) * _inverse(scale)).round().clamp(0, 15).to(torch.uint8)
    a, b = six.to(torch.uint8), six_minima.to(torch.uint8)
    packed = (
        a[:, :4] | a[:, 4:] >> 4 << 6,
        b[:, :4] | b[:, 4:] >> 4 << 6,
        (a[:, 4:] & 15) | b[:, 4:] << 4,
    )
    low, high = numbers.view(-1, 4, 2, 32).unbind(2)
    return torch.cat((_half(factor[:, 0]), _half(smallest[:, 0]), *packed, (low | high << 4).flatten(1)), -1)


_MADE: dict[str, Callable[[Tensor], Tensor]] = {"q8_0": _q8_0, "q4_0": _q4_0, "q4_k": _q4_k}
