"""One decoder layer: attention and feed-forward, each after a norm and with a residual connection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch
from torch import Tensor, nn

from snapstream.cache import LayerCache
from snapstream.kernels.operations import Operation
from snapstream.kernels.parts import Part
from snapstream.kernels.rows import can_store
from snapstream.models.deepseek import LatentAttention, MixtureOfExperts
from snapstream.models.layers import FeedForward, RMSNorm
from snapstream.models.llama import GroupedAttention
from snapstream.models.spec import ModelSpec


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_epsilon)
        self.attention = GroupedAttention(spec) if spec.latent is None else LatentAttention(spec)
        self.feed_forward_norm = RMSNorm(spec.hidden_size, spec.norm_epsilon)
        self.feed_forward: nn.Module
        if spec.experts is not None and layer >= spec.experts.first_layer:
            self.feed_forward = MixtureOfExperts(spec.hidden_size, spec.experts)
        else:
            self.feed_forward = FeedForward(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)

    def project(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the inputs of attention.

        Args:
            x: ``[T, hidden]``.
            cosine: Cosines of the tokens' positions, see :meth:`DecoderModel.rope`.
            sine: Sines of the tokens' positions.

        Returns:
            Query ``[T, H, D]``, key and value ``[T, N, D]``; query and key are rotated.
        """
        projected: tuple[Tensor, Tensor, Tensor] = self.attention.project(self.attention_norm(x), cosine, sine)
        return projected

    def store(self, x: Tensor, cosine: Tensor, sine: Tensor, cache: LayerCache, start: Tensor) -> Tensor:
        """Like :meth:`project`, but write the keys and values to the cache of one sequence.

        Args:
            x: The sequence's next tokens, ``[T, hidden]``.
            cosine: Cosines of the tokens' positions, see :meth:`DecoderModel.rope`.
            sine: Sines of the tokens' positions.
            cache: ``[1, N, C, D]``.
            start: Entry of the first token, int64 scalar.

        Returns:
            Query ``[T, H, D]``, rotated.
        """
        if can_store(x):
            stored: Tensor = self.attention.store(self.attention_norm(x), cosine, sine, cache, start)
            return stored
        query, key, value = self.project(x, cosine, sine)
        cache.write((start + torch.arange(len(x), device=x.device))[None], key[None], value[None])
        return query

    def complete(self, x: Tensor, attended: Tensor) -> Tensor:
        """Compute the layer's output ``[T, hidden]`` from its input ``[T, hidden]`` and attention's ``[T, H, D]``."""
        x = self.attention.complete(attended).add_(x)
        result: Tensor = self.feed_forward(self.feed_forward_norm(x)).add_(x)
        return result

    def operations(self, layer: int, x: Part, angles: Part) -> Iterator[Operation]:
        """The layer as operations of a decode step; its results are added to ``x``."""
        normed = Part("normed", x.size)
        yield self.attention_norm.operation(x, normed)
        yield from self.attention.operations(layer, normed, x, angles)
        yield self.feed_forward_norm.operation(x, normed)
        yield from cast(FeedForward | MixtureOfExperts, self.feed_forward).operations(normed, x)
