"""What families with grouped-query attention have in common: the fields of their spec, and where their tensors go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from snapstream.cache import EntryShape, LayerGroup
from snapstream.errors import CheckpointError
from snapstream.models.attention import GroupedAttention, attention_places
from snapstream.models.block import Block, BlockNames, block_places
from snapstream.models.experts import check_experts
from snapstream.models.families.family import Family
from snapstream.models.names import Place
from snapstream.models.recurrent import GatedDeltaNet, recurrent_places
from snapstream.models.rope import longest_sequence, rope_sets
from snapstream.models.spec import ExpertShape, ModelSpec

FULL, SLIDING = "full_attention", "sliding_attention"


def grouped_family(
    *architectures: str,
    fields: Callable[[Any, str], dict[str, Any]],
    names: BlockNames = BlockNames(),  # noqa: B008
    apart: Callable[[ModelSpec], dict[str, Place]] = lambda spec: {},
) -> Family:
    """A family with grouped-query attention.

    Args:
        *architectures: Their names in ``config.json``.
        fields: See :class:`~snapstream.models.families.family.Family`.
        names: What the tensors of a layer are called.
        apart: See there.
    """
    return Family(
        architectures=architectures,
        fields=fields,
        block=lambda spec, layer: Block(spec, layer, _attention(spec, layer)),
        places=lambda source, target, spec, layer: block_places(
            source, target, spec, layer, _attention_places(source, target, spec, layer, names), names
        ),
        apart=apart,
        joined_experts=names.experts.joined,
    )


def _attention(spec: ModelSpec, layer: int) -> nn.Module:
    has_state = spec.layer_group(layer).has_state
    return GatedDeltaNet(spec, layer) if has_state else GroupedAttention(spec, layer)


def _attention_places(source: str, target: str, spec: ModelSpec, layer: int, names: BlockNames) -> dict[str, Place]:
    target = f"{target}.attention"
    if spec.layer_group(layer).has_state:
        return recurrent_places(f"{source}.linear_attn", target, spec, layer)
    return attention_places(f"{source}.self_attn", target, spec, layer, joined=names.joined_qkv)


def grouped_fields(config: Any, types: Sequence[str] | None = None) -> dict[str, Any]:
    """The fields of :class:`~snapstream.models.spec.ModelSpec` that follow from heads, biases, rotation and windows.

    Args:
        config: The ``transformers`` configuration.
        types: Types of the layers where the configuration has a window; by default, what it says.
    """
    bias = bool(getattr(config, "attention_bias", False))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    return {
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "qkv_bias": bias,
        "output_bias": bias,
        "rotated": _rotated(config, head_dim),
        "groups": _groups(config, types, EntryShape(kv_heads, head_dim, latent=False)),
    }


def windows_everywhere(config: Any) -> list[str]:
    """Types of layers that all have the window of the configuration, if it has one."""
    return [SLIDING] * config.num_hidden_layers


def query_growth(config: Any) -> tuple[float, int] | None:
    """By what queries grow with their position, and after how many tokens each time, in models of Mistral."""
    names = "llama_4_scaling_beta", "original_max_position_embeddings"
    beta, length = (config.rope_parameters.get(name) for name in names)
    return (float(beta), int(length)) if beta else None


def without_float16(config: Any) -> dict[str, Any]:
    """The dtype of a model whose activations are too large for float16."""
    return {"dtype": torch.bfloat16} if config.dtype in (torch.float16, "float16") else {}


def softmax_experts(
    config: Any,
    *,
    count: int,
    inner: int,
    normalize: bool,
    dense: Sequence[int] = (),
    biased: bool = False,
    shared: int = 0,
) -> ExpertShape:
    """A mixture whose router takes a softmax over all experts.

    Args:
        config: The ``transformers`` configuration.
        count: Number of experts.
        inner: Width inside each.
        normalize: Whether the weights of the chosen experts are normalized to a sum of 1.
        dense: Layers without experts.
        biased: Whether the router and the experts' products have biases.
        shared: Width of the experts that process every token, together, whose result has a gate; 0 if there are none.

    Raises:
        CheckpointError: More experts are chosen than there are.
    """
    chosen = config.num_experts_per_tok
    check_experts(count, chosen)
    return ExpertShape(
        count=count,
        chosen=chosen,
        inner=inner,
        dense_layers=frozenset(dense),
        groups=1,
        chosen_groups=1,
        corrected=False,
        normalize=normalize,
        scale=1.0,
        biased=biased,
        shared_inner=shared,
        gates_shared=shared > 0,
    )


def _rotated(config: Any, head_dim: int) -> int | None:
    """Elements of a head that are rotated, if not all."""
    # Where it is "proportional", the rest of a head is turned, too, by an angle of 0.
    shares = {
        1.0 if each.get("rope_type") == "proportional" else float(each.get("partial_rotary_factor") or 1.0)
        for each in rope_sets(config).values()
        if each
    }
    if len(shares) != 1:
        raise CheckpointError(f"layers that rotate different parts of a head ({shares}) are not supported")
    rotated = int(head_dim * shares.pop())
    if rotated % 2 or not 0 < rotated <= head_dim:
        raise CheckpointError(f"partial_rotary_factor rotates {rotated} of {head_dim} elements of a head")
    return None if rotated == head_dim else rotated


def _groups(config: Any, types: Sequence[str] | None, entry: EntryShape) -> tuple[LayerGroup, ...]:
    """Layers with full attention, then those with a window."""
    count, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    if window is not None and window < 1:
        raise CheckpointError(f"sliding_window is {window}; it must be 1 or more, or null for none")
    if window is not None and window >= longest_sequence(config):
        window = None
    sets = rope_sets(config)
    if window is None and None in sets:
        types = [FULL] * count
    elif types is None:
        types = list(getattr(config, "layer_types", None) or [FULL] * count)[:count]
    unknown = sorted(set(types) - {FULL, SLIDING})
    if unknown:
        raise CheckpointError(f"layers of type {', '.join(unknown)} are not supported; supported: {FULL}, {SLIDING}")
    missing = sorted(set(types) - set(sets)) if None not in sets else []
    if missing:
        raise CheckpointError(f"rope_parameters are missing for layers of type {', '.join(missing)}")
    return tuple(
        LayerGroup(
            layers=tuple(layer for layer, each in enumerate(types) if each == kind),
            entry=entry,
            window=window if kind == SLIDING else None,
            rotation=None if None in sets else kind,
        )
        for kind in (FULL, SLIDING)
        if kind in types
    )
