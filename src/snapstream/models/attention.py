"""Grouped-query attention, in which groups of query heads share a KV head."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from snapstream.kernels.buffers import BufferView
from snapstream.kernels.operations import Attend, GateBy, Operation, Rotate, ScaleByPosition, Store
from snapstream.models.layers import FixedNorm, Linear, Result, RMSNorm
from snapstream.models.names import Interleaved, Place, linear_places, norm_place
from snapstream.models.spec import ModelSpec


class GroupedAttention(nn.Module):
    """The projections before and after attention, and what queries and keys go through in between."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.window, entry = spec.layer_group(layer).window or 0, spec.entry_of(layer)
        self.heads, self.kv_heads, self.head_dim, self.scale = spec.heads, entry.heads, entry.size, spec.scale
        self.rotated = 0 if layer in spec.unrotated_layers else spec.rotated or entry.size
        self.growth = spec.query_growth
        self.pairs, self.cap = spec.rotates_pairs, spec.attention_cap
        self.sinks = nn.Parameter(torch.zeros(spec.heads)) if spec.has_sinks else None
        # Gates, if there are any, then queries, keys and values.
        self.gates = spec.heads if spec.gates_attention else 0
        self.projects_values = layer not in spec.values_from_keys
        self.has_cache = layer not in spec.shared_from
        heads = self.gates + spec.heads + self.has_cache * (1 + self.projects_values) * entry.heads
        self.qkv = Linear(spec.hidden_size, heads * entry.size, bias=spec.qkv_bias)
        self.output = Linear(spec.heads * entry.size, spec.hidden_size, bias=spec.output_bias)
        epsilon = spec.norm_epsilon
        self.query_norm: RMSNorm | None = None
        self.key_norm: RMSNorm | None = None
        if spec.qk_factors is not None:
            self.query_norm, self.key_norm = (FixedNorm(entry.size, epsilon, each) for each in spec.qk_factors)
        elif spec.qk_norm is not None:
            self.query_norm, self.key_norm = (
                RMSNorm(size, epsilon, wide=spec.wide_norms) for size in _normed_sizes(spec, layer)
            )
        self.value_norm = FixedNorm(entry.size, epsilon) if spec.norms_values and self.has_cache else None
        if not self.has_cache:
            self.key_norm = None

    def operations(self, layer: int, source: BufferView, result: Result, angles: BufferView) -> Iterator[Operation]:
        """Attention as operations."""
        H, N, D = self.heads, self.kv_heads, self.head_dim
        start = self.gates * D
        query, key = BufferView("qkv", D, H, start), BufferView("qkv", D, N, start + H * D)
        value = BufferView("qkv", D, N, start + (H + N) * D)
        yield self.qkv.operation(source, BufferView("qkv", self.qkv.out_features))
        if self.value_norm is not None:
            yield self.value_norm.operation(value if self.projects_values else key, value)
        for norm, part in ((self.query_norm, query), (self.key_norm, key)):
            if norm is not None:
                size = len(norm.weight)
                normed = BufferView("qkv", size, part.heads * D // size, part.offset)
                yield norm.operation(normed, normed)
        if self.rotated:
            stride = 0 if self.rotated == D else D
            rotated = BufferView("qkv", self.rotated, H + N if self.has_cache else H, start, stride)
            yield Rotate(rotated, rotated, angles, self.pairs)
        if self.has_cache:
            yield Store(key, value, layer)
        if self.growth is not None:
            yield ScaleByPosition(query, *self.growth)
        attended = BufferView("attended", D, H)
        yield Attend(query, attended, layer, self.scale, window=self.window, cap=self.cap, sinks=self.sinks)
        if self.gates:
            yield GateBy(BufferView("qkv", D, H), attended, sigmoid=True)
        yield self.output.operation(BufferView("attended", H * D), result)


def _normed_sizes(spec: ModelSpec, layer: int) -> tuple[int, int]:
    """Elements that a norm of queries and one of keys take together: those of a head, or of all heads."""
    entry = spec.entry_of(layer)
    heads = (spec.heads, entry.heads) if spec.qk_norm == "all" else (1, 1)
    return heads[0] * entry.size, heads[1] * entry.size


def attention_places(
    source: str, target: str, spec: ModelSpec, layer: int, *, joined: bool = False
) -> dict[str, Place]:
    """Where the tensors of grouped-query attention go; ``joined``: queries, keys and values are one tensor."""
    entry, norms = spec.entry_of(layer), ["q", "k"]
    queries, keys, hidden = spec.heads * entry.size, entry.heads * entry.size, spec.hidden_size
    rows = {"qkv_proj": queries + 2 * keys} if joined else {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    if layer in spec.values_from_keys:
        del rows["v_proj"]
    if layer in spec.shared_from:
        rows, norms = {"q_proj": queries}, ["q"]
    with_gates = None
    if spec.gates_apart:
        rows = {"gate_proj": queries} | rows
    elif spec.gates_attention:  # each head's query, then its gate
        with_gates, rows["q_proj"] = Interleaved((entry.size, entry.size), (1, 0)), 2 * queries
    places, start = dict[str, Place](), 0
    for name, count in rows.items():
        order, bias = with_gates if name == "q_proj" else None, spec.qkv_bias and name != "gate_proj"
        places |= linear_places(f"{source}.{name}", f"{target}.qkv", count, hidden, bias, start, order)
        start += count
    if spec.has_sinks:
        places[f"{source}.sinks"] = Place(f"{target}.sinks", (spec.heads,))
    places |= linear_places(f"{source}.o_proj", f"{target}.output", hidden, queries, spec.output_bias)
    if spec.qk_norm is not None:
        for name, module, size in zip(norms, ("query", "key"), _normed_sizes(spec, layer), strict=False):
            places[f"{source}.{name}_norm.weight"] = norm_place(f"{target}.{module}_norm", size, spec)
    return places
