"""Attention of the Llama family: Llama 2 and 3, Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from torch import Tensor, nn

from snapstream.models.layers import Attend, Linear, RMSNorm
from snapstream.models.rope import rotate
from snapstream.models.spec import ModelSpec


class GroupedAttention(nn.Module):
    """Heads that share keys and values in groups: what is around the attention that the caller provides."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.layer = layer
        self.heads, self.kv_heads, self.head_dim = spec.heads, spec.kv_heads, spec.head_dim
        self.qkv = Linear(spec.hidden_size, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, bias=spec.qkv_bias)
        self.output = Linear(spec.heads * spec.head_dim, spec.hidden_size, bias=spec.output_bias)
        self.query_norm = RMSNorm(spec.head_dim, spec.norm_epsilon) if spec.qk_norm else None
        self.key_norm = RMSNorm(spec.head_dim, spec.norm_epsilon) if spec.qk_norm else None

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, attend: Attend) -> Tensor:
        """Map ``[T, hidden]`` to ``[T, hidden]``."""
        qkv = self.qkv(x).view(x.shape[0], -1, self.head_dim)
        query, key, value = qkv.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        result: Tensor = self.output(attend(self.layer, query, key, value).reshape(x.shape[0], -1))
        return result
