"""Copies between host and device that block the host as little as possible.

Copies to a device go through pinned memory, so the host does not wait for them. Copies from a device are synchronized
once, however many tensors there are. On a CPU, host and device share their memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def to_device(
    values: Sequence[int] | Sequence[float] | Sequence[Sequence[int]] | Tensor,
    device: torch.device | str,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Copy numbers from the host to the device.

    Returns:
        A tensor ``[len(values)]``, or with one row per inner sequence.
    """
    tensor = torch.as_tensor(values, dtype=dtype)
    is_cuda = torch.device(device).type == "cuda"
    return (tensor.pin_memory() if is_cuda else tensor).to(device, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the host and wait until they have arrived; tensors on a CPU are returned unchanged."""
    if not any(tensor.device.type == "cuda" for tensor in tensors):
        return list(tensors)
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(tensors[0].device))
    done.synchronize()
    return copies
