"""Runs operations in the native loop where it supports them, and otherwise one by one in torch; on any device.

For chunks of prompts on a CPU, and for everything that the other programs do not support.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from snapstream.inference import in_inference_mode
from snapstream.kernels import cpu, plain, triton
from snapstream.kernels import operations as ops
from snapstream.kernels.buffers import PromptChunk, StepBuffers
from snapstream.kernels.launches import loop_operations
from snapstream.kernels.operations import Operation
from snapstream.kernels.products import add_biases, grouped_linear
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
    """Runs a list of operations: on a CPU those that the native loop supports, in as few launches as possible."""

    draws = captured = False

    _parts: dict[tuple[int, int | None], list[cpu.CpuProgram | Operation]]  # by slice of the list

    def __init__(self, operations: Sequence[Operation], work: StepBuffers, scratch: cpu.Scratch | None = None) -> None:
        """Plan the launches.

        Args:
            operations: The list.
            work: The buffers, slots and caches that it works on.
            scratch: Memory for temporaries of the native loop; ``None`` for some of its own.
        """
        self.operations, self.work, self._planned_for = operations, work, work
        self._scratch = cpu.Scratch() if scratch is None else scratch
        self._parts = {(0, None): self._planned(operations)}

    @in_inference_mode
    def run(self, steps: int = 1, first: int = 0, last: int | None = None) -> None:
        """Run operations ``first .. last``, a slice of the list, ``steps`` times."""
        if (first, last) not in self._parts:
            self._parts[first, last] = self._planned(self.operations[first:last])
            self.rebind(self.work)
        for self.work.step in range(steps):
            for part in self._parts[first, last]:
                if isinstance(part, cpu.CpuProgram):
                    part.run()
                    self._record(part.operations[-1])
                else:
                    _run(part, self.work)

    def rebind(self, work: StepBuffers) -> None:
        """Work on other rows of buffers, at most as many as at first, with the same slots and caches."""
        self.work = work
        for part in itertools.chain(*self._parts.values()):
            if isinstance(part, cpu.CpuProgram):
                part.rebind(work)

    def _planned(self, operations: Sequence[Operation]) -> list[cpu.CpuProgram | Operation]:
        """Launches of the native loop, and the other operations in between."""
        parts: list[cpu.CpuProgram | Operation] = []
        if not (cpu.loaded and self._planned_for.slots.token.is_cpu):
            return [*operations]
        for in_loop, some in itertools.groupby(loop_operations(operations, self._planned_for), lambda each: each[0]):
            together = [each for _, each in some]
            if not in_loop:
                parts += together
                continue
            # What a recurrence was given is recorded between launches.
            ends = [at for at, each in enumerate(together, 1) if isinstance(each, Recur)]
            for begin, end in itertools.pairwise(sorted({0, *ends, len(together)})):
                parts.append(cpu.CpuProgram(together[begin:end], self._planned_for, scratch=self._scratch))
        return parts

    def _record(self, last: Operation) -> None:
        if isinstance(last, Recur):
            last.record(self.work)


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
def _(o: ops.ExpertProduct, m: StepBuffers) -> None:
    x, target = o.source.of(m.buffers)[:, 0], o.target.of(m.buffers)
    if x.device.type == "cpu" and not isinstance(m, PromptChunk):  # of idle slots, rows belong to no expert
        o.run(m)
        return
    ends = o.ends.of(m.buffers)[0, 0]
    out = grouped_linear(x, o.weight, ends)
    add_biases(out, o.bias, ends)
    target[:, 0] = plain.gate(out, o.activation) if o.gated else out
