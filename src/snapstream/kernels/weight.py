"""Weights as they are stored, in a format of their own, whatever the type of the rows that they multiply."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from snapstream.kernels.formats import LANES, Format


class Weight:
    """One matrix ``[out, in]``, or several of equal shape, ``[n, out, in]``."""

    @property
    def shape(self) -> torch.Size:
        """That shape."""
        raise NotImplementedError

    @property
    def dtype(self) -> torch.dtype:
        """The narrowest dtype that holds its numbers exactly."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return sum(part.stored.nbytes for part in self.parts)

    @property
    def parts(self) -> tuple[DenseWeight | BlockWeight, ...]:
        """The weights that its rows consist of, one after another, each in one format."""
        raise NotImplementedError

    @property
    def has_blocks(self) -> bool:
        """Whether any of its rows are in blocks."""
        return any(isinstance(part, BlockWeight) for part in self.parts)

    def runs(self) -> Iterator[tuple[DenseWeight | BlockWeight, slice]]:
        """Its parts, each with its rows in the whole."""
        start = 0
        for part in self.parts:
            yield part, slice(start, start + part.shape[-2])
            start += part.shape[-2]

    def dense(self, dtype: torch.dtype) -> Tensor:
        """All numbers; a view if they are stored in this dtype."""
        raise NotImplementedError

    def rows(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows of a matrix, ``[T, in]``; ``numbers`` is int64 ``[T]``."""
        raise NotImplementedError

    def matrix(self, number: int) -> Weight:
        """One of several matrices."""
        raise NotImplementedError

    def cut(self, rows: slice) -> Weight:
        """A view of some rows of a matrix, all in one format; in blocks, the first is a multiple of 16."""
        raise NotImplementedError

    def multiply(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``x @ weight.T + bias`` by torch, in the wider of both types.

        Args:
            x: ``[T, in]``.
            bias: ``[out]`` or ``None``.

        Returns:
            ``[T, out]``, in the dtype of ``x``.
        """
        wide = torch.promote_types(x.dtype, self.dtype)
        added = None if bias is None else bias.to(wide)
        return F.linear(x.to(wide), self.dense(wide), added).to(x.dtype)


@dataclass(frozen=True, eq=False)
class DenseWeight(Weight):
    """A tensor of numbers.

    Attributes:
        stored: ``[out, in]``, or ``[n, out, in]``. Rows are contiguous, and follow each other.
    """

    stored: Tensor

    @property
    @override
    def shape(self) -> torch.Size:
        return self.stored.shape

    @property
    @override
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    @property
    @override
    def parts(self) -> tuple[DenseWeight, ...]:
        return (self,)

    @override
    def dense(self, dtype: torch.dtype) -> Tensor:
        return self.stored.to(dtype)

    @override
    def rows(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        return self.stored[numbers].to(dtype)

    @override
    def matrix(self, number: int) -> DenseWeight:
        return DenseWeight(self.stored[number])

    @override
    def cut(self, rows: slice) -> DenseWeight:
        return DenseWeight(self.stored[rows])


@dataclass(frozen=True, eq=False)
class BlockWeight(Weight):
    """Numbers of 4 to 8 bits in blocks; see :mod:`snapstream.kernels.formats`.

    Attributes:
        stored: Tiles, uint8 ``[ceil(out / 16), in / columns, bytes]``, or ``[n, ...]``.
        kind: The format.
        out: Rows of a matrix.
    """

    stored: Tensor
    kind: Format
    out: int

    def __post_init__(self) -> None:
        assert self.stored.shape[-3] == -(-self.out // LANES), (self.stored.shape, self.out)

    @property
    @override
    def shape(self) -> torch.Size:
        *several, _, blocks, _ = self.stored.shape
        return torch.Size((*several, self.out, blocks * self.kind.columns))

    @property
    @override
    def dtype(self) -> torch.dtype:
        return torch.float32

    @property
    @override
    def parts(self) -> tuple[BlockWeight, ...]:
        return (self,)

    @override
    def dense(self, dtype: torch.dtype) -> Tensor:
        tiles = self.kind.widen(self.stored)  # [..., tiles, blocks, 16, columns]
        return tiles.transpose(-3, -2).flatten(-2).flatten(-3, -2)[..., : self.out, :].to(dtype)

    @override
    def rows(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        tiles = self.kind.widen(self.stored[numbers // LANES])  # [T, blocks, 16, columns]
        return tiles[torch.arange(len(numbers), device=numbers.device), :, numbers % LANES].flatten(1).to(dtype)

    @override
    def matrix(self, number: int) -> BlockWeight:
        return BlockWeight(self.stored[number], self.kind, self.out)

    @override
    def cut(self, rows: slice) -> BlockWeight:
        first, end, _ = rows.indices(self.out)
        assert first % LANES == 0, rows
        return BlockWeight(self.stored[first // LANES : -(-end // LANES)], self.kind, end - first)


@dataclass(frozen=True, eq=False)
class JoinedWeight(Weight):
    """Rows in several formats, one after another; all but the last have a multiple of 16 rows."""

    joined: tuple[DenseWeight | BlockWeight, ...]

    @property
    @override
    def shape(self) -> torch.Size:
        *several, _, columns = self.joined[0].shape
        return torch.Size((*several, sum(part.shape[-2] for part in self.joined), columns))

    @property
    @override
    def dtype(self) -> torch.dtype:
        return functools.reduce(torch.promote_types, (part.dtype for part in self.joined))

    @property
    @override
    def parts(self) -> tuple[DenseWeight | BlockWeight, ...]:
        return self.joined

    @override
    def dense(self, dtype: torch.dtype) -> Tensor:
        return torch.cat([part.dense(dtype) for part in self.joined], -2)

    @override
    def rows(self, numbers: Tensor, dtype: torch.dtype) -> Tensor:
        return self.dense(dtype)[numbers]

    @override
    def matrix(self, number: int) -> JoinedWeight:
        return JoinedWeight(tuple(part.matrix(number) for part in self.joined))


def joined(parts: Iterable[DenseWeight | BlockWeight]) -> Weight:
    """The weight whose rows are those of other weights, one after another."""
    first, *others = parts
    return JoinedWeight((first, *others)) if others else first
