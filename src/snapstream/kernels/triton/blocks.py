"""Weights in blocks: products of few rows that read them as they are stored, and their numbers.

A product works on *parts* of a row that share a scale: 32 columns, or 16 of Q6_K. Numbers of a part are small integers,
exact in every type, so a part is a product of the tensor cores, whose float32 sums are then scaled::

    x @ weight.T = sum over parts of scale * (x[part] @ numbers[part].T) + least * sum(x[part])

Rows of the weight are split over programs; columns are, too, where there are too few rows to keep a device busy.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from snapstream.kernels.formats import LANES, Format
from snapstream.kernels.products import stock_grouped_linear
from snapstream.kernels.triton import BLOCK_ROWS, column_splits
from snapstream.kernels.triton.tiles import INTERPRETED, SMALLEST, product, rounded
from snapstream.kernels.weight import BlockWeight, Weight

MOST_TOKENS = 64
"""Maximum number of rows of ``x`` that a program multiplies at once; for more, it reads its weights again."""


@triton.jit
def _half(address):
    """Numbers of 16 bits at addresses of bytes, as float32."""
    return tl.load(address.to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def _integer(address):
    return tl.load(address).to(tl.int32)


@triton.jit
def _nested(packed, lane, part):
    """A scale and a minimum of Q4_K or Q5_K, of six bits each."""
    at = packed + (part % 4) * 16 + lane
    first, second, third = _integer(at), _integer(at + 64), _integer(at + 128)
    scale = tl.where(part < 4, first & 63, (third & 15) | (first >> 6 << 4))
    least = tl.where(part < 4, second & 63, (third >> 4) | (second >> 6 << 4))
    return scale.to(tl.float32), least.to(tl.float32)


@triton.jit
def _part(
    block,
    lane,
    part,
    KIND: tl.constexpr,
    HAS_FIVE: tl.constexpr,
    HAS_LEAST: tl.constexpr,
    FIELDS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One part of some rows; see :mod:`snapstream.kernels.formats` for the fields.

    Args:
        block: Addresses of the tiles of the rows, ``[rows]``.
        lane: The rows' numbers in their tiles, ``[rows]``.
        part: Number of the part in its block.
        KIND: ``nested`` for Q4_K and Q5_K, ``simple`` for Q4_0 to Q5_1, or the name of the format.
        HAS_FIVE: Whether numbers have five bits.
        HAS_LEAST: Whether parts of a simple format have a number that is added.
        FIELDS: Offsets of its fields in a tile.
        COLUMNS: Columns of a part.

    Returns:
        Its integers, int32 ``[rows, COLUMNS]``, their scale, and what is added to all of them: float32 ``[rows]``.
    """
    column = tl.arange(0, COLUMNS)
    quad = (column // 4)[None, :]
    byte = lane[:, None] * 4 + (column % 4)[None, :]
    block_of = block[:, None]
    if KIND == "q8_0":
        number = _integer(block_of + FIELDS[1] + quad * 64 + byte) - 128
        scale, least = _half(block + FIELDS[0] + lane * 2), tl.zeros_like(lane).to(tl.float32)
    elif KIND == "q6_k":
        half, third, quarter = part // 8, part % 8 // 2, part % 2  # of 128, 32 and 16 columns
        low = _integer(block_of + FIELDS[0] + (half * 16 + third % 2 * 8 + quarter * 4 + quad) * 64 + byte)
        high = _integer(block_of + FIELDS[1] + (half * 8 + quarter * 4 + quad) * 64 + byte)
        number = ((low >> (third // 2 * 4)) & 15 | ((high >> (third * 2)) & 3) << 4) - 32
        own = tl.load(block + FIELDS[2] + part * 16 + lane).to(tl.int8, bitcast=True).to(tl.float32)
        scale, least = own * _half(block + FIELDS[3] + lane * 2), tl.zeros_like(lane).to(tl.float32)
    elif KIND == "nested":
        both = _integer(block_of + FIELDS[3 + HAS_FIVE] + (part // 2 * 8 + quad) * 64 + byte)
        number = (both >> (part % 2 * 4)) & 15
        if HAS_FIVE:
            number |= ((_integer(block_of + FIELDS[3] + quad * 64 + byte) >> part) & 1) << 4
        scale, least = _nested(block + FIELDS[2], lane, part)
        scale *= _half(block + FIELDS[0] + lane * 2)
        least *= -_half(block + FIELDS[1] + lane * 2)
    else:
        both = _integer(block_of + FIELDS[1 + HAS_LEAST + HAS_FIVE] + quad % 4 * 64 + byte)
        number = (both >> (quad // 4 * 4)) & 15
        if HAS_FIVE:
            number |= ((_integer(block_of + FIELDS[1 + HAS_LEAST] + byte) >> quad) & 1) << 4
        scale, least = _half(block + FIELDS[0] + lane * 2), tl.zeros_like(lane).to(tl.float32)
        if HAS_LEAST:
            least = _half(block + FIELDS[1] + lane * 2)
        else:
            number -= 16 if HAS_FIVE else 8
    return number, scale, least


@triton.jit
def _store_sums(out, place, mask, sums, bias, row, is_row, like, factor, HAS_BIAS: tl.constexpr, ADD: tl.constexpr):
    """Store float32 sums ``[tokens, rows]``: with their bias, rounded to the type of ``like``, times a factor."""
    if HAS_BIAS:
        sums += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)[None, :]
    if like is not None:
        sums = rounded(rounded(sums, like).to(tl.float32) * factor, like).to(tl.float32)
    else:
        sums *= factor
    if ADD:
        sums += tl.load(out + place, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + place, rounded(sums, out), mask=mask)


@triton.jit(do_not_specialize=["tokens", "each"])
def _multiply(
    x,
    tiles,
    bias,
    out,
    partial,
    ends,
    like,
    factor,
    x_row,
    out_row,
    tokens,
    count,
    parts,
    each,
    matrix,
    KIND: tl.constexpr,
    HAS_FIVE: tl.constexpr,
    HAS_LEAST: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Some rows of a weight with some of its columns, or of one of several weights with the rows of ``x`` it has."""
    # 1. The rows of the weight, which lie in several tiles, and the parts of their columns.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < count
    lane, tile = row % 16, tl.minimum(row, count - 1) // 16
    expert, split = tl.program_id(1), tl.program_id(2)
    blocks = parts // PER_BLOCK
    block = tiles + expert.to(tl.int64) * matrix + (tile * blocks).to(tl.int64) * TILE
    first = split * each
    last = tl.minimum(first + each, parts)
    # 2. The rows of x.
    begin, end = 0, tokens
    if ends is not None:
        begin = tl.load(ends + expert - 1, mask=expert > 0, other=0).to(tl.int32)
        end = tl.load(ends + expert).to(tl.int32)
    for start in range(begin, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        is_token = token < end
        at = x + token.to(tl.int64)[:, None] * x_row + tl.arange(0, COLUMNS)[None, :]
        # 3. Their product.
        sums = tl.zeros([TOKENS, ROWS], tl.float32)
        for part in range(first, last):
            number, scale, least = _part(
                block + (part // PER_BLOCK) * TILE, lane, part % PER_BLOCK, KIND, HAS_FIVE, HAS_LEAST, FIELDS, COLUMNS
            )
            some = tl.load(at + part * COLUMNS, mask=is_token[:, None], other=0.0)
            exact = number.to(tl.float32)
            if not INTERPRETED:
                exact = exact.to(some.dtype)
            sums += product(some, tl.trans(exact)) * scale[None, :]
            sums += tl.sum(some.to(tl.float32), 1)[:, None] * least[None, :]
        mask = is_token[:, None] & is_row[None, :]
        if SPLIT:
            place = (split * tokens + token).to(tl.int64)[:, None] * count + row[None, :]
            tl.store(partial + place, sums, mask=mask)
        else:
            place = token.to(tl.int64)[:, None] * out_row + row[None, :]
            _store_sums(out, place, mask, sums, bias, row, is_row, like, factor, HAS_BIAS, ADD)


@triton.jit(do_not_specialize=["tokens", "splits"])
def _add_splits(
    partial, bias, out, like, factor, out_row, tokens, count, splits, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
):  # fmt: skip
    """The sums of one row of ``x``."""
    token, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    is_row = row < count
    sums = tl.zeros([ROWS], tl.float32)
    for split in range(splits):
        sums += tl.load(partial + (split * tokens + token) * count + row, mask=is_row, other=0.0)
    place = token * out_row + row[None, :]
    _store_sums(out, place, is_row[None, :], sums[None, :], bias, row, is_row, like, factor, HAS_BIAS, ADD)


@triton.jit(do_not_specialize=["count", "total"])
def _widen(
    tiles,
    numbers,
    out,
    out_row,
    count,
    total,
    parts,
    KIND: tl.constexpr,
    HAS_FIVE: tl.constexpr,
    HAS_LEAST: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A part of some rows as numbers: all rows in order, or those whose numbers are given."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = place < count
    row = place
    if numbers is not None:
        row = tl.load(numbers + place, mask=is_row, other=0).to(tl.int32)
    row = tl.minimum(row, total - 1)
    part = tl.program_id(1)
    block = tiles + (row // 16 * (parts // PER_BLOCK) + part // PER_BLOCK).to(tl.int64) * TILE
    number, scale, least = _part(block, row % 16, part % PER_BLOCK, KIND, HAS_FIVE, HAS_LEAST, FIELDS, COLUMNS)
    wide = number.to(tl.float32) * scale[:, None] + least[:, None]
    at = place.to(tl.int64)[:, None] * out_row + part * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    tl.store(out + at, rounded(wide, out), mask=is_row[:, None])


@functools.cache
def _described(kind: Format) -> dict[str, Any]:
    """Compile-time parameters that describe a format."""
    offsets, at = [], 0
    for count, width in kind.fields:
        offsets.append(at)
        at += LANES * count * width
    columns = 16 if kind.name == "q6_k" else 32
    return {
        "KIND": {"q4_k": "nested", "q5_k": "nested", "q6_k": "q6_k", "q8_0": "q8_0"}.get(kind.name, "simple"),
        "HAS_FIVE": kind.name.startswith("q5"),
        "HAS_LEAST": kind.name.endswith("_1"),
        "FIELDS": tuple(offsets),
        "TILE": at,
        "COLUMNS": columns,
        "PER_BLOCK": kind.columns // columns,
    }


def multiply(
    x: Tensor,
    weight: Weight,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    add: bool = False,
    ends: Tensor | None = None,
    like: Tensor | None = None,
    factor: float = 1.0,
) -> None:
    """Compute ``(x @ weight.T + bias) * factor``; the result of a row of ``x`` depends on that row alone.

    Args:
        x: ``[T, in]``; the elements of a row must be contiguous, as in ``out``.
        weight: ``[out, in]``, or with ``ends`` ``[E, out, in]``; rows that are not in blocks are multiplied by torch.
        out: ``[T, out]``.
        bias: ``[out]`` or ``None``.
        add: Whether the result is added to ``out``.
        ends: Where the rows of each expert end, int64 ``[E]``; rows past the last end stay as they are.
        like: A tensor to whose type sums are rounded before they are written; ``None``: they are not.
        factor: What the result is multiplied by, before it is added.
    """
    for part, rows in weight.runs():
        own, added = out[:, rows], None if bias is None else bias[rows]
        if isinstance(part, BlockWeight):
            _multiply_part(x, part, own, added, add, ends, like, factor)
        elif ends is not None:
            own.copy_(stock_grouped_linear(x, part, ends))
        else:
            y = part.multiply(x if like is not None else x.to(out.dtype), added)
            if factor != 1.0:
                y = y * factor
            own.copy_(own + y if add else y)


def _multiply_part(
    x: Tensor,
    weight: BlockWeight,
    out: Tensor,
    bias: Tensor | None,
    add: bool,
    ends: Tensor | None,
    like: Tensor | None,
    factor: float,
) -> None:
    """:func:`multiply` with rows in one format."""
    described, tokens, columns = _described(weight.kind), len(x), weight.shape[-1]
    parts, per_block = columns // described["COLUMNS"], described["PER_BLOCK"]
    splits = column_splits(weight.out, columns, x.device) if ends is None else 1
    each = -(-parts // (splits * per_block)) * per_block
    splits = -(-parts // each)
    experts = 1 if ends is None else len(ends)
    partial = None
    if splits > 1:
        partial = torch.empty(splits, tokens, weight.out, dtype=torch.float32, device=x.device)
    _multiply[(-(-weight.out // BLOCK_ROWS), experts, splits)](
        x,
        weight.stored,
        bias,
        out,
        partial,
        ends,
        like,
        factor,
        x.stride(0),
        out.stride(0),
        tokens,
        weight.out,
        parts,
        each,
        0 if ends is None else weight.stored.stride(0),
        **described,
        TOKENS=SMALLEST if tokens <= SMALLEST else MOST_TOKENS,
        ROWS=BLOCK_ROWS,
        SPLIT=splits > 1,
        HAS_BIAS=bias is not None,
        ADD=add,
        num_warps=4,
    )
    if partial is not None:
        _add_splits[(tokens, -(-weight.out // 256))](
            partial,
            bias,
            out,
            like,
            factor,
            out.stride(0),
            tokens,
            weight.out,
            splits,
            ROWS=256,
            HAS_BIAS=bias is not None,
            ADD=add,
            num_warps=4,
        )


def widen(weight: BlockWeight, out: Tensor, numbers: Tensor | None = None) -> None:
    """Write the numbers of a matrix ``[out, in]``, or of some of its rows.

    Args:
        weight: The matrix.
        out: ``[rows, in]``, with contiguous rows.
        numbers: Which rows, int64 ``[rows]``; ``None`` for all.
    """
    described = _described(weight.kind)
    parts = weight.shape[-1] // described["COLUMNS"]
    _widen[(-(-len(out) // BLOCK_ROWS), parts)](
        weight.stored,
        numbers,
        out,
        out.stride(0),
        len(out),
        weight.out,
        parts,
        **described,
        ROWS=BLOCK_ROWS,
        num_warps=4,
    )
