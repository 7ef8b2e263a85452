"""Memory for what a decode step reads, on large pages where the system has them.

A step reads all weights and caches once; through pages of 4 KiB every few lines of memory need another entry of the
processor's table of pages. Linux gives pages of 2 MiB to whom asks (``madvise``), where they are not switched off.
"""

from __future__ import annotations

import ctypes
import math
import sys
from collections.abc import Iterable

import torch
from torch import Tensor

_PAGE = 2**21
_LINE = 64
_MADV_HUGEPAGE = 14


def empty_tensors(shapes: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Tensors beside each other in one block of memory, which is kept while one of them is; nothing is written."""
    wanted = list(shapes)
    sizes = [-(-math.prod(shape) * dtype.itemsize // _LINE) * _LINE for shape, dtype in wanted]
    block = torch.empty(sum(sizes) + _PAGE, dtype=torch.uint8)
    at = -block.data_ptr() % _PAGE
    _ask_for_large_pages(block.data_ptr() + at, sum(sizes))
    tensors = []
    for (shape, dtype), size in zip(wanted, sizes, strict=True):
        used = math.prod(shape) * dtype.itemsize
        tensors.append(block[at : at + used].view(dtype).view(shape))
        at += size
    return tensors


def _ask_for_large_pages(address: int, size: int) -> None:
    """For what whole pages hold; it does no harm where there are none."""
    whole = size // _PAGE * _PAGE
    if whole and sys.platform.startswith("linux"):
        ctypes.CDLL(None).madvise(ctypes.c_void_p(address), ctypes.c_size_t(whole), _MADV_HUGEPAGE)
