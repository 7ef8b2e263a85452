"""Memory for what a decode step reads, on large pages where the system has them.

A step reads all weights and caches once; through pages of 4 KiB every few lines of memory need another entry of the
processor's table of pages. Linux gives pages of 2 MiB to those who ask (``madvise``), where they are not switched off.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
from collections.abc import Iterable

import torch
from torch import Tensor

_PAGE = 2**21
_LINE = 64


def tensors_of_zeros(shapes: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Tensors beside each other in one block of memory, which is kept while one of them is.

    Each has a storage of its own, so that none looks like a view of another.

    Raises:
        MemoryError: There is none.
    """
    wanted = list(shapes)
    sizes = [-(-math.prod(shape) * dtype.itemsize // _LINE) * _LINE for shape, dtype in wanted]
    private = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}  # not shared with a fork
    try:
        block = mmap.mmap(-1, sum(sizes) + _PAGE, **private)
    except OSError as error:
        raise MemoryError(f"no memory for {sum(sizes)} bytes of weights or caches: {error}") from error
    view = memoryview(block)
    at = -ctypes.addressof(ctypes.c_char.from_buffer(block)) % _PAGE
    whole = sum(sizes) // _PAGE * _PAGE  # what is left is not asked for: it would take a large page of its own
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them
            block.madvise(mmap.MADV_HUGEPAGE, at, whole)
    tensors = []
    for (shape, dtype), size in zip(wanted, sizes, strict=True):
        count = math.prod(shape)
        part = view[at : at + count * dtype.itemsize]
        tensors.append(torch.frombuffer(part, dtype=dtype).view(shape) if count else torch.zeros(shape, dtype=dtype))
        at += size
    return tensors
