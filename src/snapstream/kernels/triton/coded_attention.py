"""Attention to cache entries that are codes of 8 or 4 bits (:mod:`snapstream.cache.codes`).

Attention multiplies queries with what codes stand for, without frames and rotations. Therefore queries are brought to
the frame of their sequence and rotated before it, and the rotation is taken back from its result.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from snapstream.cache import QuantizedCache
from snapstream.kernels.triton.codes import rotated
from snapstream.kernels.triton.tiles import INTERPRETED, load_parts, load_rows, rounded, store_parts

UNPACK4: tl.constexpr = tl.constexpr("""{
    .reg .b32 low, high, one, middle;
    mov.b32 one, 0x3F803F80;
    mov.b32 middle, 0xC308C308;
    and.b32 low, $4, 0x0F0F0F0F;
    shr.b32 high, $4, 4;
    and.b32 high, high, 0x0F0F0F0F;
    prmt.b32 $0, low, 0x43434343, 0x4140;
    prmt.b32 $1, low, 0x43434343, 0x4342;
    prmt.b32 $2, high, 0x43434343, 0x4140;
    prmt.b32 $3, high, 0x43434343, 0x4342;
    fma.rn.bf16x2 $0, $0, one, middle;
    fma.rn.bf16x2 $1, $1, one, middle;
    fma.rn.bf16x2 $2, $2, one, middle;
    fma.rn.bf16x2 $3, $3, one, middle;
}""")
"""Lower and upper halves of four bytes, less 8, in bfloat16: the byte ``n`` below the byte 0x43 is ``128 + n``."""


@triton.jit
def place_of_column(column, SIZE: tl.constexpr, BITS: tl.constexpr):
    """Where attention has a column: with 4 bits, those in the lower halves of bytes come first."""
    if BITS == 4:
        column = column // 32 * 16 + column % 16 + column % 32 // 16 * (SIZE // 2)
    return column


@triton.jit
def _rotate_queries(
    query,
    frames,
    target,
    constants,
    active,
    query_row,
    query_head,
    tokens,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = row // tokens
    if tl.load(active + slot) == 0:
        return
    column = tl.arange(0, PADDED)
    mask = column < SIZE
    x = tl.load(query + row * query_row + head * query_head + column, mask=mask, other=0.0).to(tl.float32)
    frame = frames + (slot * KV_HEADS + head // GROUP) * 2 * SIZE + column
    center, spread = tl.load(frame, mask=mask, other=0.0), tl.load(frame + SIZE, mask=mask, other=1.0)
    at = row * tl.num_programs(1) + head
    tl.store(constants + at, tl.sum(x * center, 0))
    y = tl.reshape(rotated((x * spread)[None, :], 1, PADDED, WIDTH), (PADDED,))
    tl.store(target + at * SIZE + place_of_column(column, SIZE, BITS), rounded(y, target), mask=mask)


@triton.jit
def _rotate_back(
    source,
    frames,
    out,
    active,
    out_row,
    out_head,
    tokens,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PADDED: tl.constexpr,
    WIDTH: tl.constexpr,
    BITS: tl.constexpr,
    LATENT: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = row // tokens
    if tl.load(active + slot) == 0:
        return
    column = tl.arange(0, PADDED)
    mask = column < COLUMNS
    place = place_of_column(column, COLUMNS, BITS)
    x = tl.load(source + (row * tl.num_programs(1) + head) * COLUMNS + place, mask=mask, other=0.0)
    y = tl.reshape(rotated(x[None, :], 1, PADDED, WIDTH), (PADDED,))
    if LATENT:  # values are part of the keys, which have a frame
        frame = frames + (slot * KV_HEADS + head // GROUP) * 2 * SIZE + column
        y = y * tl.load(frame + SIZE, mask=mask, other=1.0) + tl.load(frame, mask=mask, other=0.0)
    tl.store(out + row * out_row + head * out_head + column, rounded(y, out), mask=mask)


def rotated_scratch(rows: int, heads: int, size: int, columns: int) -> int:
    """Elements of float32 scratch that :class:`RotatedQueries` needs."""
    return sum(map(_aligned, (rows * heads * size, rows * heads, rows * heads * columns)))


def _aligned(elements: int) -> int:
    """So many elements or a few more, so that what follows is aligned for vectors."""
    return -(-elements // 4) * 4


class RotatedQueries:
    """Queries of a step in the form in which they are multiplied with codes, and room for the results.

    Attributes:
        query: ``[rows, H, D]``, in the queries' dtype; columns are where :func:`place_of_column` says.
        constants: What the centers of all channels add to each logit, before its scale, float32 ``[rows, H]``.
        out: float32 ``[rows, H, V]``, likewise.
    """

    def __init__(self, query: Tensor, out: Tensor, cache: QuantizedCache, tokens: int, active: Tensor, scratch: Tensor):
        """Bring queries into this form.

        Args:
            query: ``[rows, H, D]``.
            out: Where results go, ``[rows, H, V]``.
            cache: The cache.
            tokens: Rows per slot.
            active: Slots to process, one byte each ``[B]``.
            scratch: float32, :func:`rotated_scratch` elements.
        """
        (rows, H, D), V = query.shape, out.shape[2]
        sizes = rows * H * D, rows * H, rows * H * V
        parts = scratch.split([_aligned(size) for size in sizes])
        self.query = parts[0].view(query.dtype)[: sizes[0]].view(rows, H, D)
        self.constants, self.out = parts[1][: sizes[1]].view(rows, H), parts[2][: sizes[2]].view(rows, H, V)
        self._cache, self._tokens, self._active, self._target = cache, tokens, active, out
        self._heads = {"KV_HEADS": cache.heads, "GROUP": H // cache.heads, "SIZE": D, "WIDTH": cache.rotation}
        _rotate_queries[(rows, H)](
            query,
            cache.frames,
            self.query,
            self.constants,
            active,
            query.stride(0),
            query.stride(1),
            tokens,
            PADDED=next_power_of_2(D),
            BITS=cache.formats[0].bits,
            **self._heads,
            num_warps=1,
        )

    def write(self) -> None:
        """Write results to where they go."""
        rows, H, V = self.out.shape
        _rotate_back[(rows, H)](
            self.out,
            self._cache.frames,
            self._target,
            self._active,
            self._target.stride(0),
            self._target.stride(1),
            self._tokens,
            COLUMNS=V,
            PADDED=next_power_of_2(V),
            BITS=self._cache.formats[-1].bits,
            LATENT=self._cache.entry.latent,
            **self._heads,
            num_warps=1,
        )


@triton.jit
def _bytes(row, is_row, START: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr):
    """Bytes ``START .. START + COLUMNS`` of some rows as a tile; 0 where ``is_row`` is false, and beyond ``SIZE``."""
    column = START + tl.arange(0, COLUMNS)
    mask = is_row[:, None]
    if SIZE < START + COLUMNS:
        mask = mask & (column < SIZE)[None, :]
    return tl.load(row[:, None] + column[None, :], mask=mask, other=0)


@triton.jit
def _numbers8(row, is_row, like, START: tl.constexpr, COLUMNS: tl.constexpr, SIZE: tl.constexpr):
    """Codes of 8 bits, which are exact in every type. Those of masked entries do not matter: their factor is 0."""
    code = (_bytes(row, is_row, START, COLUMNS, SIZE) ^ 128).to(tl.int8, bitcast=True)
    # From float32 the interpreter converts correctly, from int8 the compiler has fewer instructions.
    return (code.to(tl.float32) if INTERPRETED else code).to(like.dtype.element_ty)


@triton.jit
def _numbers4(row, is_row, like, HALF: tl.constexpr, SIZE: tl.constexpr, ENTRIES: tl.constexpr):
    """What codes of 4 bits stand for: those in the lower halves of all bytes, and those in the upper halves."""
    both = _bytes(row, is_row, 0, HALF, SIZE // 2)
    PARTS: tl.constexpr = HALF // 16
    part = tl.arange(0, PARTS)
    mask = is_row[:, None]
    if SIZE // 2 < HALF:
        mask = mask & (part < SIZE // 32)[None, :]
    scales = (row + SIZE // 2).to(tl.pointer_type(tl.int16))
    bits = tl.load(scales[:, None] + part[None, :], mask=mask, other=0)
    if INTERPRETED or like.dtype.element_ty != tl.bfloat16:
        scale = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
        low, high = (both & 15).to(tl.float32) - 8.0, (both >> 4).to(tl.float32) - 8.0
        low, high = tl.reshape(low, (ENTRIES, PARTS, 16)), tl.reshape(high, (ENTRIES, PARTS, 16))
        low, high = rounded(low * scale[:, :, None], like), rounded(high * scale[:, :, None], like)
    else:  # rounds as float32 would
        scale = bits.to(tl.bfloat16, bitcast=True)
        low, high = tl.inline_asm_elementwise(
            UNPACK4, "=r,=r,=r,=r,r", [both], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
        low, high = tl.reshape(low, (ENTRIES, PARTS, 16)), tl.reshape(high, (ENTRIES, PARTS, 16))
        low, high = low * scale[:, :, None], high * scale[:, :, None]
    return tl.reshape(low, (ENTRIES, HALF)), tl.reshape(high, (ENTRIES, HALF))


@triton.jit
def load_entries(
    address,
    stride,
    rows,
    is_row,
    like,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
    ENTRIES: tl.constexpr,
):
    """Some entries, in the type that ``like`` points to.

    Returns:
        Both parts as from ``load_parts``, and factors of the entries. With 4 bits, parts are those of
        :func:`place_of_column`.
    """
    factor = tl.full([ENTRIES], 1.0, tl.float32)
    if BITS:
        # A row of codes is not a multiple of 16 bytes, which is all that the compiler would notice.
        aligned: tl.constexpr = 4 if BITS == 8 else (8 if SIZE % 128 == 0 else (4 if SIZE % 64 == 0 else 2))
        row = tl.multiple_of(address + rows.to(tl.int64) * stride, aligned)
    if BITS == 8:
        factor = tl.load((row + SIZE).to(tl.pointer_type(tl.float32)), mask=is_row, other=0.0)
        first = _numbers8(row, is_row, like, 0, FIRST, SIZE)
        second = _numbers8(row, is_row, like, FIRST, SECOND, SIZE) if SECOND else first
        if like.dtype.element_ty == tl.float16:  # a weight times such a factor would be too small for it
            first = (first.to(tl.float32) * factor[:, None]).to(tl.float16)
            second = (second.to(tl.float32) * factor[:, None]).to(tl.float16)
            factor = tl.full([ENTRIES], 1.0, tl.float32)
    elif BITS == 4:
        first, second = _numbers4(row, is_row, like, FIRST, SIZE, ENTRIES)
    else:
        first, second = load_parts(address, stride, rows, is_row, FIRST, SECOND, SIZE)
    return first, second, factor


@triton.jit
def load_queries(
    address, rows, is_row, FIRST: tl.constexpr, SECOND: tl.constexpr, SIZE: tl.constexpr, BITS: tl.constexpr
):
    """Both parts of some queries, which begin at offsets ``rows``, as those of keys with ``BITS``."""
    if BITS == 4:
        first = load_rows(address, 1, rows, is_row, 0, FIRST, SIZE // 2)
        second = load_rows(address + SIZE // 2, 1, rows, is_row, 0, SECOND, SIZE // 2)
    else:
        first, second = load_parts(address, 1, rows, is_row, FIRST, SECOND, SIZE)
    return first, second


@triton.jit
def store_results(
    out,
    rows,
    is_row,
    first,
    second,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    SIZE: tl.constexpr,
    BITS: tl.constexpr,
):
    """Store both parts of some results, which begin at offsets ``rows`` and are parts of values with ``BITS``."""
    if BITS == 4:
        store_parts(out, rows, is_row, first, first, FIRST, 0, SIZE // 2)
        store_parts(out + SIZE // 2, rows, is_row, second, second, SECOND, 0, SIZE // 2)
    else:
        store_parts(out, rows, is_row, first, second, FIRST, SECOND, SIZE)
