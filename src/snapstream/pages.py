"""Large blocks of memory on a CPU, on huge pages where the system has them.

A decode step reads all weights and caches once. With 4 KiB pages, every few cache lines need another TLB entry. Linux
provides 2 MiB pages on request (``madvise``), unless they are disabled. All pages are requested at once: planned memory
is committed from the start, and that takes an eighth of the time of touching them one by one.

A block goes back to the system as soon as it is free. The C library keeps much of what is freed in small parts.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import math
import mmap
import sys
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

_PAGE = 2**21
_LINE = 64
_POPULATE_WRITE = 23
"""``MADV_POPULATE_WRITE`` of Linux 5.14, which the ``mmap`` module does not name."""


def tensors_of_zeros(shapes: Iterable[tuple[tuple[int, ...], torch.dtype]]) -> list[Tensor]:
    """Allocate zeroed tensors next to each other in one block of memory, which lives as long as any of them.

    Each tensor has a separate storage, so that none looks like a view of another.

    Raises:
        MemoryError: There is not enough memory.
    """
    wanted = list(shapes)
    sizes = [-(-math.prod(shape) * dtype.itemsize // _LINE) * _LINE for shape, dtype in wanted]
    private = {"flags": mmap.MAP_PRIVATE} if hasattr(mmap, "MAP_PRIVATE") else {}  # not shared with a fork
    try:
        block = mmap.mmap(-1, sum(sizes) + _PAGE, **private)
    except OSError as error:
        raise MemoryError(f"not enough memory for {sum(sizes)} bytes of weights or caches: {error}") from error
    view = memoryview(block)
    at = -ctypes.addressof(ctypes.c_char.from_buffer(block)) % _PAGE
    whole = sum(sizes) // _PAGE * _PAGE  # not the rest, which would occupy a whole huge page
    if whole and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the system has none
            block.madvise(mmap.MADV_HUGEPAGE, at, whole)
    _commit(block, at, sum(sizes))
    tensors = []
    for (shape, dtype), size in zip(wanted, sizes, strict=True):
        count = math.prod(shape)
        part = view[at : at + count * dtype.itemsize]
        tensors.append(torch.frombuffer(part, dtype=dtype).view(shape) if count else torch.zeros(shape, dtype=dtype))
        at += size
    return tensors


def _commit(block: mmap.mmap, at: int, size: int) -> None:
    """Make the system provide all pages of a part of a block."""
    page = mmap.PAGESIZE
    first = at // page * page
    start = ctypes.addressof(ctypes.c_char.from_buffer(block))
    advise = _madvise()
    if advise is not None:
        length = -(-(at + size) // page) * page - first
        if advise(ctypes.c_void_p(start + first), ctypes.c_size_t(length), _POPULATE_WRITE) == 0:
            return
        if ctypes.get_errno() == errno.ENOMEM:
            raise MemoryError(f"not enough memory for {size} bytes of weights or caches")
    ctypes.memset(start + at, 0, size)  # an older system, or another one


@functools.cache
def _madvise() -> Callable[..., int] | None:
    """The function of the C library, if it is Linux's; other threads run while it does."""
    if sys.platform != "linux":
        return None
    return ctypes.CDLL(None, use_errno=True).madvise
