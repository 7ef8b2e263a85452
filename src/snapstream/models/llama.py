"""Attention in the Llama family: Llama 2 and 3, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from snapstream.cache import LayerCache
from snapstream.kernels.operations import Attend, Operation, Rotate, Store
from snapstream.kernels.parts import Part
from snapstream.kernels.rows import rotate, store_grouped
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

    def project(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Map ``[T, hidden]`` to query ``[T, H, D]``, key and value ``[T, N, D]``."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        query, key, value = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        return rotate(query, cosine, sine, pairs=False), rotate(key, cosine, sine, pairs=False), value

    def store(self, x: Tensor, cosine: Tensor, sine: Tensor, cache: LayerCache, start: Tensor) -> Tensor:
        """Compute queries ``[T, H, D]`` and write keys and values to a cache.

        See :meth:`snapstream.models.block.Block.store`.
        """
        norms = None
        if self.query_norm is not None and self.key_norm is not None:
            norms = (self.query_norm.weight, self.key_norm.weight, self.query_norm.epsilon)
        return store_grouped(self.qkv(x), cosine, sine, cache, start, norms)

    def complete(self, attended: Tensor) -> Tensor:
        """Map ``[T, H, D]`` to ``[T, hidden]``."""
        result: Tensor = self.output(attended.reshape(attended.shape[0], -1))
        return result

    def operations(self, layer: int, source: Part, target: Part, angles: Part) -> Iterator[Operation]:
        """Attention as operations of a decode step; the result is added to ``target``."""
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
