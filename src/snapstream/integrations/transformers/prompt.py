"""Prompt attention on a CPU by this package's kernel, and which tokens a model's mask marks as padding."""

from __future__ import annotations

import torch
from torch import Tensor

import snapstream.kernels.compression  # noqa: F401 (its kernels take votes and copies)
from snapstream.errors import RequestError
from snapstream.kernels import cpu as kernels

SHORTEST = 128
"""Minimum prompt length, in tokens, that is worth building the kernels for."""
MASK_ROWS = 1024
"""Number of mask rows that are checked together."""


def kernel_fits(query: Tensor, key: Tensor, value: Tensor, scale: float, sinks: Tensor | None = None) -> bool:
    """Whether the kernel supports these tensors, ``[B, H, T, D]``, ``[B, N, L, D]`` and ``[B, N, L, D_v]``, here."""
    given = (query, key, value) if sinks is None else (query, key, value, sinks)
    needs_gradients = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    return (
        query.device.type == "cpu"
        and query.dtype in (torch.float32, torch.bfloat16)
        and query.dtype == key.dtype == value.dtype
        and query.shape[2] >= SHORTEST
        and query.shape[1] % key.shape[1] == 0
        and not any(t.shape[-1] % kernels.MULTIPLE or t.stride(-1) != 1 for t in (query, key, value))
        and not any(t.stride(1) % 2 or t.stride(2) % 2 for t in (query, key))
        and scale > 0
        and not needs_gradients
        and not torch.compiler.is_compiling()
        and kernels.available()
    )


def attend_causally(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    real: Tensor | None = None,
    fresh: Tensor | None = None,
    *,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor | None:
    """Attend from each of the last ``T`` of ``L`` tokens to the real tokens up to itself.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, N, L, D]``.
        value: ``[B, N, L, D_v]``.
        scale: Factor on the logits.
        real: Which tokens are neither padding nor unused entries, bool ``[B, L]``; ``None``: all.
        fresh: Which of the last ``T`` tokens are not padding, bool ``[B, T]``; ``None``: all.
        cap: Soft cap of the logits; 0 for none.
        sinks: One extra logit per head, without a value, ``[H]``.

    Returns:
        ``[B, T, H, D_v]``, zero for tokens that are not real; ``None`` if the last ``T`` tokens have padding anywhere
        but on the left.
    """
    B, H, T, _ = query.shape
    if fresh is not None and not bool(_on_the_right(fresh).all()):
        return None
    if real is not None and not bool(_on_the_right(real).all()):  # unused entries of the cache lie between
        order = real.int().sort(dim=1, stable=True).indices[:, None, :, None]
        key = key.gather(2, order.expand(-1, key.shape[1], -1, key.shape[3]))
        value = value.gather(2, order.expand(-1, value.shape[1], -1, value.shape[3]))
    unseen = [0] * B if real is None else (~real).sum(1).tolist()
    skipped = [0] * B if fresh is None else (~fresh).sum(1).tolist()
    out = query.new_zeros(B, T, H, value.shape[-1])
    own = None if sinks is None else sinks.detach().float().contiguous()
    for b in range(B):
        rows, keys, values = query[b, :, skipped[b] :].transpose(0, 1), key[b, :, unseen[b] :], value[b, :, unseen[b] :]
        if len(rows):
            start = torch.tensor(keys.shape[1] - len(rows))
            out[b, skipped[b] :] = kernels.prefill_attention(rows, keys, values, start, scale, cap=cap, sinks=own)
    return out


def _on_the_right(real: Tensor) -> Tensor:
    """Per pair of neighbors, whether it is not a real token followed by one that is not: ``[B, L] -> [B, L - 1]``."""
    return real[:, 1:] >= real[:, :-1]


def is_causal(mask: Tensor, real: Tensor) -> bool:
    """Whether a mask lets each real token attend to all real tokens up to itself, and to no others.

    Args:
        mask: Boolean, or additive, ``[B or 1, 1, T, >= T]``; its last ``T`` columns are the tokens.
        real: Which tokens are not padding, ``[B, T]``.
    """
    # Repeated in every layer without caching the result: the cost is small next to attention over as many tokens.
    tokens = real.shape[1]
    for start in range(0, tokens, MASK_ROWS):
        rows = mask[:, 0, start : start + MASK_ROWS, -tokens:]
        rows = rows if rows.dtype == torch.bool else rows == 0
        causal = torch.ones(rows.shape[1], tokens, dtype=torch.bool, device=mask.device).tril(start)
        wanted = causal & real[:, None]
        if not bool(((rows == wanted) | ~real[:, start : start + MASK_ROWS, None]).all()):
            return False
    return True


def fresh_tokens(mask: Tensor, tokens: int, padding: Tensor) -> Tensor:
    """Which of the last ``tokens`` columns of a model's mask are not padding, boolean ``[B, T]``.

    Args:
        mask: Boolean, or additive, ``[B or 1, 1, T, >= T]``.
        tokens: ``T``.
        padding: Number of padding tokens among those before, int64 ``[B]``.

    Raises:
        RequestError: The mask is more than causal attention and padding, or hides tokens that are in the cache.
    """
    if mask.shape[1] != 1:
        raise RequestError("a separate mask for each head is not supported by SnapStreamCache")
    if mask.dtype != torch.bool:
        allowed = mask == 0
        if not bool((allowed | (mask <= torch.finfo(mask.dtype).min / 2)).all()):
            raise RequestError("a mask that adds to attention's logits is not supported by SnapStreamCache")
        mask = allowed
    last = mask[:, 0, -1].expand(len(padding), -1)
    fresh, past = last[:, -tokens:], last[:, :-tokens]
    if past.shape[1] and not torch.equal((~past).sum(1), padding):
        raise RequestError(
            "the attention mask hides tokens that are already in the cache, such as the padding that generate() "
            "appends to finished sequences; a cache of fixed size cannot remove them: continue each sequence "
            "separately, or with a new cache"
        )
    return fresh
