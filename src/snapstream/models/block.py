"""One decoder layer: attention and feed-forward, each with norms around it and a residual connection."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, cast

from torch import nn

from snapstream.kernels.buffers import BufferView
from snapstream.kernels.operations import Operation
from snapstream.models.experts import ExpertNames, MixtureOfExperts, expert_places
from snapstream.models.layers import FeedForward, Result, RMSNorm
from snapstream.models.names import Place, gated_places, norm_places
from snapstream.models.spec import ModelSpec


class Attention(Protocol):
    """Attention with its projections: a module that describes what it computes."""

    def operations(self, layer: int, source: BufferView, result: Result, angles: BufferView) -> Iterator[Operation]:
        """Attention as operations."""


class Block(nn.Module):
    """One decoder layer; most families differ in attention alone."""

    def __init__(
        self, spec: ModelSpec, layer: int, attention: nn.Module, feed_forward: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.factor = spec.residual_factor

        def norm(needed: bool, epsilon: float | None = None) -> RMSNorm | None:
            epsilon = spec.norm_epsilon if epsilon is None else epsilon
            return RMSNorm(spec.hidden_size, epsilon, wide=spec.wide_norms) if needed else None

        after = spec.norms_after, spec.norm_after_epsilon
        self.attention_norm, self.attention_result_norm = norm(spec.norms_before), norm(*after)
        self.attention = attention
        self.feed_forward_norm, self.feed_forward_result_norm = norm(spec.norms_before), norm(*after)
        self.feed_forward: nn.Module
        if feed_forward is not None:
            self.feed_forward = feed_forward
        elif spec.experts is not None and layer not in spec.experts.dense_layers:
            self.feed_forward = MixtureOfExperts(spec.hidden_size, spec.experts, spec.activation)
        else:
            self.feed_forward = FeedForward(
                spec.hidden_size, spec.inner_size(layer), bias=spec.mlp_bias, activation=spec.activation
            )

    def operations(self, layer: int, x: BufferView, angles: BufferView) -> Iterator[Operation]:
        """The layer as operations; its results are added to ``x``."""
        attention = cast(Attention, self.attention)
        feed_forward = cast(FeedForward | MixtureOfExperts, self.feed_forward)
        yield from self._branch(
            x,
            lambda source, result: attention.operations(layer, source, result, angles),
            self.attention_norm,
            self.attention_result_norm,
        )
        yield from self._branch(x, feed_forward.operations, self.feed_forward_norm, self.feed_forward_result_norm)

    def _branch(
        self,
        x: BufferView,
        inner: Callable[[BufferView, Result], Iterator[Operation]],
        before: RMSNorm | None,
        after: RMSNorm | None,
    ) -> Iterator[Operation]:
        source, result = x, Result(x, add=True, factor=self.factor)
        if before is not None:
            source = BufferView("normed", x.size)
            yield before.operation(x, source)
        if after is not None:
            result = Result(BufferView("branch", x.size))
        yield from inner(source, result)
        if after is not None:
            yield after.operation(result.target, x, add=True)


@dataclass(frozen=True)
class BlockNames:
    """What the tensors of a layer are called in checkpoints.

    Attributes:
        attention_norm: The norm before attention.
        attention_result_norm: The norm after it.
        feed_forward_norm: The norm before the feed-forward block.
        feed_forward_result_norm: The norm after it.
        feed_forward: The feed-forward block, or the mixture of experts.
        joined_qkv: Whether queries, keys and values are one tensor.
        gate_up: The tensor of gates and ups, if they are one.
        down: The product after them.
        experts: Names within a mixture of experts.
    """

    attention_norm: str = "input_layernorm"
    attention_result_norm: str = ""
    feed_forward_norm: str = "post_attention_layernorm"
    feed_forward_result_norm: str = ""
    feed_forward: str = "mlp"
    joined_qkv: bool = False
    gate_up: str = ""
    down: str = "down_proj"
    experts: ExpertNames = field(default_factory=ExpertNames)


def block_places(
    source: str,
    target: str,
    spec: ModelSpec,
    layer: int,
    attention: dict[str, Place],
    names: BlockNames = BlockNames(),
    feed_forward: str = "",
) -> dict[str, Place]:
    """Where the tensors of a layer go.

    Args:
        source: Beginning of their names.
        target: Name of the layer's module.
        spec: The model.
        layer: Index of the layer.
        attention: The same for attention's tensors.
        names: What the others are called.
        feed_forward: Name of the module of the feed-forward block, if it is within another one.
    """
    norms: dict[str, str] = {}
    if spec.norms_before:
        norms |= {names.attention_norm: "attention_norm", names.feed_forward_norm: "feed_forward_norm"}
    if spec.norms_after:
        norms |= {names.attention_result_norm: "attention_result_norm"}
        norms |= {names.feed_forward_result_norm: "feed_forward_result_norm"}
    places = norm_places(source, target, spec, **norms) | attention
    hidden, inner, bias = spec.hidden_size, spec.inner_size(layer), spec.mlp_bias
    source, target = f"{source}.{names.feed_forward}", feed_forward or f"{target}.feed_forward"
    if spec.experts is not None and layer not in spec.experts.dense_layers and not spec.experts.beside:
        return places | expert_places(source, target, hidden, spec.experts, names.experts)
    return places | gated_places(source, target, hidden, inner, bias=bias, joined=names.gate_up, down=names.down)
