"""Row-wise operations of a model: norm, rotation, gate. Each dispatches to a kernel if there is one.

Plain torch needs several passes over memory for each of them; the kernels of this package need one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.cache import LayerCache
from snapstream.kernels import cpu, plain, triton


def norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """Root-mean-square norm over the last axis, in float32; rounded before it is multiplied by the weight.

    Args:
        x: ``[T, ..., D]``, with at most one axis between.
        weight: ``[D]``.
        epsilon: Added to the mean of squares.

    Returns:
        A tensor of the shape and dtype of ``x``.
    """
    if _triton_takes(x):
        from snapstream.kernels.triton import rows

        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        source, target = (each if each.dim() == 3 else each[:, None] for each in (x, out))
        rows.norm(source, target, weight, epsilon)
        return out
    if cpu.takes_rows(x) and x.shape[-1] % cpu.MULTIPLE == 0:
        return cpu.norm(x, weight, epsilon)
    return plain.norm(x, weight, epsilon)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, pairs: bool) -> Tensor:
    """Apply rotary embedding.

    Args:
        x: Queries or keys, ``[T, heads, D]``.
        cosine: Cosines of the angles, ``[T, 1, D]`` with equal halves.
        sine: Sines of the angles, likewise.
        pairs: Rotate neighboring elements together; in the result, the first elements of all pairs come before the
            second ones. Otherwise, rotate the two halves of a head together.
    """
    if _triton_takes(x):
        from snapstream.kernels.triton import rows

        out = torch.empty_like(x, memory_format=torch.contiguous_format)
        rows.rotate(x, out, cosine[:, 0], sine[:, 0], pairs=pairs)
        return out
    if cpu.takes_rows(x) and x.shape[-1] <= cpu.MOST_ROTATED:
        return cpu.rotate(x, cosine, sine, pairs=pairs)
    return plain.rotate(x, cosine, sine, pairs=pairs)


def gate(x: Tensor) -> Tensor:
    """SwiGLU of ``[T, 2 * I]``: ``silu`` of the first half times the second, ``[T, I]``."""
    if _triton_takes(x):
        from snapstream.kernels.triton import rows

        out = x.new_empty(x.shape[0], x.shape[1] // 2)
        rows.gate(x, out)
        return out
    if cpu.takes_rows(x):
        return cpu.gate(x)
    return plain.gate(x)


def can_store(x: Tensor) -> bool:
    """Whether :func:`store_grouped` and :func:`store_latent` have kernels for the device and dtype of ``x``."""
    return _triton_takes(x)


def store_grouped(
    qkv: Tensor,
    cosine: Tensor,
    sine: Tensor,
    cache: LayerCache,
    start: Tensor,
    norms: tuple[Tensor, Tensor, float] | None = None,
) -> Tensor:
    """Norm and rotate queries and keys of a sequence's next tokens and store keys and values, in one pass.

    Args:
        qkv: Queries, keys and values of each token, ``[T, (H + 2 * N) * D]``; overwritten.
        cosine: Cosines of the angles, as for :func:`rotate`.
        sine: Sines of the angles, likewise.
        cache: The sequence's cache, ``[1, N, C, D]``.
        start: Entry of the first token, int64 scalar.
        norms: Weights of the norms of queries and keys, ``[D]``, and their epsilon.

    Returns:
        Queries ``[T, H, D]``.
    """
    from snapstream.kernels.triton import store

    places = store.Places(store.STRAIGHT, len(qkv), start[None])
    store.store_grouped(qkv, qkv, cosine[:, 0], sine[:, 0], cache, places, norms)
    N, D = cache.keys.shape[1], cache.keys.shape[3]
    return qkv.view(len(qkv), -1, D)[:, : -2 * N]


def store_latent(
    latent: Tensor,
    cosine: Tensor,
    sine: Tensor,
    cache: LayerCache,
    start: Tensor,
    norm: tuple[Tensor, float],
    *,
    pairs: bool,
) -> None:
    """Norm the compressed part of the latents of a sequence's next tokens, rotate the rest, and store both.

    Args:
        latent: ``[T, D]``: the compressed part, then the part that is rotated.
        cosine: As for :func:`store_grouped`, for the rotated part.
        sine: As ``cosine``.
        cache: The sequence's cache, ``[1, 1, C, D]``.
        start: Entry of the first token, int64 scalar.
        norm: The norm's weight, whose size is that of the compressed part, and its epsilon.
        pairs: See :func:`rotate`.
    """
    from snapstream.kernels.triton import store

    places = store.Places(store.STRAIGHT, len(latent), start[None])
    store.store_latent(latent, cosine[:, 0], sine[:, 0], cache, places, norm, pairs=pairs)


def _triton_takes(x: Tensor) -> bool:
    return triton.takes(x) and x.stride(-1) == 1 and x.shape[0] > 0
