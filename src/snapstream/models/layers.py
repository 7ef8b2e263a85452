"""Building blocks of the layers of all models."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from snapstream.kernels.operations import GatedProduct, Norm, Operation, Product
from snapstream.kernels.parts import Part
from snapstream.kernels.products import linear
from snapstream.kernels.rows import gate, norm


class Linear(nn.Linear):
    """A linear layer that uses the fastest kernel (:mod:`snapstream.kernels.products`)."""

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[T, K]`` to ``[T, out]``."""
        return linear(x, self.weight, self.bias)

    def operation(self, source: Part, target: Part, *, add: bool = False, rounded: bool = False) -> Operation:
        """The layer as an operation of a decode step."""
        return Product(source, target, self.weight, self.bias, add=add, rounded=rounded)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        """Normalize; shape and dtype do not change."""
        return norm(x, self.weight, self.epsilon)

    def operation(self, source: Part, target: Part) -> Operation:
        """The norm as an operation of a decode step."""
        return Norm(source, target, self.weight, self.epsilon)


class FeedForward(nn.Module):
    """SwiGLU with the gate and up projections in one matrix product."""

    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[T, hidden]`` to ``[T, hidden]``."""
        result: Tensor = self.down(gate(self.gate_up(x)))
        return result

    def operations(self, source: Part, target: Part) -> Iterator[Operation]:
        """The layer as operations of a decode step; the result is added to ``target``."""
        inner = Part("inner", self.down.in_features)
        yield GatedProduct(source, inner, self.gate_up.weight, self.gate_up.bias)
        yield self.down.operation(inner, target, add=True)
