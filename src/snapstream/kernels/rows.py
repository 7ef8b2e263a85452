"""What a model does to each row by itself: norm, rotation, gate. Each asks which kernel there is for it.

Plain torch takes several passes over memory for each of them; the kernels of this package take one. Inside a compiled
graph torch fuses the passes by itself.
"""

from __future__ import annotations

from torch import Tensor

from snapstream.kernels import cpu, plain


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
    return plain.norm(x, weight, epsilon)


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
    return plain.rotate(x, cosine, sine, pairs=pairs)


def gate(x: Tensor) -> Tensor:
    """SwiGLU of ``[T, 2 * I]``: ``silu`` of the first half times the second, ``[T, I]``."""
    if cpu.takes_rows(x):
        return cpu.gate(x)
    return plain.gate(x)
