"""OLMo 2 and 3, whose norms come after attention and feed-forward, and OLMoE, which has experts.

A norm of queries takes all heads together, and so does one of keys.
"""

from __future__ import annotations

from typing import Any

from snapstream.errors import CheckpointError
from snapstream.models.block import BlockNames
from snapstream.models.families.grouped import grouped_family, grouped_fields, softmax_experts


def _fields(config: Any, architecture: str) -> dict[str, Any]:
    norms = {"norms_before": False, "norms_after": True, "wide_norms": True}
    return grouped_fields(config) | norms | {"qk_norm": "all"}


def _expert_fields(config: Any, architecture: str) -> dict[str, Any]:
    if config.clip_qkv is not None:
        raise CheckpointError(f"{architecture} with clip_qkv={config.clip_qkv} is not supported; supported: null")
    count, inner = config.num_experts, config.intermediate_size
    experts = softmax_experts(config, count=count, inner=inner, normalize=bool(config.norm_topk_prob))
    return grouped_fields(config) | {"qk_norm": "all", "experts": experts}


OLMO = grouped_family(
    "Olmo2ForCausalLM",
    "Olmo3ForCausalLM",
    fields=_fields,
    names=BlockNames(
        attention_result_norm="post_attention_layernorm", feed_forward_result_norm="post_feedforward_layernorm"
    ),
)
OLMOE = grouped_family("OlmoeForCausalLM", fields=_expert_fields)
