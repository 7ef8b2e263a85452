"""Building blocks of the layers of all models."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from snapstream.kernels.operations import GatedProduct, Norm, Operation, Product
from snapstream.kernels.parts import Part
from snapstream.kernels.weight import Weight


class Linear(nn.Linear):
    """A product with a weight ``[out, in]``."""

    def operation(self, source: Part, target: Part, *, add: bool = False, rounded: bool = False) -> Operation:
        """The layer as an operation."""
        return Product(source, target, Weight(self.weight), self.bias, add=add, rounded=rounded)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def operation(self, source: Part, target: Part) -> Operation:
        """The norm as an operation."""
        return Norm(source, target, self.weight, self.epsilon)


class FeedForward(nn.Module):
    """SwiGLU with the gate and up projections in one matrix product."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down = Linear(intermediate_size, hidden_size, bias=bias)

    def operations(self, source: Part, target: Part) -> Iterator[Operation]:
        """The layer as operations; the result is added to ``target``."""
        inner = Part("inner", self.down.in_features)
        yield GatedProduct(source, inner, Weight(self.gate_up.weight), self.gate_up.bias)
        yield self.down.operation(inner, target, add=True)
