"""Gemma 2 and 3: windows in some layers, soft caps, and norms before and after, whose weights are around zero."""

from __future__ import annotations

from typing import Any

from snapstream.errors import CheckpointError
from snapstream.models.block import BlockNames
from snapstream.models.families.grouped import grouped_family, grouped_fields, without_float16


def _fields(config: Any, architecture: str) -> dict[str, Any]:
    if getattr(config, "use_bidirectional_attention", None):
        raise CheckpointError(f"{architecture} with use_bidirectional_attention is not supported; supported: null")
    return (
        grouped_fields(config)
        | without_float16(config)
        | {
            "scale": float(config.query_pre_attn_scalar) ** -0.5,
            "attention_cap": float(config.attn_logit_softcapping or 0.0),
            "logit_cap": float(config.final_logit_softcapping or 0.0),
            "qk_norm": "head" if architecture.startswith("Gemma3") else None,
            "norms_after": True,
            "wide_norms": True,
            "norm_offset": 1.0,
            "embedding_factor": config.hidden_size**0.5,
            "rounds_embedding_factor": True,
        }
    )


GEMMA_NAMES = BlockNames(
    attention_result_norm="post_attention_layernorm",
    feed_forward_norm="pre_feedforward_layernorm",
    feed_forward_result_norm="post_feedforward_layernorm",
)
GEMMA = grouped_family("Gemma2ForCausalLM", "Gemma3ForCausalLM", fields=_fields, names=GEMMA_NAMES)
