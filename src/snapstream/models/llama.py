"""The Llama family in one file: Llama 2 and 3, Mistral, Qwen2 and Qwen3.

Tokens come as one flat row ``[T]``: a chunk of one prompt, or one token of each of ``T`` sequences. What attention
attends to is the caller's business: it hands over a function that stores this layer's keys and values wherever it
keeps them and returns the attention output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from snapstream.kernels import cpu as cpu_kernels
from snapstream.models.rope import rope_frequencies, rope_table, rotate
from snapstream.models.spec import ModelSpec

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, query [T, H, D], key [T, N, D], value [T, N, D]) -> [T, H, D]``; queries and keys are rotated."""


class Linear(nn.Linear):
    """A linear layer that reads its weight once where there are few rows (see :mod:`snapstream.kernels.cpu`).

    Attributes:
        skinny_rows: Most rows for which it does; set once the weight is in place.
    """

    skinny_rows = 0

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[T, K]`` to ``[T, out]``."""
        if x.shape[0] <= self.skinny_rows:
            return cpu_kernels.skinny_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalise; shape and dtype stay."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Projections, norms and rotation around the attention that the caller provides."""

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


class FeedForward(nn.Module):
    """SwiGLU with gate and up projection in one product."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate_up = Linear(spec.hidden_size, 2 * spec.intermediate_size, bias=spec.mlp_bias)
        self.down = Linear(spec.intermediate_size, spec.hidden_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[T, hidden]`` to ``[T, hidden]``."""
        gate, up = self.gate_up(x).chunk(2, -1)
        result: Tensor = self.down(F.silu(gate) * up)
        return result


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_epsilon)
        self.attention = Attention(spec, layer)
        self.feed_forward_norm = RMSNorm(spec.hidden_size, spec.norm_epsilon)
        self.feed_forward = FeedForward(spec)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, attend: Attend) -> Tensor:
        """Map ``[T, hidden]`` to ``[T, hidden]``."""
        x = x + self.attention(self.attention_norm(x), cosine, sine, attend)
        result: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return result


class LlamaModel(nn.Module):
    """The whole decoder. Build it on the ``meta`` device and fill it with :func:`~snapstream.models.load_model`."""

    frequencies: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.blocks = nn.ModuleList(Block(spec, layer) for layer in range(spec.layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_epsilon)
        self.head = Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.tied_embeddings:
            self.head.weight = self.embedding.weight
        frequencies, self.rope_scaling = rope_frequencies(spec.source)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run all layers.

        Args:
            tokens: int64 ``[T]``.
            positions: True positions, int64 ``[T]``; not rows of a cache.
            attend: Attention over the caller's cache.

        Returns:
            Final hidden states ``[T, hidden]``.
        """
        x = self.embedding(tokens)
        cosine, sine = rope_table(positions, self.frequencies, self.rope_scaling, x.dtype)
        for block in self.blocks:
            x = block(x, cosine, sine, attend)
        result: Tensor = self.norm(x)
        return result

    def logits(self, hidden: Tensor) -> Tensor:
        """Map ``[T, hidden]`` to float32 ``[T, vocab]``."""
        result: Tensor = self.head(hidden).float()
        return result
