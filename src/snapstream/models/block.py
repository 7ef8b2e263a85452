"""One decoder layer: attention and feed-forward, each after a norm and with a residual connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Protocol, cast

from torch import nn

from snapstream.kernels.operations import Operation
from snapstream.kernels.parts import Part
from snapstream.models.experts import MixtureOfExperts, expert_places
from snapstream.models.layers import FeedForward, RMSNorm
from snapstream.models.names import Place, gated_places, norm_places
from snapstream.models.spec import ModelSpec


class Attention(Protocol):
    """Attention with its projections: a module that describes what it computes."""

    def operations(self, layer: int, source: Part, target: Part, angles: Part) -> Iterator[Operation]:
        """Attention as operations; the result is added to ``target``."""


class Block(nn.Module):
    """One decoder layer; most families differ in attention alone."""

    def __init__(self, spec: ModelSpec, layer: int, attention: nn.Module) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_epsilon)
        self.attention = attention
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
        yield from cast(Attention, self.attention).operations(layer, normed, x, angles)
        yield self.feed_forward_norm.operation(x, normed)
        yield from cast(FeedForward | MixtureOfExperts, self.feed_forward).operations(normed, x)


def block_places(
    source: str,
    target: str,
    spec: ModelSpec,
    layer: int,
    attention: Callable[[str, str, ModelSpec], dict[str, Place]],
) -> dict[str, Place]:
    """Where the tensors of a layer go; ``attention`` says it for attention's."""
    places = norm_places(
        source, target, spec, input_layernorm="attention_norm", post_attention_layernorm="feed_forward_norm"
    )
    places |= attention(f"{source}.self_attn", f"{target}.attention", spec)
    source, target = f"{source}.mlp", f"{target}.feed_forward"
    if spec.experts is not None and layer >= spec.experts.first_layer:
        return places | expert_places(source, target, spec.hidden_size, spec.experts)
    return places | gated_places(source, target, spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)
