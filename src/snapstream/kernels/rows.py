"""What a model does to each row by itself: norm, rotation, gate. Each asks which kernel there is for it.

Plain torch takes several passes over memory for each of them; the kernels of this package take one. Inside a compiled
graph torch fuses the passes by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels import cpu


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last axis, in float32; rounded before it is multiplied with the weight.

    Args:
        x: ``[T, ..., D]``, with at most one axis between.
        weight: ``[D]``.
        epsilon: Added to the mean of squares.

    Returns:
        Shape and type of ``x``.
    """
    if cpu.takes_rows(x) and x.shape[-1] % cpu.MULTIPLE == 0:
        return cpu.norm(x, weight, epsilon)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * wide.to(x.dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, pairs: bool) -> Tensor:
    """Rotate ``[T, heads, D]`` by angles whose cosines and sines are given, ``[T, 1, D]`` with equal halves.

    Args:
        x: What is rotated.
        cosine: Of the angles.
        sine: The same.
        pairs: Neighbours are rotated together; in the result the first of all pairs come before the second of all.
            Otherwise halves are.
    """
    if cpu.takes_rows(x) and x.shape[-1] <= cpu.MOST_ROTATED:
        return cpu.rotate(x, cosine, sine, pairs=pairs)
    if pairs:
        half = x.shape[-1] // 2
        cosine, sine = cosine[..., :half], sine[..., :half]
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def gate(x: Tensor) -> Tensor:
    """SwiGLU of ``[T, 2 * I]``: ``silu`` of the first half times the second, ``[T, I]``."""
    if cpu.takes_rows(x):
        return cpu.gate(x)
    first, second = x.chunk(2, -1)
    return F.silu(first).mul_(second)
