"""Gemma 3: most layers have a window and a rotation of their own; norms before and after, with weights around zero."""

from __future__ import annotations

from typing import Any

from snapstream.errors import CheckpointError
from snapstream.models.block import BlockNames
from snapstream.models.families.grouped import grouped_family, grouped_fields, without_float16


def _fields(config: Any, architecture: str) -> dict[str, Any]:
    for name in ("final_logit_softcapping", "attn_logit_softcapping", "use_bidirectional_attention"):
        value = getattr(config, name, None)
        if value:
            raise CheckpointError(f"{architecture} with {name}={value} is not supported; supported: null")
    return (
        grouped_fields(config)
        | without_float16(config)
        | {
            "scale": float(config.query_pre_attn_scalar) ** -0.5,
            "qk_norm": "head",
            "norms_after": True,
            "wide_norms": True,
            "norm_offset": 1.0,
            "embedding_factor": config.hidden_size**0.5,
            "rounds_embedding_factor": True,
        }
    )


GEMMA = grouped_family(
    "Gemma3ForCausalLM",
    fields=_fields,
    names=BlockNames(
        attention_result_norm="post_attention_layernorm",
        feed_forward_norm="pre_feedforward_layernorm",
        feed_forward_result_norm="post_feedforward_layernorm",
    ),
)
