"""Products of some rows with a weight, as a step or a prompt multiplies them."""

import torch

from snapstream.kernels import operations as ops
from snapstream.kernels.buffers import BufferView, PromptChunk, Slots, StepBuffers, allocate_buffers
from snapstream.kernels.cpu.program import CpuProgram


def of_step(parts, rows, dtype):
    """Buffers of a step, with a row for each slot."""
    return StepBuffers(
        allocate_buffers(parts, rows, dtype), Slots.that_see(torch.ones(rows, dtype=torch.int64), 1), [], [], dtype
    )


def of_prompt(parts, rows, dtype):
    """Buffers of a prompt, with a row for each token."""
    slots = Slots.of_prompt(torch.zeros(1, rows, dtype=torch.int64), rows)
    return PromptChunk(allocate_buffers(parts, rows, dtype), slots, [], [], dtype)


def run(operation, x, *, many, program=CpuProgram, ends=None, before=None, **settings):
    """What an operation with a part ``source`` makes of rows ``x`` ``[T, in]``, ``[T, out]``.

    Args:
        operation: The operation.
        x: Its rows.
        many: Whether they are those of a prompt.
        program: What runs it.
        ends: Of experts, where the rows of each end.
        before: What its target holds before.
        settings: Of the program.
    """
    work = (of_prompt if many else of_step)(operation.parts(), len(x), x.dtype)
    work.buffers[operation.source.buffer].copy_(x)
    if ends is not None:
        work.buffers[operation.ends.buffer][0] = ends
    target = work.buffers[operation.target.buffer]
    if before is not None:
        target.copy_(before)
    program([operation], work, **settings).run()
    return target


def multiply(x, weight, bias=None, *, many=False, **settings):
    """``x @ weight.T + bias``."""
    source, target = BufferView("x", x.shape[1]), BufferView("y", weight.shape[0])
    return run(ops.Product(source, target, weight, bias), x, many=many, **settings)


def multiply_experts(x, weight, ends, *, many, **settings):
    """Rows, sorted by expert, by the weights of their experts."""
    ends_of = BufferView("ends", len(ends), dtype=torch.int64)
    product = ops.ExpertProduct(
        BufferView("x", x.shape[1]), BufferView("y", weight.shape[1]), ends_of, weight, gated=False
    )
    return run(product, x, many=many, ends=ends, **settings)
