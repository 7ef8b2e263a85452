"""Which operations of a list the native loop runs, where others are run by torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from snapstream.kernels import cpu, triton
from snapstream.kernels import operations as ops
from snapstream.kernels.buffers import StepBuffers
from snapstream.kernels.operations import Operation
from snapstream.kernels.recurrence import Recur
from snapstream.kernels.weight import Weight

_LOOP = (
    *(ops.Embed, ops.Angles, ops.Norm, ops.Product, ops.Cap, ops.GatedProduct, ops.Gate, ops.GateBy, ops.HeadProduct),
    *(ops.Rotate, ops.ScaleByPosition, ops.Store, ops.Attend, Recur),
    *(ops.Choose, ops.Sort, ops.ExpertProduct, ops.Combine),
)
"""All but those that take tokens."""
_EXPERTS = ops.Sort, ops.ExpertProduct, ops.Combine
"""Rows that are sorted by expert are put back by the same launch."""


def has_loop(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether programs on a device run operations in the native loop; Triton's interpreter comes first."""
    return device.type == "cpu" and cpu.available() and not triton.takes(torch.empty(0, dtype=dtype, device="cpu"))


def loop_operations(operations: Sequence[Operation], work: StepBuffers) -> list[tuple[bool, Operation]]:
    """Each operation after whether the native loop runs it, and then in the form in which it does."""
    forms = [each.in_loop(work) for each in operations]
    types = work.dtype, *(cache.entry_type for cache in work.caches)
    fits = [isinstance(each, _LOOP) and cpu.unsupported([each], *types) is None for each in forms]
    first = 0
    for at, each in enumerate(operations):
        first = at if isinstance(each, ops.Sort) else first
        if isinstance(each, ops.Combine) and not all(fits[first : at + 1]):
            for n in range(first, at + 1):
                fits[n] = fits[n] and not isinstance(operations[n], _EXPERTS)
    return [
        (fit, form if fit and form is not None else each)
        for fit, form, each in zip(fits, forms, operations, strict=True)
    ]


def kind_of(o: Operation) -> tuple[object, ...]:
    """What the memory of an operation depends on: not its layer, and of tensors only shapes and types."""

    def of(value: object) -> object:
        if isinstance(value, Weight):
            return tuple((part.shape, part.dtype, type(part)) for part in value.parts)
        return (value.shape, value.dtype) if isinstance(value, Tensor) else value

    return (type(o), *(of(value) for name, value in vars(o).items() if name != "layer"))


def reserve(operations: Sequence[Operation], work: StepBuffers, scratch: cpu.Scratch) -> None:
    """Have room for the temporaries of the native loop, for those of some operations that it runs."""
    different = list({kind_of(each): each for each in operations}.values())
    some = [each for fits, each in loop_operations(different, work) if fits]
    if some:
        cpu.CpuProgram(some, work, scratch=scratch)
