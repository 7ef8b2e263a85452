"""The attention implementation ``snapstream`` for transformers; it also passes queries to the cache.

Models call it through transformers' ``AttentionInterface``. Layers without a SnapStream cache (sliding windows, or no
cache at all) get plain attention, so a model can always use this implementation.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from snapstream.attention import SdpaAttention
from snapstream.errors import RequestError
from snapstream.integrations.transformers.layer import take_updated_layer
from snapstream.integrations.transformers.prompt import attend_causally, kernel_fits

ATTENTION = "snapstream"
"""Name to pass as ``attn_implementation``."""

LOGITS = 2**26
"""Maximum number of logits that are materialized together."""


def snapstream_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to what the cache returned; see transformers' ``AttentionInterface``.

    Args:
        module: The model's attention layer.
        query: ``[B, H, T, D]``.
        key: ``[B, N, L, D]``.
        value: ``[B, N, L, D_v]``.
        attention_mask: Boolean or additive, ``[B, 1, T, L]``, or ``None``.
        scaling: Factor on the logits.
        dropout: Dropout of SDPA in prompts; ignored while decoding.
        **kwargs: ``softcap`` and ``s_aux`` (sinks of GPT-OSS, ``[H]``) are supported.

    Returns:
        The attention output ``[B, T, H, D_v]``, and ``None`` in place of the weights.

    Raises:
        RequestError: An unsupported feature is requested, such as attention weights.
    """
    for name, why in (
        ("output_attentions", "attention weights are not kept"),
        ("position_bias", "an additive position bias would have to be dropped with the tokens it belongs to"),
    ):
        if kwargs.get(name) is not None and kwargs[name] is not False:
            raise RequestError(f"{name} is not supported by the attention implementation '{ATTENTION}': {why}")
    layer = take_updated_layer(getattr(module, "layer_idx", None), key)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    special: dict[str, Any] = {"cap": softcap or 0.0, "sinks": sinks}
    is_causal = kwargs.get("is_causal")
    is_causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)

    def plain(mask: Tensor | None) -> Tensor:
        if softcap is None and sinks is None:
            out, _ = sdpa_attention_forward(module, query, key, value, mask, dropout, scale, **kwargs)
            result: Tensor = out
            return result
        causal = mask is None and query.shape[2] > 1 and is_causal
        return written_out_attention(query, key, value, mask, scale, causal=causal, softcap=softcap, sinks=sinks)

    if layer is None:
        return plain(attention_mask), None
    if not layer.decoding:
        fused = not dropout and is_causal and kernel_fits(query, key, value, scale, sinks)
        causal = (lambda *real: attend_causally(query, key, value, scale, *real, **special)) if fused else None
        return layer.attend_prompt(query, key, attention_mask, scale, plain, causal, **special), None
    return SdpaAttention().decode(query[:, :, 0], key, value, layer.valid(), scale, **special)[:, None], None


def written_out_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    *,
    causal: bool,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with features that fused kernels lack: capped logits, or an extra logit per head in the softmax.

    Args:
        query: ``[B, H, T, D]``.
        key: ``[B, N, L, D]``.
        value: ``[B, N, L, D_v]``.
        mask: Boolean or additive, ``[B, 1, T, >= L]``, or ``None``.
        scale: Factor on the logits.
        causal: Whether token ``t`` attends only to the first ``t + 1`` keys; used if there is no mask.
        softcap: Logits are ``softcap * tanh(logits / softcap)``.
        sinks: One logit per head, ``[H]``.

    Returns:
        ``[B, T, H, D_v]``.
    """
    B, H, T, D = query.shape
    N, L = key.shape[1], key.shape[2]
    grouped = query.view(B, N, H // N, T, D)
    lowest = torch.finfo(torch.float32).min
    chunks = []
    size = max(1, LOGITS // (B * H * L))
    for start in range(0, T, size):
        rows = grouped[:, :, :, start : start + size]
        logits = (rows @ key[:, :, None].transpose(-1, -2)).float() * scale
        if softcap is not None:
            logits = torch.tanh(logits / softcap) * softcap
        if mask is not None:
            part = mask[:, None, :, start : start + size, :L]
            logits = logits.masked_fill(~part, lowest) if part.dtype == torch.bool else logits + part
        elif causal:
            seen = torch.ones(rows.shape[3], L, dtype=torch.bool, device=key.device).tril(start)
            logits = logits.masked_fill(~seen, lowest)
        if sinks is not None:
            column = sinks.float().view(1, N, H // N, 1, 1).expand(B, -1, -1, rows.shape[3], 1)
            weights = torch.cat((logits, column), -1).softmax(-1)[..., :-1]
        else:
            weights = logits.softmax(-1)
        chunks.append(weights.to(value.dtype) @ value[:, :, None])
    return torch.cat(chunks, 3).view(B, H, T, -1).transpose(1, 2)


AttentionInterface.register(ATTENTION, snapstream_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
