"""What every kernel asks of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLE = 32
"""Sizes the kernels read in one go: what is summed over must be a multiple of it."""
TYPES = (torch.float32, torch.bfloat16)
"""Of numbers, in the order the library counts them."""


def check_types(*tensors: Tensor) -> None:
    """Raise ``ValueError`` unless the numbers of all are on the CPU, of one type, and one that kernels take."""
    require(all(tensor.device.type == "cpu" for tensor in tensors), "all tensors must be on the CPU")
    types = {tensor.dtype for tensor in tensors}
    require(len(types) == 1, f"types do not match: {', '.join(sorted(map(str, types)))}")
    require(types <= set(TYPES), f"numbers are {tensors[0].dtype}; they must be float32 or bfloat16")


def check_lengths(sequences: int, *tensors: Tensor) -> list[Tensor]:
    """Numbers of each sequence, contiguous.

    Raises:
        ValueError: They are not int64 ``[B]`` on the CPU.
    """
    fit = all(each.shape == (sequences,) and each.dtype == torch.int64 and each.is_cpu for each in tensors)
    require(fit, "lengths must be int64 [B]")
    return [each.contiguous() for each in tensors]


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError`` with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)
