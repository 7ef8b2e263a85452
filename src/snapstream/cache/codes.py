"""Keys and values as codes of 8 or 4 bits, with scales.

A code is worth its distance from the middle code times a scale. With ``int8``, an entry has one float32 scale. With
``int4``, every 32 numbers have a bfloat16 scale.

Some channels of keys are hundreds of times as large as others (Qwen2.5 adds a bias to them), and would leave nothing of
the others. Therefore:

1. Keys are stored relative to a *frame*: per channel, a center, which is subtracted, and a spread, by which they are
   divided. A frame comes from the first entries of a sequence, and stays: see :func:`frame_of`.
2. Keys and values are rotated by a Hadamard matrix, which spreads what is large in one channel over all of them
   (QuaRot, arXiv 2404.00456). Attention rotates queries likewise, and takes the rotation back from its result.

Everything here is computed in float32 in a fixed order, so that CPU kernels give the same codes, bit for bit. Those of
GPUs may decide differently in the middle between two codes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

BLOCK = 32
"""Numbers that have a scale in common with ``int4``, and largest rotation of latents."""
FEWEST_KEYS = 64
"""A frame of fewer keys is replaced by that of the next prompt."""
SMALLEST_PEAK = 1e-30
"""Entries without a larger number are stored as zeros."""


@dataclass(frozen=True)
class CodeFormat:
    """How the numbers of a key or a value are stored.

    Attributes:
        name: Name for users.
        bits: Bits of a number.
    """

    name: str
    bits: int

    def unsupported(self, size: int) -> str | None:
        """Why keys or values of ``size`` elements cannot be stored; ``None`` if they can."""
        multiple = BLOCK if self.bits == 4 else 4  # so that scales are aligned
        reason = f"{self.name} needs heads whose size is a multiple of {multiple}, not {size}"
        return reason if size % multiple else None

    def nbytes(self, size: int) -> int:
        """Bytes of ``size`` numbers: first their codes, then their scales."""
        return size + 4 if self.bits == 8 else size // 2 + size // BLOCK * 2

    def encoded(self, x: Tensor) -> Tensor:
        """Codes and scales of float32 numbers ``[..., D]``: uint8 ``[..., nbytes(D)]``.

        Numbers that share a scale with one that is not finite become NaN.
        """
        if self.bits == 8:
            peak = x.abs().amax(-1, keepdim=True)
            scale, used = peak / 127, peak > SMALLEST_PEAK
            # A number divided by a tensor would be multiplied by its reciprocal.
            codes = _rounded(x, torch.where(used, torch.full_like(peak, 127) / peak, 0.0)) + 128
            scale = torch.where(peak.isfinite(), torch.where(used, scale, 0.0), torch.nan)
            return torch.cat((codes, scale.contiguous().view(torch.uint8)), -1)
        # The number that is furthest from zero becomes -8, as there is no 8.
        x = x.view(*x.shape[:-1], -1, BLOCK)
        least, most = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
        furthest = torch.where(most >= -least, most, least)
        is_finite = furthest.isfinite() & least.isfinite()
        scale = torch.where(furthest.abs() > SMALLEST_PEAK, furthest / -8, 0.0).to(torch.bfloat16)
        wide = scale.float()
        codes = (_rounded(x, torch.where(wide == 0, 0.0, 1 / wide)) + 8).clamp(max=15)
        low, high = codes.chunk(2, -1)
        scale = torch.where(is_finite, scale, torch.nan)
        return torch.cat(((low | high << 4).flatten(-2), scale.squeeze(-1).view(torch.uint8)), -1)

    def decoded(self, stored: Tensor) -> Tensor:
        """The numbers of what :meth:`encoded` returned, float32 ``[..., D]``."""
        if self.bits == 8:
            scale = stored[..., -4:].contiguous().view(torch.float32)
            return (stored[..., :-4].float() - 128) * scale
        size = stored.shape[-1] * BLOCK // (BLOCK // 2 + 2)
        both = stored[..., : size // 2].reshape(*stored.shape[:-1], -1, BLOCK // 2)
        codes = torch.cat((both & 15, both >> 4), -1)
        scale = stored[..., size // 2 :].contiguous().view(torch.bfloat16).float()
        return ((codes.float() - 8) * scale[..., None]).flatten(-2)


INT8, INT4 = CodeFormat("int8", 8), CodeFormat("int4", 4)
CODES = {each.name: each for each in (INT8, INT4)}
"""The formats, by name."""
OF_BITS = {each.bits: each for each in CODES.values()}
"""The formats, by the bits of a code."""


@dataclass(frozen=True)
class QuantizedType:
    """The type of entries that are stored as codes.

    Attributes:
        keys: Format of keys, or of latents.
        values: Format of values.
        dense: Dtype of what is not stored as codes, such as the inputs of a state.
    """

    keys: CodeFormat
    values: CodeFormat
    dense: torch.dtype

    @classmethod
    def named(cls, name: str, dense: torch.dtype) -> QuantizedType | None:
        """The type called ``int8``, or ``int8/int4`` for keys and values; ``None`` if these are not codes."""
        keys, _, values = name.partition("/")
        return cls(CODES[keys], CODES[values or keys], dense) if keys in CODES else None

    def unsupported(self, key_size: int, value_size: int | None) -> str | None:
        """Why heads of these sizes cannot be stored; without values of their own, ``value_size`` is ``None``."""
        of_values = None if value_size is None else self.values.unsupported(value_size)
        return self.keys.unsupported(key_size) or of_values

    def __str__(self) -> str:
        return self.keys.name if self.keys == self.values else f"{self.keys.name}/{self.values.name}"


EntryType: TypeAlias = torch.dtype | QuantizedType
"""The type of the entries of a cache: numbers, or codes."""


def dense_dtype(entry_type: EntryType) -> torch.dtype:
    """The dtype of numbers that are not stored as codes."""
    return entry_type.dense if isinstance(entry_type, QuantizedType) else entry_type


def type_name(entry_type: EntryType) -> str:
    """The name of a type for users."""
    return f"{entry_type}".removeprefix("torch.")


def rotation_of(size: int, *, latent: bool) -> int:
    """How many neighboring channels a rotation mixes: a power of two that divides the size of a head."""
    whole = size & -size
    return min(whole, BLOCK) if latent else whole


def rotated(x: Tensor, width: int) -> Tensor:
    """Multiply each ``width`` neighbors in float32 ``[..., D]`` by the normalized Hadamard matrix, its own inverse."""
    size, half = x.shape[-1], 1
    while half < width:
        first, second = x.reshape(*x.shape[:-1], size // (2 * half), 2, half).unbind(-2)
        x = torch.stack((first + second, first - second), -2).flatten(-3)
        half *= 2
    return x * torch.tensor(1 / math.sqrt(width), dtype=torch.float32)


def frame_of(keys: Tensor) -> Tensor:
    """The frame of a sequence: per channel the mean of its keys, and the square root of their standard deviation.

    The square root is a compromise: where keys vary much, queries are often small, so larger errors do less harm.

    Args:
        keys: float32 ``[B, N, E, D]``.

    Returns:
        float32 ``[B, N, 2, D]``.
    """
    center = keys.mean(2)
    variance = (keys - center[:, :, None]).square().mean(2)
    # A few keys say little about how much each channel varies.
    few = 8 / (keys.shape[2] + 8)
    variance = variance + (few + 1e-4) * variance.mean(-1, keepdim=True)
    spread = torch.where(variance > SMALLEST_PEAK, variance, 1.0).sqrt().sqrt()
    return torch.stack((center, spread), 2)


def _rounded(x: Tensor, factor: Tensor) -> Tensor:
    """Rounded products, as bytes that wrap around below 0; 0 for what is not finite."""
    whole = (x * factor).round()
    return torch.where(whole.isfinite(), whole, 0.0).to(torch.int16).to(torch.uint8)
