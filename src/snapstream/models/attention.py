"""Grouped-query attention, in which groups of query heads share a KV head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from snapstream.kernels.operations import Attend, GateBy, Operation, Rotate, ScaleByPosition, Store
from snapstream.kernels.parts import Part
from snapstream.models.layers import Linear, Result, RMSNorm
from snapstream.models.names import Interleaved, Place, linear_places, norm_place
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
        # Gates, if there are any, then queries, keys and values.
        self.gates = spec.heads if spec.gates_attention else 0
        heads = self.gates + spec.heads + 2 * spec.kv_heads
        self.qkv = Linear(spec.hidden_size, heads * spec.head_dim, bias=spec.qkv_bias)
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
        start = self.gates * D
        query, key = Part("qkv", D, H, start), Part("qkv", D, N, start + H * D)
        value = Part("qkv", D, N, start + (H + N) * D)
        yield self.qkv.operation(source, Part("qkv", start + (H + 2 * N) * D))
        if self.query_norm is not None and self.key_norm is not None:
            for norm, part in ((self.query_norm, query), (self.key_norm, key)):
                size = len(norm.weight)
                normed = Part("qkv", size, part.heads * D // size, part.offset)
                yield norm.operation(normed, normed)
        if self.rotated:
            stride = 0 if self.rotated == D else D
            rotated = Part("qkv", self.rotated, H + N, start, stride)
            yield Rotate(rotated, rotated, angles, self.pairs)
        yield Store(key, value, layer)
        if self.growth is not None:
            yield ScaleByPosition(query, *self.growth)
        attended = Part("attended", D, H)
        yield Attend(query, attended, layer, self.scale, window=self.window, cap=self.cap, sinks=self.sinks)
        if self.gates:
            yield GateBy(Part("qkv", D, H), attended, sigmoid=True)
        yield self.output.operation(Part("attended", H * D), result)


def _normed_sizes(spec: ModelSpec) -> tuple[int, int]:
    """Elements that a norm of queries and one of keys take together: those of a head, or of all heads."""
    heads = (spec.heads, spec.kv_heads) if spec.qk_norm == "all" else (1, 1)
    return heads[0] * spec.head_dim, heads[1] * spec.head_dim


def attention_places(source: str, target: str, spec: ModelSpec, *, joined: bool = False) -> dict[str, Place]:
    """Where the tensors of grouped-query attention go; ``joined``: queries, keys and values are one tensor."""
    queries, keys, hidden = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden_size
    rows = {"qkv_proj": queries + 2 * keys} if joined else {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    with_gates = None
    if spec.gates_attention:  # each head's query, then its gate
        with_gates, rows["q_proj"] = Interleaved((spec.head_dim, spec.head_dim), (1, 0)), 2 * queries
    places, start = dict[str, Place](), 0
    for name, count in rows.items():
        order = with_gates if name == "q_proj" else None
        places |= linear_places(f"{source}.{name}", f"{target}.qkv", count, hidden, spec.qkv_bias, start, order)
        start += count
    if spec.has_sinks:
        places[f"{source}.sinks"] = Place(f"{target}.sinks", (spec.heads,))
    places |= linear_places(f"{source}.o_proj", f"{target}.output", hidden, queries, spec.output_bias)
    if spec.qk_norm is not None:
        for name, module, size in zip(("q", "k"), ("query", "key"), _normed_sizes(spec), strict=True):
            places[f"{source}.{name}_norm.weight"] = norm_place(f"{target}.{module}_norm", size, spec)
    return places
