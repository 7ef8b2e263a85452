"""Products of rows with weights, dispatched to kernels by device, dtype and shape."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels import cpu, triton
from snapstream.kernels.cpu import blocks
from snapstream.kernels.cpu.checks import TYPES
from snapstream.kernels.weight import BlockWeight, DenseWeight, Weight


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Compute ``x @ weight.T + bias``; for few rows on a CPU, the weight is read only once.

    Args:
        x: ``[T, K]``.
        weight: ``[out, K]``.
        bias: ``[out]`` or ``None``.

    Returns:
        ``[T, out]``.
    """
    if reads_blocks(x, weight):
        out = x.new_empty(len(x), weight.shape[0])
        linear_into(out, x, weight, bias)
        return out
    if x.shape[0] <= _skinny_rows(x, weight):
        return cpu.skinny_linear(x, weight, bias)
    return weight.multiply(x, bias)


def linear_into(target: Tensor, x: Tensor, weight: Weight, bias: Tensor | None = None) -> None:
    """Write what :func:`linear` computes to ``target`` ``[T, out]``, if possible without a copy.

    A float32 target gets sums with blocks as they are, not rounded to the type of ``x``.
    """
    if reads_blocks(x, weight):
        for part, rows in weight.runs():
            own, added = target[:, rows], None if bias is None else bias[rows]
            if isinstance(part, BlockWeight):
                blocks.multiply(x, part, own, added)
            else:
                own.copy_(linear(x, part, added))
        return
    skinny = x.shape[0] <= _skinny_rows(x, weight)
    if isinstance(weight, DenseWeight) and bias is None and target.dtype == x.dtype == weight.dtype and not skinny:
        torch.mm(x, weight.stored.t(), out=target)
    else:
        target.copy_(linear(x, weight, bias))


def grouped_linear(x: Tensor, weight: Weight, ends: Tensor) -> Tensor:
    """Multiply rows, sorted by expert, by the weights of their experts; each expert's weights are read once.

    Weights of experts without rows are not read. On CUDA, torch's grouped product needs bfloat16.

    Args:
        x: ``[M, K]``, sorted by expert.
        weight: ``[E, out, K]``.
        ends: Where the rows of each expert end, int64 ``[E]``; the last is ``M``.

    Returns:
        ``[M, out]``.
    """
    if reads_blocks(x, weight) or x.shape[0] <= weight.shape[0] * _skinny_rows(x, weight):  # few on average
        return cpu.grouped_linear(x, weight, ends)
    return stock_grouped_linear(x, weight, ends)


def add_biases(out: Tensor, biases: Tensor | None, ends: Tensor) -> None:
    """Add the biases ``[E, out]`` of experts to their rows, in place; rows past the last end are undefined."""
    if biases is not None:
        rows = torch.arange(len(out), device=out.device)
        out += biases[torch.bucketize(rows, ends, right=True).clamp(max=len(biases) - 1)]


def keeps_blocks(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether kernels on a device multiply rows of this dtype by weights in blocks as they are stored."""
    if device.type == "cpu":
        return cpu.available() and dtype in TYPES
    return device.type == "cuda" and triton.missing(device) is None and dtype in triton.DTYPES


def scratch_bytes(weight: Weight, device: torch.device) -> int:
    """Bytes per row that a product with blocks needs: for a copy in 8 bits, or on a GPU for sums of some columns."""
    if not weight.has_blocks:
        return 0
    return blocks.scratch_bytes(weight.shape[-1]) if device.type == "cpu" else triton.split_bytes(weight, device)


def widen(weight: BlockWeight, target: Tensor) -> None:
    """Write the numbers of a matrix to a tensor ``[out, in]`` with contiguous rows."""
    if target.device.type == "cpu":
        blocks.widen(weight, target)
    else:
        from snapstream.kernels.triton import blocks as triton_blocks

        triton_blocks.widen(weight, target)


def reads_blocks(x: Tensor, weight: Weight) -> bool:
    """Whether a weight has blocks that are multiplied as they are stored, however many rows there are."""
    ready = cpu.loaded and x.device.type == "cpu" and x.dtype in TYPES
    return ready and weight.has_blocks


def _skinny_rows(x: Tensor, weight: Weight) -> int:
    """Maximum number of rows for which this package's kernels beat the library; 0 if there are no kernels."""
    fits = weight.shape[-1] % cpu.MULTIPLE == 0 and weight.dtype in TYPES and x.dtype in TYPES
    ready = cpu.loaded and x.device.type == "cpu"
    return cpu.SKINNY_ROWS if ready and fits else 0


def stock_grouped_linear(x: Tensor, weight: Weight, ends: Tensor) -> Tensor:
    """:func:`grouped_linear` by torch's grouped product; rows past the last end are undefined."""
    wide = torch.promote_types(x.dtype, weight.dtype)
    out = F.grouped_mm(x.to(wide), weight.dense(wide).transpose(1, 2), offs=ends.to(torch.int32))
    return out.to(x.dtype).contiguous()
