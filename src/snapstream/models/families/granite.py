"""Granite 3, and the dense models of Granite 4: factors on embeddings, attention, the residual stream and logits."""

from __future__ import annotations

from typing import Any

from snapstream.errors import CheckpointError
from snapstream.models.block import BlockNames
from snapstream.models.families.grouped import grouped_family, grouped_fields


def _fields(config: Any, architecture: str) -> dict[str, Any]:
    return grouped_fields(config) | {
        "scale": float(config.attention_multiplier),
        "embedding_factor": float(config.embedding_multiplier),
        "residual_factor": float(config.residual_multiplier),
        "logit_factor": 1.0 / float(config.logits_scaling),
    }


def _dense_fields(config: Any, architecture: str) -> dict[str, Any]:
    """Granite 4 without experts and state-space layers; its feed-forward block is the others' shared expert."""
    if config.num_local_experts:
        raise CheckpointError(f"{architecture} with experts is not supported (num_local_experts must be 0)")
    others = sorted({*config.layers_block_type} - {"attention", "full_attention"})
    if others:
        raise CheckpointError(f"{architecture} with layers of type {', '.join(others)} is not supported")
    kind = config.position_embedding_type
    fields = _fields(config, architecture) | {"intermediate_size": config.shared_intermediate_size}
    return fields if kind == "rope" else fields | {"unrotated_layers": frozenset(range(config.num_hidden_layers))}


GRANITE = grouped_family("GraniteForCausalLM", fields=_fields)
GRANITE_DENSE = grouped_family(
    "GraniteMoeHybridForCausalLM",
    fields=_dense_fields,
    names=BlockNames(feed_forward="shared_mlp", gate_up="input_linear", down="output_linear"),
)
