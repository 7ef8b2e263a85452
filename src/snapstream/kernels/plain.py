"""The kernels' functions in plain torch: the fallback without kernels, and the reference for their tests."""

from __future__ import annotations

import enum

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.compression.scoring import capped


class Activation(enum.IntEnum):
    """What a gate applies to its first half; ``GELU`` is the approximation by a hyperbolic tangent.

    ``CLAMPED`` is gpt-oss's: both halves are clamped, the sigmoid is steeper, and 1 is added to the second half.
    """

    SILU = 0
    GELU = 1
    CLAMPED = 2


GATE_LIMIT, GATE_SLOPE = 7.0, 1.702
"""Of ``CLAMPED``: the maximum of the first half, and of the second half's size; the factor within the sigmoid."""


def norm(x: Tensor, weight: Tensor, epsilon: float, *, wide: bool = False) -> Tensor:
    """Root-mean-square norm over the last axis, in float32.

    Args:
        x: ``[T, ..., D]``; float64 is not converted.
        weight: ``[D]``.
        epsilon: Added to the mean of squares.
        wide: Whether it is multiplied by the weight before it is rounded, instead of after.
    """
    numbers = x if x.dtype == torch.float64 else x.float()
    normed = numbers * torch.rsqrt(numbers.square().mean(-1, keepdim=True) + epsilon)
    return (weight * normed).to(x.dtype) if wide else weight * normed.to(x.dtype)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor, *, pairs: bool) -> Tensor:
    """Rotary embedding.

    Args:
        x: Queries or keys, ``[T, heads, D]``.
        cosine: Cosines of the angles, ``[T, 1, D]`` with equal halves.
        sine: Sines of the angles, likewise.
        pairs: Rotate neighboring elements together; in the result, the first elements of all pairs come before the
            second ones. Otherwise, rotate the two halves of a head together.
    """
    if pairs:
        half = x.shape[-1] // 2
        cosine, sine = cosine[..., :half], sine[..., :half]
        first, second = x[..., 0::2], x[..., 1::2]
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), -1)
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat((-second, first), -1) * sine


def gate(x: Tensor, activation: Activation = Activation.SILU) -> Tensor:
    """SwiGLU or GeGLU of ``[T, 2 * I]``: the activation of the first half times the second, ``[T, I]``."""
    first, second = x.chunk(2, -1)
    if activation == Activation.CLAMPED:
        first, second = first.clamp(max=GATE_LIMIT), second.clamp(-GATE_LIMIT, GATE_LIMIT)
        return first * torch.sigmoid(first * GATE_SLOPE) * (second + 1)
    return (F.silu(first) if activation == Activation.SILU else F.gelu(first, approximate="tanh")).mul_(second)


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor,
    scale: float,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attention by torch; with a cap or sinks, which torch's own does not have, written out in float32 at least.

    Args:
        query: ``[..., R, D]``.
        keys: ``[..., L, D]``.
        values: ``[..., L, V]``.
        mask: Which keys each row sees, broadcastable to ``[..., R, L]``.
        scale: Factor on the logits.
        cap: Soft cap of the logits; 0 for none.
        sinks: One extra logit per row, without a value, broadcastable to ``[..., R]``.

    Returns:
        ``[..., R, V]``.
    """
    if cap == 0.0 and sinks is None:
        return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, scale=scale)
    wide = torch.promote_types(query.dtype, torch.float32)
    logits = capped(query.to(wide) @ keys.to(wide).transpose(-1, -2) * scale, cap)
    logits = logits.masked_fill(~mask, -torch.inf)
    if sinks is not None:
        own = sinks.to(wide).expand(logits.shape[:-1])[..., None]
        logits = torch.cat((logits, own), -1)
    weights = logits.softmax(-1)[..., : keys.shape[-2]]
    return (weights @ values.to(wide)).to(query.dtype)


def attend_chunk(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of a chunk of a prompt to everything before it and to itself, by :func:`attend` with a mask.

    Args:
        query: ``[T, H, D]``.
        keys: ``[N, L, D]``, the chunk's included.
        values: ``[N, L, V]``.
        start: Entry of the first token, int64 scalar.
        scale: Factor on the logits.
        window: How many tokens a token attends to, itself included; 0 for all.
        cap: Soft cap of the logits; 0 for none.
        sinks: One extra logit per head, without a value, ``[H]``.

    Returns:
        ``[T, H, V]``.
    """
    (T, H, D), (N, L, V) = query.shape, values.shape
    key_position = torch.arange(L, device=query.device)
    position = start + torch.arange(T, device=query.device)[:, None]
    mask = key_position <= position
    if window:
        mask &= key_position > position - window
    if cap or sinks is not None:  # head by head, as all logits are held
        group = H // N
        return torch.stack(
            [
                attend(
                    query[:, head],
                    keys[head // group],
                    values[head // group],
                    mask,
                    scale,
                    cap,
                    None if sinks is None else sinks[head],
                )
                for head in range(H)
            ],
            1,
        )
    # KV heads form the batch, and the heads of a group share the same memory. With a mask and more query heads than
    # KV heads, torch may only have a kernel that materializes all logits.
    out = F.scaled_dot_product_attention(
        query.reshape(T, N, H // N, D).permute(1, 2, 0, 3),
        keys[:, None].expand(N, H // N, L, D),
        values[:, None].expand(N, H // N, L, V),
        attn_mask=mask,
        scale=scale,
    )
    return out.permute(2, 0, 1, 3).reshape(T, H, V)


def choose_experts(
    logits: Tensor,
    correction: Tensor | None,
    chosen: int,
    *,
    groups: int,
    chosen_groups: int,
    corrected: bool,
    normalize: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Weights and indices of experts, ``[T, chosen]`` each, of router logits ``[T, E]``; see ``models/experts.py``."""
    scores = logits.sigmoid() if corrected else logits.softmax(-1)
    ranking = scores if correction is None else scores + correction.float()
    if groups > 1:
        grouped = ranking.view(len(logits), groups, -1)
        best = grouped.topk(2, -1).values.sum(-1) if corrected else grouped.amax(-1)
        kept = best.topk(chosen_groups, -1).indices
        allowed = torch.zeros_like(best, dtype=torch.bool).scatter(1, kept, True)
        ranking = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(1)
    experts = ranking.topk(chosen, -1).indices
    weights = scores.gather(1, experts)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts
