"""Copies between the host and the device, with as little waiting as can be.

What is copied to a device goes through pinned memory, so that the host goes on at once; what is copied from it is
waited for once, however many tensors there are. On a CPU both are the same memory.
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
    """A tensor of these numbers, which the host has, on the device: ``[len(values)]``, or a row for each sequence."""
    tensor = torch.as_tensor(values, dtype=dtype)
    is_cuda = torch.device(device).type == "cuda"
    return (tensor.pin_memory() if is_cuda else tensor).to(device, non_blocking=True)


def to_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the host, after the work so far is done; those of a CPU as they are."""
    if not any(tensor.device.type == "cuda" for tensor in tensors):
        return list(tensors)
    copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
    for copy, tensor in zip(copies, tensors, strict=True):
        copy.copy_(tensor, non_blocking=True)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record(torch.cuda.current_stream(tensors[0].device))
    done.synchronize()
    return copies
