"""The decoder that all supported models are: blocks of attention and feed-forward between embedding and logits.

Tokens come as one flat row ``[T]``: a chunk of one prompt, or one token of each of ``T`` sequences. What attention
attends to is the caller's business: it hands over a function that stores this layer's keys and values wherever it
keeps them and returns the attention output.
"""

from __future__ import annotations

from torch import Tensor, nn

from snapstream.models.deepseek import LatentAttention, MixtureOfExperts
from snapstream.models.layers import Attend, FeedForward, Linear, RMSNorm
from snapstream.models.llama import GroupedAttention
from snapstream.models.rope import rope_frequencies, rope_table
from snapstream.models.spec import ModelSpec


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_epsilon)
        self.attention = GroupedAttention(spec, layer) if spec.latent is None else LatentAttention(spec, layer)
        self.feed_forward_norm = RMSNorm(spec.hidden_size, spec.norm_epsilon)
        self.feed_forward: nn.Module
        if spec.experts is not None and layer >= spec.experts.first_layer:
            self.feed_forward = MixtureOfExperts(spec.hidden_size, spec.experts)
        else:
            self.feed_forward = FeedForward(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, attend: Attend) -> Tensor:
        """Map ``[T, hidden]`` to ``[T, hidden]``."""
        x = x + self.attention(self.attention_norm(x), cosine, sine, attend)
        result: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return result


class DecoderModel(nn.Module):
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
