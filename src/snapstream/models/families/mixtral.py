"""Mixtral and Qwen3-MoE: experts in place of feed-forward blocks."""

from __future__ import annotations

from typing import Any

from snapstream.models.block import BlockNames
from snapstream.models.experts import ExpertNames
from snapstream.models.families.grouped import grouped_family, grouped_fields, softmax_experts, windows_everywhere


def _fields(config: Any, architecture: str) -> dict[str, Any]:
    experts = softmax_experts(config, count=config.num_local_experts, inner=config.intermediate_size, normalize=True)
    return grouped_fields(config, windows_everywhere(config)) | {"experts": experts}


def _qwen_fields(config: Any, architecture: str) -> dict[str, Any]:
    dense = dense_layers(config)
    count, inner, experts = config.num_experts, config.moe_intermediate_size, None
    if count and len(dense) < config.num_hidden_layers:
        experts = softmax_experts(config, count=count, inner=inner, normalize=bool(config.norm_topk_prob), dense=dense)
    return grouped_fields(config, windows_everywhere(config)) | {"qk_norm": "head", "experts": experts}


def dense_layers(config: Any) -> list[int]:
    """Layers without experts in models of Qwen."""
    step, named = getattr(config, "decoder_sparse_step", 1), getattr(config, "mlp_only_layers", None) or ()
    return [layer for layer in range(config.num_hidden_layers) if layer in named or (layer + 1) % step]


MIXTRAL = grouped_family(
    "MixtralForCausalLM",
    fields=_fields,
    names=BlockNames(feed_forward="block_sparse_moe", experts=ExpertNames(gate="w1", up="w3", down="w2")),
)
QWEN_EXPERTS = grouped_family("Qwen3MoeForCausalLM", fields=_qwen_fields)
