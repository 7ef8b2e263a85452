"""Runs operations with torch's matrix products, and with kernels for rows where there are any; on any device.

For chunks of prompts on a CPU, whose products are large, and for everything that the other programs do not support.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from snapstream.kernels import cpu, plain, triton
from snapstream.kernels import operations as ops
from snapstream.kernels.buffers import PromptChunk, StepBuffers
from snapstream.kernels.operations import Operation
from snapstream.kernels.plain import Activation
from snapstream.kernels.products import (
    add_biases,
    grouped_linear,
    linear,
    linear_into,
    reads_blocks,
    stock_grouped_linear,
)
from snapstream.kernels.recurrence import Recur


class Program(Protocol):
    """Runs a list of operations.

    Attributes:
        work: What the operations work on.
        draws: Whether it also chooses tokens, so that several steps need nothing from the host in between.
        captured: Whether a step can be captured as a CUDA graph.
    """

    @property
    def operations(self) -> Sequence[Operation]:
        """The list."""

    work: StepBuffers
    draws: bool
    captured: bool

    def run(self, steps: int = 1, first: int = 0, last: int | None = None) -> None:
        """Run operations ``first .. last``, a slice of the list, ``steps`` times."""


class PlannedProgram:
    """Stands for a program on CUDA in a plan of memory; it has that program's memory, and is never run."""

    draws, captured = False, True

    def __init__(self, operations: Sequence[Operation], work: StepBuffers, scratch: Tensor) -> None:
        self.operations, self.work, self._scratch = operations, work, scratch

    def run(self, steps: int = 1, first: int = 0, last: int | None = None) -> None:
        """Refuse to run."""
        raise AssertionError("a plan cannot be run")


class StockProgram:
    """Runs a list of operations, one after another."""

    draws = captured = False

    def __init__(self, operations: Sequence[Operation], work: StepBuffers) -> None:
        self.operations, self.work = operations, work

    @torch.inference_mode()
    def run(self, steps: int = 1, first: int = 0, last: int | None = None) -> None:
        """Run operations ``first .. last``, a slice of the list, ``steps`` times."""
        for self.work.step in range(steps):
            for operation in self.operations[first:last]:
                _run(operation, self.work)


def program_for_rows(operations: Sequence[Operation], work: StepBuffers) -> Program:
    """The program for chunks of prompts, and for steps that attend by another backend than the device's own."""
    if triton.takes(work.slots.token.new_empty(0, dtype=work.dtype)):
        from snapstream.kernels.triton.program import TritonProgram

        return TritonProgram(operations, work)
    return StockProgram(operations, work)


@functools.singledispatch
def _run(o: Operation, m: StepBuffers) -> None:
    o.run(m)


@_run.register
def _(o: ops.Embed, m: StepBuffers) -> None:
    if _is_native(o, m):
        cpu.CpuProgram([o], m).run()
    else:
        o.run(m)


@_run.register
def _(o: ops.Norm, m: StepBuffers) -> None:
    x, target = o.source.of(m.buffers), o.target.of(m.buffers)
    if cpu.takes_rows(x) and o.source.size % cpu.MULTIPLE == 0:
        cpu.norm(x, target, o.weight, o.epsilon, add=o.add, wide=o.wide, factor=o.factor)
    else:
        o.run(m)


@_run.register
def _(o: ops.Rotate, m: StepBuffers) -> None:
    x, target = o.source.of(m.buffers), o.target.of(m.buffers)
    if cpu.takes_rows(x) and o.source.size <= cpu.MOST_ROTATED:
        cpu.rotate(x, target, o.angles.of(m.buffers), pairs=o.pairs)
    else:
        o.run(m)


@_run.register
def _(o: ops.Product, m: StepBuffers) -> None:
    x, target = o.source.of(m.buffers)[:, 0], o.target.of(m.buffers)[:, 0]
    if target.dtype != x.dtype and not o.rounded and not reads_blocks(x, o.weight):
        o.run(m)
    elif target.dtype != x.dtype and o.rounded:
        y = linear(x, o.weight, o.bias)
        target.copy_(y if o.factor == 1.0 else y * o.factor)
    elif o.add:
        target.add_(linear(x, o.weight, o.bias), alpha=o.factor)
    else:
        linear_into(target, x, o.weight, o.bias)
        if o.factor != 1.0:
            target.mul_(o.factor)


@_run.register
def _(o: ops.GatedProduct, m: StepBuffers) -> None:
    _gate(linear(o.source.of(m.buffers)[:, 0], o.weight, o.bias), o.target.of(m.buffers), o.activation)


@_run.register
def _(o: ops.Gate, m: StepBuffers) -> None:
    x, target = o.source.of(m.buffers), o.target.of(m.buffers)
    if cpu.takes_rows(x):
        cpu.gate(x, target, o.activation, None if o.up is None else o.up.of(m.buffers))
    else:
        o.run(m)


@_run.register
def _(o: ops.ExpertProduct, m: StepBuffers) -> None:
    x, target = o.source.of(m.buffers)[:, 0], o.target.of(m.buffers)
    ends = o.ends.of(m.buffers)[0, 0]
    if isinstance(m, PromptChunk):  # every row belongs to an expert
        out = grouped_linear(x, o.weight, ends)
    elif x.device.type == "cpu":
        o.run(m)
        return
    else:
        out = stock_grouped_linear(x, o.weight, ends)
    add_biases(out, o.bias, ends)
    if o.gated:
        _gate(out, target, o.activation)
    else:
        target[:, 0] = out


@_run.register
def _(o: Recur, m: StepBuffers) -> None:
    if isinstance(m, PromptChunk) and _is_native(o, m):  # as decoding does it, token by token
        cpu.CpuProgram([o], m).run()
        o.record(m)
    else:
        o.run(m)


def _is_native(o: Operation, m: StepBuffers) -> bool:
    """Whether the native loop can run an operation here."""
    types = m.dtype, *(cache.entry_type for cache in m.caches)
    return cpu.loaded and m.slots.token.is_cpu and cpu.unsupported([o], *types) is None


def _gate(x: Tensor, target: Tensor, activation: Activation) -> None:
    """Gates of ``[T, 2 * I]`` into ``[T, 1, I]``."""
    if cpu.takes_rows(x):
        cpu.gate(x[:, None], target, activation)
    else:
        target[:, 0] = plain.gate(x, activation)
