"""One decoder layer: attention and feed-forward, each after a norm and with a residual connection."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import nn

from snapstream.kernels.operations import Operation
from snapstream.kernels.parts import Part
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

    def operations(self, layer: int, x: Part, angles: Part) -> Iterator[Operation]:
        """The layer as operations; its results are added to ``x``."""
        normed = Part("normed", x.size)
        yield self.attention_norm.operation(x, normed)
        yield from self.attention.operations(layer, normed, x, angles)
        yield self.feed_forward_norm.operation(x, normed)
        yield from cast(FeedForward | MixtureOfExperts, self.feed_forward).operations(normed, x)
