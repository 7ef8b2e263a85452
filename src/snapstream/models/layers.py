"""Building blocks of the layers of all models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from snapstream.kernels.buffers import BufferView
from snapstream.kernels.operations import GateBy, GatedProduct, Norm, Operation, Product
from snapstream.kernels.plain import Activation
from snapstream.kernels.weight import BlockWeight, DenseWeight, Weight, joined
from snapstream.models.spec import StoredRows


@dataclass(frozen=True)
class Result:
    """Where the result of a part of a layer goes: to ``target``, or, times a factor, in addition to what is there."""

    target: BufferView
    add: bool = False
    factor: float = 1.0


class Matrix(nn.Module):
    """A weight ``[out, in]`` or ``[n, out, in]``; its rows may be stored in several formats, one after another."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.shape = shape
        self.stored_as: Sequence[StoredRows] = (StoredRows(shape[-2]),)
        self.parts = nn.ParameterList([nn.Parameter(torch.empty(shape))])

    def store_as(self, runs: Sequence[StoredRows]) -> None:
        """Choose formats, before there are any numbers."""
        self.stored_as = runs
        *several, _, columns = self.shape
        shapes = [(*several, run.count, columns) for run in runs]
        dense, device = self.parts[0].dtype, self.parts[0].device
        self.parts = nn.ParameterList(
            nn.Parameter(
                torch.empty(shape, dtype=dense, device=device)
                if run.format is None
                else torch.empty(run.format.stored_shape(shape), dtype=torch.uint8, device=device),
                requires_grad=False,
            )
            for run, shape in zip(runs, shapes, strict=True)
        )

    @property
    def value(self) -> Weight:
        """The weight."""
        return joined(
            DenseWeight(part) if run.format is None else BlockWeight(part, run.format, run.count)
            for run, part in zip(self.stored_as, self.parts, strict=True)
        )

    def run_at(self, row: int) -> tuple[StoredRows, torch.Tensor, int]:
        """The run that a row is in, what is stored of it, and the row's number in it."""
        for run, part in zip(self.stored_as, self.parts, strict=True):
            if row < run.count:
                return run, part, row
            row -= run.count
        raise IndexError(row)


class Linear(nn.Module):
    """A product with a weight ``[out, in]``."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = Matrix(out_features, in_features)
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def operation(self, source: BufferView, result: Result | BufferView, *, rounded: bool = False) -> Operation:
        """The layer as an operation."""
        to = Result(result) if isinstance(result, BufferView) else result
        return Product(source, to.target, self.weight.value, self.bias, add=to.add, rounded=rounded, factor=to.factor)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in float32; for ``wide``, see ``plain.norm``."""

    weight: Tensor

    def __init__(self, size: int, epsilon: float, *, wide: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon, self.wide = epsilon, wide

    def operation(
        self, source: BufferView, target: BufferView, *, add: bool = False, factor: Tensor | None = None
    ) -> Operation:
        """The norm as an operation."""
        return Norm(source, target, self.weight, self.epsilon, add=add, wide=self.wide, factor=factor)


class FixedNorm(RMSNorm):
    """A norm without weights; its results are multiplied by a factor, in float32."""

    def __init__(self, size: int, epsilon: float, factor: float = 1.0) -> None:
        super().__init__(size, epsilon, wide=True)
        del self.weight
        self.size, self.factor = size, factor
        self.register_buffer("weight", torch.full((size,), factor), persistent=False)

    def compute(self, device: torch.device) -> None:
        """Set the factors, which are not loaded."""
        self.weight = torch.full((self.size,), self.factor, device=device)


class FeedForward(nn.Module):
    """SwiGLU or GeGLU with the gate and up projections in one matrix product.

    With ``gated``, the result is multiplied by the sigmoid of one number per token.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        bias: bool = False,
        activation: Activation = Activation.SILU,
        gated: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down = Linear(intermediate_size, hidden_size, bias=bias)
        self.gate = Linear(hidden_size, 1) if gated else None

    def operations(self, source: BufferView, result: Result) -> Iterator[Operation]:
        """The layer as operations."""
        inner = BufferView("inner", self.down.in_features)
        yield GatedProduct(source, inner, self.gate_up.weight.value, self.gate_up.bias, self.activation)
        if self.gate is not None:  # before the last product, which adds its result to others
            gate = BufferView("gate", 1)
            yield self.gate.operation(source, gate)
            yield GateBy(gate, inner, sigmoid=True)
        yield self.down.operation(inner, result)
