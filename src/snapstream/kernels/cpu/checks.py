"""What every kernel requires of its arguments."""

from __future__ import annotations

import torch
from torch import Tensor

MULTIPLE = 32
"""Elements that the kernels read at once: dimensions that are summed over must be a multiple of it."""
MOST_HEAD_SIZE = 1024
"""Largest head size that decode attention supports, given by buffers in ``codes.h``."""
TYPES = (torch.float32, torch.bfloat16)
"""Dtypes of activations, weights and cache entries; their numbers are those of ``interface.TYPES``."""


def check_types(*tensors: Tensor) -> None:
    """Raise ``ValueError`` unless all tensors are on the CPU and have the same supported dtype."""
    require(all(tensor.device.type == "cpu" for tensor in tensors), "all tensors must be on the CPU")
    types = {tensor.dtype for tensor in tensors}
    require(len(types) == 1, f"dtypes do not match: {', '.join(sorted(map(str, types)))}")
    require(types <= set(TYPES), f"the dtype is {tensors[0].dtype}; it must be float32 or bfloat16")


def check_lengths(sequences: int, *tensors: Tensor) -> list[Tensor]:
    """Check integers per sequence, and make them contiguous.

    Raises:
        ValueError: The tensors are not int64 ``[B]`` on the CPU.
    """
    fit = all(each.shape == (sequences,) and each.dtype == torch.int64 and each.is_cpu for each in tensors)
    require(fit, "lengths must be int64 [B]")
    return [each.contiguous() for each in tensors]


def require(condition: bool, message: str) -> None:
    """Raise ``ValueError`` with the message unless the condition holds."""
    if not condition:
        raise ValueError(message)
