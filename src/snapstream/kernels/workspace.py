"""What operations allocate while they run, besides the buffers that they work on.

Where torch runs an operation, it does so here too, on tensors without contents, and what it makes is counted
(:mod:`snapstream.kernels.counting`). What kernels and libraries allocate is declared.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor

from snapstream.kernels import cpu
from snapstream.kernels import operations as ops
from snapstream.kernels.buffers import PromptChunk, StepBuffers
from snapstream.kernels.counting import peak_of
from snapstream.kernels.cpu.program import CpuProgram, unsupported
from snapstream.kernels.operations import Operation
from snapstream.kernels.products import keeps_blocks, scratch_bytes
from snapstream.kernels.recurrence import Recur
from snapstream.kernels.weight import BlockWeight, Weight

MANY = 64
"""Rows from which on the library brings a weight into an order of its own."""


def most_workspace(operations: Iterable[Operation], m: StepBuffers, device: torch.device) -> int:
    """Bytes that operations allocate at most, one after another.

    Args:
        operations: The operations.
        m: What they work on, on the meta device.
        device: Where they will run.
    """
    different = {_kind(each): each for each in operations}
    return max((workspace(each, m, device) for each in different.values()), default=0)


def _kind(o: Operation) -> tuple[object, ...]:
    """What the memory of an operation depends on: not its layer, and of tensors only shapes and types."""

    def of(value: object) -> object:
        if isinstance(value, Weight):
            return tuple((part.shape, part.dtype, type(part)) for part in value.parts)
        return (value.shape, value.dtype) if isinstance(value, Tensor) else value

    return (type(o), *(of(value) for name, value in vars(o).items() if name != "layer"))


@functools.singledispatch
def workspace(o: Operation, m: StepBuffers, device: torch.device) -> int:
    """Bytes that one operation allocates at most; see :func:`most_workspace`."""
    return _of_torch(o, m)


@workspace.register
def _(o: ops.GateBy, m: StepBuffers, device: torch.device) -> int:
    return _of_rows(o, m, device) if device.type == "cuda" else _of_torch(o, m)


@workspace.register(ops.Norm)
@workspace.register(ops.Rotate)
@workspace.register(ops.Gate)
def _of_rows(o: Operation, m: StepBuffers, device: torch.device) -> int:
    """Of an operation whose kernels need nothing."""
    if keeps_blocks(device, m.dtype) and (device.type != "cpu" or unsupported([o], m.dtype) is None):
        return 0
    return _of_torch(o, m)


@workspace.register
def _(o: ops.Embed, m: StepBuffers, device: torch.device) -> int:
    if device.type == "cuda" and isinstance(o.table, BlockWeight):
        return 0
    return _of_loop(o, m, device)


@workspace.register
def _(o: ops.Attend, m: StepBuffers, device: torch.device) -> int:
    return 0  # programs with kernels for it keep what they need


@workspace.register
def _(o: Recur, m: StepBuffers, device: torch.device) -> int:
    if device.type == "cuda" and keeps_blocks(device, m.dtype) and not isinstance(m, PromptChunk):
        return 0
    return _of_loop(o, m, device)


def _of_torch(o: Operation, m: StepBuffers) -> int:
    """Of an operation that torch runs."""
    return peak_of(functools.partial(o.run, m))


def _of_loop(o: Operation, m: StepBuffers, device: torch.device) -> int:
    """Of an operation that the native loop runs on a CPU, and torch elsewhere."""
    types = m.dtype, *(cache.entry_type for cache in m.caches)
    if device.type == "cpu" and cpu.available() and unsupported([o], *types) is None:
        return peak_of(functools.partial(CpuProgram, [o], m))
    return _of_torch(o, m)


@workspace.register
def _(o: ops.Product, m: StepBuffers, device: torch.device) -> int:
    rows = len(m.buffers[o.source.buffer])
    own = _of_product(o.weight, rows, m, device)
    if own is None:
        return _of_torch(o, m)
    in_place = not o.add and (o.bias is None or o.weight.has_blocks)
    if device.type == "cuda":
        in_place = in_place or o.weight.has_blocks or o.bias is None
    if device.type == "cpu" and o.weight.has_blocks:  # other rows of the weight are multiplied beside those in blocks
        others = (part.shape[0] for part in o.weight.parts if not isinstance(part, BlockWeight))
        own += rows * max(others, default=0) * m.dtype.itemsize
    return own + (0 if in_place else _made(o.weight, rows, m))


@workspace.register
def _(o: ops.GatedProduct, m: StepBuffers, device: torch.device) -> int:
    rows = len(m.buffers[o.source.buffer])
    own = _of_product(o.weight, rows, m, device)
    return _of_torch(o, m) if own is None else own + _made(o.weight, rows, m)


@workspace.register
def _(o: ops.ExpertProduct, m: StepBuffers, device: torch.device) -> int:
    rows = len(m.buffers[o.source.buffer])
    made = rows * o.weight.shape[1] * m.dtype.itemsize
    biases = 0 if o.bias is None else made
    if device.type == "cpu" and isinstance(m, PromptChunk) and unsupported([o], m.dtype) is None:
        return made + biases + peak_of(functools.partial(CpuProgram, [o], m))
    copies = 1 if o.weight.has_blocks else 2  # torch's product is not contiguous
    return made * copies + biases + (0 if o.gated else made)


def _of_product(weight: Weight, rows: int, m: StepBuffers, device: torch.device) -> int | None:
    """What a product needs besides its result; ``None`` where the weight is not multiplied as it is stored."""
    if weight.has_blocks and not keeps_blocks(device, m.dtype):
        return None
    if not weight.has_blocks and weight.dtype != m.dtype:
        return None
    return rows * scratch_bytes(weight, device) + _packed(weight, rows, m, device)


def _packed(weight: Weight, rows: int, m: StepBuffers, device: torch.device) -> int:
    """With tile registers, the library brings a weight into an order of its own before a product of many rows."""
    if device.type != "cpu" or rows < MANY or not cpu.available() or cpu.prefill_instructions(m.dtype) != "tiles":
        return 0
    return sum(part.nbytes for part in weight.parts if not isinstance(part, BlockWeight))


def _made(weight: Weight, rows: int, m: StepBuffers) -> int:
    """Bytes of the result of a product."""
    return rows * weight.shape[0] * m.dtype.itemsize
