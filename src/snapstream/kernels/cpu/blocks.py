"""Weights in blocks: brings them into tiles, and widens them (``block_rows.cpp``)."""

from __future__ import annotations

import ctypes

from torch import Tensor

from snapstream.kernels.buffers import BufferView
from snapstream.kernels.cpu import interface, library
from snapstream.kernels.cpu.checks import require
from snapstream.kernels.cpu.program import structure_of_rows, structure_of_weight
from snapstream.kernels.formats import Format
from snapstream.kernels.weight import BlockWeight

_MADE = interface.STRUCTURES


def pack(kind: Format, rows: Tensor, tiles: Tensor, order: Tensor | None = None) -> None:
    """Bring rows into tiles; see :meth:`~snapstream.kernels.formats.Format.pack`.

    Args:
        kind: Their format.
        rows: uint8 ``[out, row_bytes]``, as GGUF stores them.
        tiles: Where the tiles go, uint8 ``[ceil(out / 16), in / columns, 16 * nbytes]``.
        order: Which of the rows comes first, second, ...: int64 ``[out]``; ``None`` for their own order.

    Raises:
        ValueError: Shapes do not match.
        MemoryError: There is not enough memory for temporaries.
    """
    columns = rows.shape[1] // kind.nbytes * kind.columns
    require(tuple(tiles.shape) == kind.stored_shape((len(rows), columns)), f"tiles do not match {tuple(rows.shape)}")
    require(rows.is_contiguous() and tiles.is_contiguous(), "rows and tiles must be contiguous")
    require(order is None or (order.shape == rows.shape[:1] and order.is_contiguous()), "order does not match")
    counts, widths = ((ctypes.c_int64 * len(kind.fields))(*each) for each in zip(*kind.fields, strict=True))
    stored = _MADE["Stored"](
        rows_from=rows.data_ptr(),
        order=None if order is None else order.data_ptr(),
        tiles=tiles.data_ptr(),
        type=interface.TYPES.index(kind.name),
        rows=len(rows),
        columns=columns,
        block=kind.columns,
        bytes=kind.nbytes,
        fields=len(kind.fields),
        counts=ctypes.addressof(counts),
        widths=ctypes.addressof(widths),
    )
    library.run("pack", stored, of="weights")


def widen(weight: BlockWeight, target: Tensor) -> None:
    """Write the numbers of a matrix to a tensor ``[out, in]``, float32 or bfloat16, with contiguous rows.

    Raises:
        ValueError: Shapes do not match.
        MemoryError: There is not enough memory for temporaries.
    """
    require(target.shape == weight.shape and target.stride(1) == 1, f"the target is {tuple(target.shape)}")
    rows = structure_of_rows(target, BufferView("target", target.shape[1]))
    library.run("widen", structure_of_weight(weight, "weight")[0], rows, of="weights")
