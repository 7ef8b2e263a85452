"""What operations allocate while they run, besides the buffers that they work on.

Where torch runs an operation, it does so here too, on tensors without contents, and what it makes is counted
(:mod:`snapstream.kernels.counting`). What kernels and libraries allocate is declared.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch

from snapstream.kernels import cpu, triton
from snapstream.kernels import operations as ops
from snapstream.kernels.buffers import PromptChunk, StepBuffers
from snapstream.kernels.counting import peak_of
from snapstream.kernels.launches import has_loop, kind_of, loop_operations
from snapstream.kernels.operations import Operation
from snapstream.kernels.products import keeps_blocks
from snapstream.kernels.recurrence import Recur
from snapstream.kernels.weight import BlockWeight

TASK_BYTES = 320 * 1024
"""At most, of a task of a prompt's attention on a CPU: its queries, outputs and scores (``prefill_attention.cpp``)."""


def most_workspace(operations: Iterable[Operation], m: StepBuffers, device: torch.device) -> int:
    """Bytes that operations allocate at most, one after another, besides what the native loop keeps.

    Args:
        operations: The operations.
        m: What they work on, on the meta device.
        device: Where they will run.
    """
    different = list({kind_of(each): each for each in operations}.values())
    if has_loop(device, m.dtype):
        different = [each for fits, each in loop_operations(different, m) if not fits or isinstance(each, ops.Attend)]
    return max((workspace(each, m, device) for each in different), default=0)


@functools.singledispatch
def workspace(o: Operation, m: StepBuffers, device: torch.device) -> int:
    """Bytes that one operation allocates at most; see :func:`most_workspace`."""
    return _of_torch(o, m)


@workspace.register
def _(o: ops.GateBy, m: StepBuffers, device: torch.device) -> int:
    return _of_rows(o, m, device)


@workspace.register(ops.Norm)
@workspace.register(ops.Rotate)
@workspace.register(ops.Gate)
def _of_rows(o: Operation, m: StepBuffers, device: torch.device) -> int:
    """Of an operation whose kernels need nothing."""
    return 0 if _by_triton(m, device) else _of_torch(o, m)


@workspace.register
def _(o: ops.Embed, m: StepBuffers, device: torch.device) -> int:
    return 0 if device.type == "cuda" and isinstance(o.table, BlockWeight) else _of_torch(o, m)


@workspace.register
def _(o: ops.Attend, m: StepBuffers, device: torch.device) -> int:
    if not isinstance(m, PromptChunk):
        return 0  # programs with kernels for it keep what they need
    numbers = cpu.BLOCK * (o.query.size + o.target.size)  # of a block of keys and values
    return torch.get_num_threads() * (TASK_BYTES + numbers * 4)


@workspace.register
def _(o: Recur, m: StepBuffers, device: torch.device) -> int:
    if device.type == "cuda" and keeps_blocks(device, m.dtype) and not isinstance(m, PromptChunk):
        return 0
    return _of_torch(o, m)


def _by_triton(m: StepBuffers, device: torch.device) -> bool:
    """Whether Triton's kernels run what they support."""
    return keeps_blocks(device, m.dtype) and not has_loop(device, m.dtype)


def _of_torch(o: Operation, m: StepBuffers) -> int:
    """Of an operation that torch runs."""
    return peak_of(functools.partial(o.run, m))


@workspace.register
def _(o: ops.Product, m: StepBuffers, device: torch.device) -> int:
    own = _of_product(o, m, device)
    if own is None:
        return _of_torch(o, m)
    in_place = o.weight.has_blocks or o.bias is None
    return own + (0 if in_place else _made(o, m))


@workspace.register
def _(o: ops.GatedProduct, m: StepBuffers, device: torch.device) -> int:
    own = _of_product(o, m, device)
    return _of_torch(o, m) if own is None else own + _made(o, m)


@workspace.register
def _(o: ops.ExpertProduct, m: StepBuffers, device: torch.device) -> int:
    made = len(m.buffers[o.source.buffer]) * o.weight.shape[1] * m.dtype.itemsize
    biases = 0 if o.bias is None else made
    copies = 1 if o.weight.has_blocks else 2  # torch's product is not contiguous
    return made * copies + biases + (0 if o.gated else made)


def _of_product(o: ops.Product | ops.GatedProduct, m: StepBuffers, device: torch.device) -> int | None:
    """What a product needs besides its result; ``None`` where the weight is not multiplied as it is stored."""
    weight = o.weight
    if not _by_triton(m, device):
        return None
    if not weight.has_blocks and weight.dtype != m.dtype:
        return None
    return len(m.buffers[o.source.buffer]) * triton.split_bytes(weight, device) if weight.has_blocks else 0


def _made(o: ops.Product | ops.GatedProduct, m: StepBuffers) -> int:
    """Bytes of the result of a product."""
    return len(m.buffers[o.source.buffer]) * o.weight.shape[0] * m.dtype.itemsize
