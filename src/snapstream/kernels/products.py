"""Products of experts by torch, and what kernels can do with weights in blocks."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.kernels import cpu, triton
from snapstream.kernels.cpu import blocks
from snapstream.kernels.cpu.checks import TYPES
from snapstream.kernels.weight import BlockWeight, Weight


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


def widen(weight: BlockWeight, target: Tensor) -> None:
    """Write the numbers of a matrix to a tensor ``[out, in]`` with contiguous rows."""
    if target.device.type == "cpu":
        blocks.widen(weight, target)
    else:
        from snapstream.kernels.triton import blocks as triton_blocks

        triton_blocks.widen(weight, target)


def grouped_linear(x: Tensor, weight: Weight, ends: Tensor) -> Tensor:
    """Multiply rows, sorted by expert, by the weights of their experts, by torch's grouped product.

    On CUDA it needs bfloat16.

    Args:
        x: ``[M, K]``, sorted by expert.
        weight: ``[E, out, K]``.
        ends: Where the rows of each expert end, int64 ``[E]``; the last is ``M``.

    Returns:
        ``[M, out]``; rows past the last end are undefined.
    """
    wide = torch.promote_types(x.dtype, weight.dtype)
    out = F.grouped_mm(x.to(wide), weight.dense(wide).transpose(1, 2), offs=ends.to(torch.int32))
    return out.to(x.dtype).contiguous()
