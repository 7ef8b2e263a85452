"""Weights in blocks: products that read them as they are stored, and their numbers.

A tile has sixteen rows, the *lanes*, and keeps four numbers of one row in a word of 32 bits, or eight: low and high
halves of its bytes. A program reads the words of a *group* of blocks, 256 columns, or 128 of Q8_0. Each word is then
taken apart: ``half`` is which half of its bytes, ``byte`` is which byte.

There are two products. A single row of ``x`` is multiplied by numbers as they are unpacked. For more rows, numbers are
rounded to the type of ``x`` and multiplied by the tensor cores. Rows of the weight are split over programs; columns
are, too, where there are too few rows to keep a device busy.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from snapstream.kernels.formats import LANES, Format
from snapstream.kernels.products import grouped_linear
from snapstream.kernels.triton import BLOCK_ROWS, column_splits
from snapstream.kernels.triton.tiles import SMALLEST, product, rounded
from snapstream.kernels.weight import BlockWeight, Weight

GROUP = 32
"""Words of a row that are read at once."""
MOST_TOKENS = 64
"""Maximum number of rows of ``x`` that a program multiplies at once; for more, it reads its weights again."""


@triton.jit
def _half(address, mask):
    """Numbers of 16 bits at addresses of bytes, as float32."""
    return tl.load(address.to(tl.pointer_type(tl.float16)), mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _byte(address, mask):
    return tl.load(address, mask=mask, other=0).to(tl.int32)


@triton.jit
def _word(address, mask):
    return tl.load(address.to(tl.pointer_type(tl.int32)), mask=mask, other=0)


@triton.jit
def _words(
    tile, lane, is_row, first, blocks, KIND: tl.constexpr, HAS_FIVE: tl.constexpr, FIELDS: tl.constexpr,
    TILE: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """The words of some rows in a group of blocks; see :mod:`snapstream.kernels.formats` for the fields.

    Args:
        tile: Addresses of the first blocks of the rows' tiles, ``[rows]``.
        lane: The rows' numbers in their tiles, ``[rows]``.
        is_row: Which rows exist, ``[rows]``; numbers of others are 0.
        first: First block of the group.
        blocks: Number of blocks; numbers beyond them are 0.
        KIND: ``nested`` for Q4_K and Q5_K, ``simple`` for Q4_0 to Q5_1, or the name of the format.
        HAS_FIVE: Whether numbers have five bits.
        FIELDS: Offsets of the fields in a tile.
        TILE: Bytes of a tile.
        WORDS: Words of a block.
        GROUP: Words of a group.

    Returns:
        Addresses of blocks, whether they exist, and words with low and high bits of numbers: ``[GROUP, rows]`` each.
    """
    word = tl.arange(0, GROUP)
    number = first + word // WORDS
    is_there = (number < blocks)[:, None] & is_row[None, :]
    block = tile[None, :] + (number * TILE)[:, None]
    within = (word % WORDS)[:, None]
    LOW: tl.constexpr = 0 if KIND == "q6_k" else len(FIELDS) - 1
    low = _word(block + FIELDS[LOW] + within * 64 + lane[None, :] * 4, is_there)
    high = low
    if KIND == "q6_k":
        high = _word(block + FIELDS[1] + (within // 16 * 8 + within % 8) * 64 + lane[None, :] * 4, is_there)
    elif HAS_FIVE:
        at = within % 8 * 64 if KIND == "nested" else within * 0
        high = _word(block + FIELDS[LOW - 1] + at + lane[None, :] * 4, is_there)
    return block, is_there, low, high


@triton.jit
def _number(low, high, half: tl.constexpr, byte: tl.constexpr, KIND: tl.constexpr, HAS_FIVE: tl.constexpr,
            HAS_LEAST: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """One number of each word, as float32 ``[GROUP, rows]``."""
    word = (tl.arange(0, GROUP) % WORDS)[:, None]
    if KIND == "q8_0":
        number = ((low >> (8 * byte)) & 255) - 128
    else:
        number = (low >> (8 * byte + 4 * half)) & 15
        if KIND == "q6_k":
            number = (number | ((high >> (8 * byte + 4 * half + word % 16 // 8 * 2)) & 3) << 4) - 32
        elif KIND == "nested":
            if HAS_FIVE:
                number |= ((high >> (8 * byte + word // 8 * 2 + half)) & 1) << 4
        else:
            if HAS_FIVE:
                number |= ((high >> (8 * byte + word + 4 * half)) & 1) << 4
            if not HAS_LEAST:
                number -= 16 if HAS_FIVE else 8
    return number.to(tl.float32)


@triton.jit
def _scales(block, lane, is_there, half: tl.constexpr, KIND: tl.constexpr, HAS_LEAST: tl.constexpr,
            FIELDS: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr):  # fmt: skip
    """The scale of one half of each word, and what is added to its numbers: float32 ``[GROUP, rows]``."""
    word = (tl.arange(0, GROUP) % WORDS)[:, None]
    lane = lane[None, :]
    if KIND == "nested":
        part = word // 8 * 2 + half
        packed = block + FIELDS[2] + part % 4 * 16 + lane
        first, second, third = _byte(packed, is_there), _byte(packed + 64, is_there), _byte(packed + 128, is_there)
        scale = tl.where(part < 4, first & 63, (third & 15) | (first >> 6 << 4)).to(tl.float32)
        least = tl.where(part < 4, second & 63, (third >> 4) | (second >> 6 << 4)).to(tl.float32)
        scale *= _half(block + FIELDS[0] + lane * 2, is_there)
        least *= -_half(block + FIELDS[1] + lane * 2, is_there)
    elif KIND == "q6_k":
        part = word // 16 * 8 + half * 4 + word % 16 // 8 * 2 + word % 8 // 4
        own = tl.load(block + FIELDS[2] + part * 16 + lane, mask=is_there, other=0).to(tl.int8, bitcast=True)
        scale = own.to(tl.float32) * _half(block + FIELDS[3] + lane * 2, is_there)
        least = tl.zeros_like(scale)
    else:
        scale = _half(block + FIELDS[0] + lane * 2, is_there)
        least = tl.zeros_like(scale)
        if HAS_LEAST:
            least = _half(block + FIELDS[1] + lane * 2, is_there)
    return scale, least


@triton.jit
def _numbers(low, high, scale, least, half: tl.constexpr, KIND: tl.constexpr, HAS_FIVE: tl.constexpr,
             HAS_LEAST: tl.constexpr, WORDS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr):  # fmt: skip
    """All numbers of one half of the words, with their scale: float32 ``[GROUP * 4, rows]``."""
    a = _number(low, high, half, 0, KIND, HAS_FIVE, HAS_LEAST, WORDS, GROUP) * scale + least
    b = _number(low, high, half, 1, KIND, HAS_FIVE, HAS_LEAST, WORDS, GROUP) * scale + least
    c = _number(low, high, half, 2, KIND, HAS_FIVE, HAS_LEAST, WORDS, GROUP) * scale + least
    d = _number(low, high, half, 3, KIND, HAS_FIVE, HAS_LEAST, WORDS, GROUP) * scale + least
    each = tl.join(tl.join(a, c), tl.join(b, d))  # [GROUP, rows, 2, 2], byte after byte
    return each.reshape([GROUP, ROWS, 4]).permute(0, 2, 1).reshape([GROUP * 4, ROWS])


@triton.jit
def _columns(number, half: tl.constexpr, HALVES: tl.constexpr, RUN: tl.constexpr):
    """The columns of numbers in a group of blocks: runs of first halves alternate with runs of second halves."""
    return number // RUN * (RUN * HALVES) + half * RUN + number % RUN


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
    blocks,
    each,
    matrix,
    KIND: tl.constexpr,
    HAS_FIVE: tl.constexpr,
    HAS_LEAST: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    HALVES: tl.constexpr,
    RUN: tl.constexpr,
    GROUP: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Some rows of a weight with some of its columns, or of one of several weights with the rows of ``x`` it has."""
    # 1. The rows of the weight, which lie in one tile or several, and the blocks of their columns. Lanes and tiles are
    #    written so that the compiler sees which rows are neighbors in memory: it then loads 16 bytes at once.
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < count
    expert, split = tl.program_id(1), tl.program_id(2)
    lane = tl.arange(0, ROWS) % 16
    number = tl.program_id(0) * (ROWS // 16) + tl.arange(0, ROWS) // 16
    tile = tiles + expert.to(tl.int64) * matrix + (number * blocks).to(tl.int64) * TILE
    is_tile = number * 16 < count
    first = split * each
    last = tl.minimum(first + each, blocks)
    # 2. The rows of x.
    begin, end = 0, tokens
    if ends is not None:
        begin = tl.load(ends + expert - 1, mask=expert > 0, other=0).to(tl.int32)
        end = tl.load(ends + expert).to(tl.int32)
    for start in range(begin, end, TOKENS):
        token = start + tl.arange(0, TOKENS)
        is_token = token < end
        # 3. Their product: columns by columns, as the words have them.
        parts = tl.zeros([GROUP, ROWS], tl.float32)
        sums = tl.zeros([TOKENS, ROWS], tl.float32)
        for block in range(first, last, GROUP // WORDS):
            place, is_there, low, high = _words(
                tile, lane, is_tile, block, last, KIND, HAS_FIVE, FIELDS, TILE, WORDS, GROUP
            )
            is_column = block + tl.arange(0, GROUP) // WORDS < last
            for half in tl.static_range(HALVES):
                scale, least = _scales(place, lane, is_there, half, KIND, HAS_LEAST, FIELDS, WORDS, GROUP)
                if TOKENS == 1:
                    own = tl.zeros([GROUP, ROWS], tl.float32)
                    total = tl.zeros([GROUP], tl.float32)
                    # x has one row
                    at = x + block * WIDTH + _columns(tl.arange(0, GROUP) * 4, half, HALVES, RUN)
                    for byte in tl.static_range(4):
                        some = tl.load(at + byte, mask=is_column, other=0.0).to(tl.float32)
                        own += some[:, None] * _number(low, high, half, byte, KIND, HAS_FIVE, HAS_LEAST, WORDS, GROUP)
                        total += some
                    parts += own * scale + total[:, None] * least
                else:
                    within = tl.arange(0, GROUP * 4)
                    column = block * WIDTH + _columns(within, half, HALVES, RUN)
                    mask = is_token[:, None] & (column < last * WIDTH)[None, :]
                    some = tl.load(x + token.to(tl.int64)[:, None] * x_row + column[None, :], mask=mask, other=0.0)
                    wide = _numbers(low, high, scale, least, half, KIND, HAS_FIVE, HAS_LEAST, WORDS, GROUP, ROWS)
                    sums += product(some, rounded(wide, x))
        if TOKENS == 1:
            sums = tl.sum(parts, 0)[None, :]
        mask = is_token[:, None] & is_row[None, :]
        if SPLIT:
            target = (split * tokens + token).to(tl.int64)[:, None] * count + row[None, :]
            tl.store(partial + target, sums, mask=mask)
        else:
            target = token.to(tl.int64)[:, None] * out_row + row[None, :]
            _store_sums(out, target, mask, sums, bias, row, is_row, like, factor, HAS_BIAS, ADD)


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
    blocks,
    KIND: tl.constexpr,
    HAS_FIVE: tl.constexpr,
    HAS_LEAST: tl.constexpr,
    FIELDS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    WORDS: tl.constexpr,
    HALVES: tl.constexpr,
    RUN: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
):
    """A group of columns of some rows as numbers: of all rows in order, or of those whose numbers are given."""
    place = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = place < count
    if numbers is None:
        lane, number = tl.arange(0, ROWS) % 16, tl.program_id(0) * (ROWS // 16) + tl.arange(0, ROWS) // 16
    else:
        row = tl.load(numbers + place, mask=is_row, other=0).to(tl.int32)
        lane, number = row % 16, row // 16
    first = tl.program_id(1) * (GROUP // WORDS)
    tile = tiles + (number * blocks).to(tl.int64) * TILE
    is_tile = number * 16 < total
    block, is_there, low, high = _words(tile, lane, is_tile, first, blocks, KIND, HAS_FIVE, FIELDS, TILE, WORDS, GROUP)
    for half in tl.static_range(HALVES):
        scale, least = _scales(block, lane, is_there, half, KIND, HAS_LEAST, FIELDS, WORDS, GROUP)
        wide = _numbers(low, high, scale, least, half, KIND, HAS_FIVE, HAS_LEAST, WORDS, GROUP, ROWS)
        column = first * WIDTH + _columns(tl.arange(0, GROUP * 4), half, HALVES, RUN)
        at = out + place.to(tl.int64)[None, :] * out_row + column[:, None]
        tl.store(at, rounded(wide, out), mask=is_row[None, :] & (column < blocks * WIDTH)[:, None])


@functools.cache
def _described(kind: Format) -> dict[str, Any]:
    """Compile-time parameters that describe a format."""
    offsets, at = [], 0
    for count, width in kind.fields:
        offsets.append(at)
        at += LANES * count * width
    return {
        "KIND": {"q4_k": "nested", "q5_k": "nested", "q6_k": "q6_k", "q8_0": "q8_0"}.get(kind.name, "simple"),
        "HAS_FIVE": kind.name.startswith("q5"),
        "HAS_LEAST": kind.name.endswith("_1"),
        "FIELDS": tuple(offsets),
        "TILE": at,
        "WIDTH": kind.columns,
        "WORDS": 8 if kind.name == "q8_0" else kind.columns // 8,
        "HALVES": 1 if kind.name == "q8_0" else 2,
        "RUN": {"q4_k": 32, "q5_k": 32, "q6_k": 64}.get(kind.name, 16),
        "GROUP": GROUP,
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
    """Compute ``(x @ weight.T + bias) * factor``.

    The result of a row depends on that row, and on whether it is the only one: among others, numbers of the weight are
    rounded to the type of ``x``.

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
            own.copy_(grouped_linear(x, part, ends))
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
    blocks, together = columns // weight.kind.columns, GROUP // described["WORDS"]
    splits = column_splits(weight.out, columns, x.device) if ends is None else 1
    each = -(-blocks // (splits * together)) * together
    splits = -(-blocks // each)
    at_once = _tokens_at_once(tokens) if ends is None else max(SMALLEST, _tokens_at_once(tokens))
    rows = {1: LANES, SMALLEST: 2 * LANES}.get(at_once, BLOCK_ROWS)
    experts = 1 if ends is None else len(ends)
    partial = None
    if splits > 1:
        partial = torch.empty(splits, tokens, weight.out, dtype=torch.float32, device=x.device)
    _multiply[(-(-weight.out // rows), experts, splits)](
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
        blocks,
        each,
        0 if ends is None else weight.stored.stride(0),
        **described,
        TOKENS=at_once,
        ROWS=rows,
        SPLIT=splits > 1,
        HAS_BIAS=bias is not None,
        ADD=add,
        num_warps=1 if at_once == 1 else 4,
        num_stages=1,
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


def _tokens_at_once(tokens: int) -> int:
    """Rows of ``x`` per program; a kernel is compiled for each such number."""
    if tokens == 1:
        return 1
    return SMALLEST if tokens <= SMALLEST else MOST_TOKENS


def widen(weight: BlockWeight, out: Tensor, numbers: Tensor | None = None) -> None:
    """Write the numbers of a matrix ``[out, in]``, or of some of its rows.

    Args:
        weight: The matrix.
        out: ``[rows, in]``, with contiguous rows.
        numbers: Which rows, int64 ``[rows]``; ``None`` for all.
    """
    described = _described(weight.kind)
    blocks = weight.shape[-1] // weight.kind.columns
    _widen[(-(-len(out) // BLOCK_ROWS), -(-blocks // (GROUP // described["WORDS"])))](
        weight.stored,
        numbers,
        out,
        out.stride(0),
        len(out),
        weight.out,
        blocks,
        **described,
        ROWS=BLOCK_ROWS,
        num_warps=4,
    )
