"""Qwen3-Next and Qwen3.5: three of four layers have a state (Gated DeltaNet); attention in the others has a gate."""

from __future__ import annotations

from typing import Any

from snapstream.cache import EntryShape, LayerGroup, StateShape
from snapstream.errors import CheckpointError
from snapstream.models.block import BlockNames
from snapstream.models.experts import ExpertNames
from snapstream.models.families.grouped import FULL, grouped_family, grouped_fields, softmax_experts
from snapstream.models.families.mixtral import dense_layers
from snapstream.models.joined import Joined

_STATE = "linear_attention"


def _fields(config: Any, architecture: str) -> dict[str, Any]:
    experts, dense = None, dense_layers(config)
    if getattr(config, "num_experts", 0) and len(dense) < config.num_hidden_layers:
        experts = softmax_experts(
            config,
            count=config.num_experts,
            inner=config.moe_intermediate_size,
            normalize=bool(getattr(config, "norm_topk_prob", True)),
            dense=dense,
            shared=config.shared_expert_intermediate_size or 0,
        )
    joins = architecture == "Qwen3NextForCausalLM"
    read = grouped_fields(config, [FULL] * config.num_hidden_layers)
    return read | {
        "qk_norm": "head",
        "wide_norms": True,
        "norm_offset": 1.0,
        "gates_attention": True,
        "experts": experts,
        "intermediate_size": getattr(config, "intermediate_size", None) or config.moe_intermediate_size,
        "groups": _groups(config, read["groups"][0].entry),
        "joined_inputs": tuple(getattr(config, "joined_inputs", ("qkvz", "ba") if joins else ())),
        "value_heads_in_turn": bool(getattr(config, "value_heads_in_turn", False)),
        # Files contain the module for multi-token prediction under names of its own, whatever the configuration says.
        "ignored_layers": 1,
    }


def _groups(config: Any, entry: EntryShape) -> tuple[LayerGroup, ...]:
    """Layers with full attention, then those with a state."""
    types = list(config.layer_types)
    unknown = sorted(set(types) - {FULL, _STATE})
    if unknown:
        raise CheckpointError(f"layers of type {', '.join(unknown)} are not supported; supported: {FULL}, {_STATE}")
    if FULL not in types:
        raise CheckpointError("a model without any layer of full attention is not supported")
    heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
    if heads % key_heads:
        raise CheckpointError(f"{heads} value heads cannot share {key_heads} key heads evenly")
    if config.linear_conv_kernel_dim < 2:
        raise CheckpointError(f"linear_conv_kernel_dim is {config.linear_conv_kernel_dim}; it must be 2 or more")
    state = StateShape(heads, key_heads, config.linear_key_head_dim, config.linear_value_head_dim)
    groups = (
        LayerGroup(tuple(layer for layer, each in enumerate(types) if each == kind), shape, window)
        for kind, shape, window in ((FULL, entry, None), (_STATE, state, config.linear_conv_kernel_dim - 1))
    )
    return tuple(group for group in groups if group.layers)


QWEN_NEXT = grouped_family(
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    fields=_fields,
    names=BlockNames(experts=ExpertNames(shared="shared_expert", joined=Joined.ROWS)),
)
