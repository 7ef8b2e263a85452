"""Kernel that stores numbers as codes."""

from __future__ import annotations

import torch
from torch import Tensor

from snapstream.cache.codes import OF_BITS
from snapstream.kernels.cpu import interface, library
from snapstream.kernels.cpu.checks import MOST_HEAD_SIZE, MULTIPLE, TYPES, require


def takes(numbers: Tensor, target: Tensor) -> bool:
    """Whether :func:`encode` can store these numbers."""
    size = numbers.shape[2]
    fits = numbers.dtype in TYPES and size % MULTIPLE == 0 and size <= MOST_HEAD_SIZE
    return fits and numbers.is_cpu and numbers.stride(2) == target.stride(2) == 1


def encode(numbers: Tensor, frame: Tensor | None, width: int, bits: int, target: Tensor) -> None:
    """CPU kernel for :func:`snapstream.cache.quantized.encode`, with the same results.

    Raises:
        ValueError: Shapes or dtypes do not match.
        MemoryError: There is not enough memory for temporaries.
    """
    (N, E, D), codes = numbers.shape, OF_BITS.get(bits)
    require(codes is not None and takes(numbers, target) and target.dtype == torch.uint8, "types do not match")
    assert codes is not None
    require(target.shape == (N, E, codes.nbytes(D)), "shapes do not match")
    require(width >= MULTIPLE and D % width == 0 and width & (width - 1) == 0, f"{width} channels cannot be mixed")
    if frame is not None:
        require(frame.shape == (N, 2, D) and frame.dtype == torch.float32, "the frame does not match")
        frame = frame.contiguous()
    arguments = interface.STRUCTURES["Encoding"](
        numbers.data_ptr(),
        None if frame is None else frame.data_ptr(),
        target.data_ptr(),
        type=TYPES.index(numbers.dtype),
        codes=interface.TYPES.index(codes.name),
        heads=N,
        entries=E,
        size=D,
        rotation=width,
        head=numbers.stride(0),
        row=numbers.stride(1),
        out_head=target.stride(0),
        out_row=target.stride(1),
    )
    library.run("encode", arguments, of="quantizing")
