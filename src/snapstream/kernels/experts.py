"""Products of rows with the weights of their expert: each expert's weights are read once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor, skinny_rows: int) -> Tensor:
    """Multiply rows that are sorted by expert, each with the weights of its own.

    Weights of experts without rows are not read. On CUDA torch's grouped product needs bfloat16.

    Args:
        x: ``[M, K]``, sorted by expert.
        weight: ``[E, out, K]``.
        ends: Where the rows of each expert end, int64 ``[E]``; the last is ``M``.
        skinny_rows: Most rows per expert, on average, for which to use the kernel of this package, see
            :func:`snapstream.kernels.cpu.rows_for_skinny_linear`.

    Returns:
        ``[M, out]``.
    """
    few = x.shape[0] <= weight.shape[0] * skinny_rows
    operation = torch.ops.snapstream_cpu.grouped_linear if few else torch.ops.snapstream.grouped_linear
    result: Tensor = operation(x, weight, ends)
    return result


@torch.library.custom_op("snapstream::grouped_linear", mutates_args=())
def _grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Torch's product; an operation of our own because its tracing knows bfloat16 only."""
    return F.grouped_mm(x, weight.transpose(1, 2), offs=ends.to(torch.int32)).contiguous()


@_grouped_linear.register_fake
def _grouped_linear_shape(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])
