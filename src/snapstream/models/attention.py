"""Grouped-query attention, in which groups of query heads share a KV head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from snapstream.kernels.operations import Attend, Operation, Rotate, ScaleByPosition, Store
from snapstream.kernels.parts import Part
from snapstream.models.layers import Linear, Result, RMSNorm
from snapstream.models.names import Place, linear_places, norm_place
from snapstream.models.spec import ModelSpec


class GroupedAttention(nn.Module):
    """The projections before and after attention, and what queries and keys go through in between."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.window = spec.layer_group(layer).window or 0
        self.heads, self.kv_heads, self.head_dim, self.scale = spec.heads, spec.kv_heads, spec.head_dim, spec.scale
        self.rotated = 0 if layer in spec.unrotated_layers else spec.rotated or spec.head_dim
        self.growth = spec.query_growth
        self.pairs, self.cap = spec.rotates_pairs, spec.attention_cap
        self.sinks = nn.Parameter(torch.zeros(spec.heads)) if spec.has_sinks else None
        self.qkv = Linear(spec.hidden_size, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, bias=spec.qkv_bias)
        self.output = Linear(spec.heads * spec.head_dim, spec.hidden_size, bias=spec.output_bias)
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if spec.qk_norm is not None:
            self.query_norm, self.key_norm = (
                RMSNorm(size, spec.norm_epsilon, wide=spec.wide_norms) for size in _normed_sizes(spec)
            )

    def operations(self, layer: int, source: Part, result: Result, angles: Part) -> Iterator[Operation]:
        """Attention as operations."""
        H, N, D = self.heads, self.kv_heads, self.head_dim
        query, key = Part("qkv", D, H), Part("qkv", D, N, offset=H * D)
        value = Part("qkv", D, N, offset=(H + N) * D)
        yield self.qkv.operation(source, Part("qkv", (H + 2 * N) * D))
        if self.query_norm is not None and self.key_norm is not None:
            for norm, part in ((self.query_norm, query), (self.key_norm, key)):
                size = len(norm.weight)
                normed = Part("qkv", size, part.heads * D // size, part.offset)
                yield norm.operation(normed, normed)
        if self.rotated:
            stride = 0 if self.rotated == D else D
            rotated = Part("qkv", self.rotated, H + N, stride=stride)
            yield Rotate(rotated, rotated, angles, self.pairs)
        yield Store(key, value, layer)
        if self.growth is not None:
            yield ScaleByPosition(query, *self.growth)
        attended = Part("attended", D, H)
        yield Attend(query, attended, layer, self.scale, window=self.window, cap=self.cap, sinks=self.sinks)
        yield self.output.operation(Part("attended", H * D), result)


def _normed_sizes(spec: ModelSpec) -> tuple[int, int]:
    """Elements that a norm of queries and one of keys take together: those of a head, or of all heads."""
    heads = (spec.heads, spec.kv_heads) if spec.qk_norm == "all" else (1, 1)
    return heads[0] * spec.head_dim, heads[1] * spec.head_dim


def attention_places(source: str, target: str, spec: ModelSpec, *, joined: bool = False) -> dict[str, Place]:
    """Where the tensors of grouped-query attention go; ``joined``: queries, keys and values are one tensor."""
    queries, keys, hidden = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden_size
    rows = {"qkv_proj": queries + 2 * keys} if joined else {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    places, start = dict[str, Place](), 0
    for name, count in rows.items():
        places |= linear_places(f"{source}.{name}", f"{target}.qkv", count, hidden, spec.qkv_bias, start)
        start += count
    if spec.has_sinks:
        places[f"{source}.sinks"] = Place(f"{target}.sinks", (spec.heads,))
    places |= linear_places(f"{source}.o_proj", f"{target}.output", hidden, queries, spec.output_bias)
    if spec.qk_norm is not None:
        for name, module, size in zip(("q", "k"), ("query", "key"), _normed_sizes(spec), strict=True):
            places[f"{source}.{name}_norm.weight"] = norm_place(f"{target}.{module}_norm", size, spec)
    return places
