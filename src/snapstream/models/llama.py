"""Attention in the Llama family: Llama 2 and 3, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn

from snapstream.kernels.operations import Attend, Operation, Rotate, Store
from snapstream.kernels.parts import Part
from snapstream.models.layers import Linear, RMSNorm
from snapstream.models.spec import ModelSpec


class GroupedAttention(nn.Module):
    """The projections before and after grouped-query attention, in which groups of query heads share a KV head."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
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
        yield Attend(query, Part("attended", D, H), layer, self.scale)
        yield self.output.operation(Part("attended", H * D), target, add=True)
