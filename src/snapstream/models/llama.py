"""The Llama family: Llama 2 and 3, Mistral, Qwen2 and Qwen3, with grouped-query attention."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from snapstream.cache import EntryShape, LayerGroup
from snapstream.errors import CheckpointError
from snapstream.kernels.operations import Attend, Operation, Rotate, Store
from snapstream.kernels.parts import Part
from snapstream.models.block import Block, block_places
from snapstream.models.family import Family
from snapstream.models.layers import Linear, RMSNorm
from snapstream.models.names import Place, linear_places
from snapstream.models.rope import longest_sequence, rope_sets
from snapstream.models.spec import ModelSpec

_FULL, _SLIDING = "full_attention", "sliding_attention"


class GroupedAttention(nn.Module):
    """The projections before and after grouped-query attention, in which groups of query heads share a KV head."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.window = spec.layer_group(layer).window or 0
        self.heads, self.kv_heads, self.head_dim, self.scale = spec.heads, spec.kv_heads, spec.head_dim, spec.scale
        self.qkv = Linear(spec.hidden_size, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, bias=spec.qkv_bias)
        self.output = Linear(spec.heads * spec.head_dim, spec.hidden_size, bias=spec.output_bias)
        self.query_norm = RMSNorm(spec.head_dim, spec.norm_epsilon) if spec.qk_norm else None
        self.key_norm = RMSNorm(spec.head_dim, spec.norm_epsilon) if spec.qk_norm else None

    def operations(self, layer: int, source: Part, target: Part, angles: Part) -> Iterator[Operation]:
        """Attention as operations; the result is added to ``target``."""
        H, N, D = self.heads, self.kv_heads, self.head_dim
        query, key = Part("qkv", D, H), Part("qkv", D, N, offset=H * D)
        value, rotated = Part("qkv", D, N, offset=(H + N) * D), Part("qkv", D, H + N)
        yield self.qkv.operation(source, Part("qkv", (H + 2 * N) * D))
        if self.query_norm is not None and self.key_norm is not None:
            yield self.query_norm.operation(query, query)
            yield self.key_norm.operation(key, key)
        yield Rotate(rotated, rotated, angles)
        yield Store(key, value, layer)
        yield Attend(query, Part("attended", D, H), layer, self.scale, window=self.window)
        yield self.output.operation(Part("attended", H * D), target, add=True)


def _fields(config: Any, architecture: str) -> dict[str, Any]:
    bias = bool(getattr(config, "attention_bias", False))
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    return {
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "qkv_bias": bias or architecture == "Qwen2ForCausalLM",
        "output_bias": bias,
        "qk_norm": architecture == "Qwen3ForCausalLM",
        "groups": _groups(config, architecture, EntryShape(kv_heads, head_dim, latent=False)),
    }


def _groups(config: Any, architecture: str, entry: EntryShape) -> tuple[LayerGroup, ...]:
    """Layers with full attention, then those with a window: all of Mistral's, and of others what their types say."""
    count, window = config.num_hidden_layers, getattr(config, "sliding_window", None)
    if window is not None and window < 1:
        raise CheckpointError(f"sliding_window is {window}; it must be 1 or more, or null for none")
    if window is None or window >= longest_sequence(config):
        types = [_FULL] * count
    elif architecture == "MistralForCausalLM":
        types = [_SLIDING] * count
    else:
        types = list(getattr(config, "layer_types", None) or [_FULL] * count)[:count]
    unknown = sorted(set(types) - {_FULL, _SLIDING})
    if unknown:
        raise CheckpointError(f"layers of type {', '.join(unknown)} are not supported; supported: {_FULL}, {_SLIDING}")
    sets = rope_sets(config)
    missing = sorted(set(types) - set(sets)) if None not in sets else []
    if missing:
        raise CheckpointError(f"rope_parameters are missing for layers of type {', '.join(missing)}")
    return tuple(
        LayerGroup(
            layers=tuple(layer for layer, each in enumerate(types) if each == kind),
            entry=entry,
            window=window if kind == _SLIDING else None,
            rotation=None if None in sets else kind,
        )
        for kind in (_FULL, _SLIDING)
        if kind in types
    )


def attention_places(source: str, target: str, spec: ModelSpec) -> dict[str, Place]:
    """Where the tensors of grouped-query attention go."""
    queries, keys, hidden = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden_size
    places = linear_places(f"{source}.q_proj", f"{target}.qkv", queries, hidden, spec.qkv_bias)
    places |= linear_places(f"{source}.k_proj", f"{target}.qkv", keys, hidden, spec.qkv_bias, queries)
    places |= linear_places(f"{source}.v_proj", f"{target}.qkv", keys, hidden, spec.qkv_bias, queries + keys)
    places |= linear_places(f"{source}.o_proj", f"{target}.output", hidden, queries, spec.output_bias)
    if spec.qk_norm:
        places[f"{source}.q_norm.weight"] = Place(f"{target}.query_norm.weight", (spec.head_dim,))
        places[f"{source}.k_norm.weight"] = Place(f"{target}.key_norm.weight", (spec.head_dim,))
    return places


LLAMA = Family(
    architectures=("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    fields=_fields,
    block=lambda spec, layer: Block(spec, layer, GroupedAttention(spec, layer)),
    places=lambda source, target, spec, layer: block_places(source, target, spec, layer, attention_places),
)
