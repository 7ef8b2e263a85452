"""Formats of weights in blocks: those of GGUF files with 4 to 8 bits per weight.

A row consists of blocks, and a block of fields: scales, and the numbers that they belong to. Kernels multiply sixteen
rows at once, so sixteen rows are kept together: a *tile* has one block of each, field by field. ::

    a block of Q4_0      scale (2 bytes) | 16 bytes, each with numbers i and i + 16 of 32
    a tile of 16 rows    16 scales | bytes 0..3 of each row | bytes 4..7 of each row | bytes 8..11 | bytes 12..15

Tiles have the same bytes as the file in another order, with two exceptions: numbers of Q8_0 are stored plus 128, and
the high bits of Q5_0 and Q5_1 are sorted by the byte that they belong to. The formats are defined in
https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

LANES = 16
"""Rows of a tile."""


@dataclass(frozen=True)
class Format:
    """A format of weights in blocks.

    Attributes:
        name: Its name, in lower case.
        number: Its number in GGUF files.
        columns: Columns of a block.
        fields: The fields of a block: how many values, and bytes of each.
    """

    name: str
    number: int
    columns: int
    fields: tuple[tuple[int, int], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of a block."""
        return sum(count * width for count, width in self.fields)

    def stored_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Shape of the tiles of a matrix ``[out, in]``, or of several: ``[..., ceil(out / 16), in / columns, bytes]``.

        Raises:
            ValueError: Rows do not consist of whole blocks.
        """
        *several, rows, columns = shape
        if columns % self.columns:
            raise ValueError(f"{columns} columns do not consist of blocks of {self.columns} ({self.name})")
        return (*several, -(-rows // LANES), columns // self.columns, LANES * self.nbytes)

    def pack(self, rows: Tensor) -> Tensor:
        """Bring rows into tiles.

        Args:
            rows: uint8 ``[out, row_bytes]``, as GGUF stores them.

        Returns:
            uint8 ``[ceil(out / 16), in / columns, 16 * nbytes]``; rows that are missing in the last tile are zeros.
        """
        blocks = rows.shape[1] // self.nbytes
        whole = rows.new_zeros(-(-len(rows) // LANES) * LANES, rows.shape[1])
        whole[: len(rows)] = rows
        each = whole.view(-1, LANES, blocks, self.nbytes).transpose(1, 2)
        made, at = [], 0
        for count, width in self.fields:
            field = torch.unflatten(each[..., at : at + count * width], -1, (count, width)).transpose(2, 3)
            made.append(self._stored(field, count, width).flatten(2))
            at += count * width
        return torch.cat(made, -1)

    def _stored(self, field: Tensor, count: int, width: int) -> Tensor:
        """A field ``[..., count, 16, width]`` as it is stored."""
        if self.name == "q8_0" and width == 4:
            return field ^ 0x80
        if self.name in ("q5_0", "q5_1") and (count, width) == (1, 4):
            bits = torch.unflatten(_bits(field).flatten(-2), -1, (8, 4))  # [..., 16, column / 4, column % 4]
            return (bits << torch.arange(8, device=bits.device)[:, None]).sum(-2).to(torch.uint8)
        return field

    def widen(self, tiles: Tensor) -> Tensor:
        """The numbers of tiles: uint8 ``[..., 16 * nbytes]`` to float32 ``[..., 16, columns]``."""
        fields, at = [], 0
        for count, width in self.fields:
            size = count * LANES * width
            fields.append(torch.unflatten(tiles[..., at : at + size], -1, (count, LANES, width)))
            at += size
        return _WIDENED[self.name](fields)


def _bits(values: Tensor) -> Tensor:
    """The bits of bytes, lowest first: ``[...]`` to ``[..., 8]``."""
    return (values[..., None] >> torch.arange(8, dtype=torch.uint8, device=values.device)) & 1


def _halves(field: Tensor) -> Tensor:
    """A field of float16: ``[..., count, 16, 2]`` to float32 ``[..., count, 16]``."""
    return field.contiguous().view(torch.float16)[..., 0].float()


def _columns(numbers: Tensor) -> Tensor:
    """Numbers ``[..., quads, 16, 4]`` in the order of columns, int32 ``[..., 16, columns]``."""
    return numbers.to(torch.int32).transpose(-3, -2).flatten(-2)


def _simple(fields: list[Tensor], *, minimum: bool, five: bool) -> Tensor:
    scale, *others = fields
    numbers = torch.cat((others[-1] & 15, others[-1] >> 4), -3)
    if five:
        numbers = numbers | (_bits(others[-2]).movedim(-1, -4)[..., 0, :, :] << 4)
    whole = _columns(numbers)
    if minimum:
        return whole * _halves(scale)[..., 0, :, None] + _halves(others[0])[..., 0, :, None]
    return (whole - (16 if five else 8)) * _halves(scale)[..., 0, :, None]


def _bytes(fields: list[Tensor]) -> Tensor:
    return (_columns(fields[1]) - 128) * _halves(fields[0])[..., 0, :, None]


def _nested(fields: list[Tensor], *, five: bool) -> Tensor:
    factor, least, packed = fields[0], fields[1], fields[2][..., 0]  # [..., 12, 16]
    first, second, third = torch.unflatten(packed, -2, (3, 4)).unbind(-3)
    scales = torch.cat((first & 63, (third & 15) | (first >> 6 << 4)), -2) * _halves(factor)  # [..., 8, 16]
    minima = torch.cat((second & 63, (third >> 4) | (second >> 6 << 4)), -2) * _halves(least)
    halves = torch.unflatten(fields[-1], -3, (4, 1, 8))
    numbers = torch.cat((halves & 15, halves >> 4), -4).flatten(-5, -4)  # [..., 8 parts, 8 quads, 16, 4]
    if five:
        numbers = numbers | (_bits(fields[3]).movedim(-1, -4) << 4)
    return _by_part(_columns(numbers) * scales[..., None] - minima[..., None])


def _six(fields: list[Tensor]) -> Tensor:
    low, high = torch.unflatten(fields[0], -3, (2, 1, 2, 8)), torch.unflatten(fields[1], -3, (2, 1, 8))
    low = torch.cat((low & 15, low >> 4), -5).flatten(-5, -4)  # [..., 2, 4 parts, 8 quads, 16, 4]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=high.device)[:, None, None, None]
    numbers = low | (((high >> shifts) & 3) << 4)
    whole = _columns(numbers.flatten(-5, -4)) - 32  # [..., 8 parts, 16, 32]
    scales = (
        torch.unflatten(fields[2].view(torch.int8)[..., 0].float(), -2, (8, 2)) * _halves(fields[3])[..., None, :, :]
    )
    each = torch.unflatten(whole, -1, (2, 16)) * scales.transpose(-2, -1)[..., None]
    return _by_part(each.flatten(-2))


def _by_part(parts: Tensor) -> Tensor:
    """``[..., 8, 16, 32]`` to ``[..., 16, 256]``."""
    return parts.transpose(-3, -2).flatten(-2)


_SCALE, _TWO_SCALES = (1, 2), ((1, 2), (1, 2))
_ALL = (
    Format("q4_0", 2, 32, (_SCALE, (4, 4))),
    Format("q4_1", 3, 32, (*_TWO_SCALES, (4, 4))),
    Format("q5_0", 6, 32, (_SCALE, (1, 4), (4, 4))),
    Format("q5_1", 7, 32, (*_TWO_SCALES, (1, 4), (4, 4))),
    Format("q8_0", 8, 32, (_SCALE, (8, 4))),
    Format("q4_k", 12, 256, (*_TWO_SCALES, (12, 1), (32, 4))),
    Format("q5_k", 13, 256, (*_TWO_SCALES, (12, 1), (8, 4), (32, 4))),
    Format("q6_k", 14, 256, ((32, 4), (16, 4), (16, 1), _SCALE)),
)
FORMATS = {each.name: each for each in _ALL}
"""The formats that products read as they are stored, by name."""
_WIDENED: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "q4_0": lambda fields: _simple(fields, minimum=False, five=False),
    "q4_1": lambda fields: _simple(fields, minimum=True, five=False),
    "q5_0": lambda fields: _simple(fields, minimum=False, five=True),
    "q5_1": lambda fields: _simple(fields, minimum=True, five=True),
    "q8_0": _bytes,
    "q4_k": lambda fields: _nested(fields, five=False),
    "q5_k": lambda fields: _nested(fields, five=True),
    "q6_k": _six,
}
