"""One layer's keys and values, in whatever form they are stored. Nothing else writes, gathers or sizes them.

Layers with linear attention have a state instead: :mod:`snapstream.cache.state`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override


def plain_copy_rows(source: Tensor, positions: Tensor, target: Tensor) -> None:
    """Copy rows ``positions`` ``[N, E]`` of ``source`` ``[N, L, D]`` to ``target`` ``[N, E, D]``."""
    target.copy_(source.gather(1, positions[..., None].expand(-1, -1, source.shape[-1])))


copy_rows = torch.library.custom_op("snapstream::copy_rows", plain_copy_rows, mutates_args=("target",))
""":func:`plain_copy_rows` as a custom operator, so that devices can register their own kernels."""


@copy_rows.register_fake
def _copy_rows_shape(source: Tensor, positions: Tensor, target: Tensor) -> None:
    return None


@dataclass(frozen=True)
class EntryShape:
    """The shape of what one token stores in one layer.

    Attributes:
        heads: KV heads (``N``).
        size: Elements of a key (``D``), or of a whole latent.
        latent: Whether values are part of the keys, as in multi-head latent attention; then only keys are stored.
    """

    heads: int
    size: int
    latent: bool

    def shape(self, rows: int, entries: int) -> tuple[int, int, int, int]:
        """Shape of each tensor of a cache of ``entries`` entries for ``rows`` sequences."""
        return (rows, self.heads, entries, self.size)

    def tensors(self, rows: int, entries: int, dtype: torch.dtype) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the tensors of such a cache."""
        return [(self.shape(rows, entries), dtype)] * self.kind.stored

    def empty(self, rows: int, entries: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> LayerCache:
        """A cache of ``entries`` entries for ``rows`` sequences, all zero."""
        made = self.tensors(rows, entries, dtype)
        return self.kind([torch.zeros(shape, dtype=kind, device=device) for shape, kind in made])

    def within(self, memory: Tensor, rows: int, entries: int) -> LayerCache:
        """A cache of ``entries`` entries for ``rows`` sequences at the start of a flat tensor that has room for it."""
        kind, shape = self.kind, self.shape(rows, entries)
        parts = memory[: kind.stored * math.prod(shape)].view(kind.stored, *shape)
        return kind(list(parts))

    def of(self, tensors: Sequence[Tensor]) -> LayerCache:
        """A cache of one row from tensors ``[1, N, E, D]``.

        Raises:
            ValueError: The tensors have another shape.
        """
        kind = self.kind
        shapes = {(*tensor.shape[:2], tensor.shape[3]) for tensor in tensors}
        if len(tensors) != kind.stored or shapes != {(1, self.heads, self.size)}:
            raise ValueError(f"tensors of {[tuple(t.shape) for t in tensors]} are not entries of {self}")
        return kind(tensors)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of one entry."""
        return self.kind.stored * self.heads * self.size * dtype.itemsize

    def fixed_nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of a sequence besides its entries: none."""
        return 0

    @property
    def kind(self) -> type[GroupedCache] | type[LatentCache]:
        """The class of caches of such entries."""
        return LatentCache if self.latent else GroupedCache


class LayerCache(ABC):
    """Entries of ``B`` sequences in one layer.

    Attributes:
        stored: Number of tensors that a cache of this kind holds.
        tensors: The tensors, each ``[B, N, C, D]``.
    """

    stored: int

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        assert len(tensors) == self.stored
        self.tensors = tuple(tensors)

    @property
    def keys(self) -> Tensor:
        """The keys for attention, ``[B, N, C, D]``."""
        return self.tensors[0]

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """The values for attention, ``[B, N, C, D]``."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the entries."""
        return self.keys.dtype

    @property
    def rows(self) -> int:
        """Sequences (``B``)."""
        return self.keys.shape[0]

    @property
    def entries(self) -> int:
        """Entries per sequence (``C``)."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(self, entries: Tensor, key: Tensor, value: Tensor, active: Tensor | None = None) -> None:
        """Store tokens in every row. All shapes are fixed, so a static graph can contain it.

        Args:
            entries: Entries to write, int64 ``[B, T]``.
            key: ``[B, T, N, D]``, in the cache's dtype.
            value: ``[B, T, N, D]``, likewise; ignored if values are part of the keys.
            active: Rows to write, bool ``[B]``; the others stay unchanged. ``None`` writes all rows.
        """
        device = entries.device
        rows = torch.arange(self.rows, device=device)[:, None, None]
        heads = torch.arange(self.keys.shape[1], device=device)
        place = (rows, heads, entries[..., None])
        for mine, new in zip(self.tensors, (key, value), strict=False):
            stored = new if active is None else torch.where(active[:, None, None, None], new, mine[place])
            mine.index_put_(place, stored)

    def read(self, entries: Tensor) -> list[Tensor]:
        """Copy entries of every row, int64 ``[B, T]``: of each tensor, ``[B, T, N, D]``."""
        index = entries[:, None, :, None]
        shape = (-1, self.keys.shape[1], -1, self.keys.shape[3])
        return [tensor.gather(2, index.expand(shape)).transpose(1, 2) for tensor in self.tensors]

    def row(self, row: int, entries: int | None = None) -> LayerCache:
        """A view of the first ``entries`` entries of one sequence: a cache with ``B = 1``."""
        return type(self)([tensor[row : row + 1, :, :entries] for tensor in self.tensors])

    def first(self, entries: int) -> LayerCache:
        """A view of the first ``entries`` entries of every sequence."""
        return self.span(0, entries)

    def span(self, first: int, end: int) -> LayerCache:
        """A view of entries ``first .. end`` of every sequence."""
        return type(self)([tensor[:, :, first:end] for tensor in self.tensors])

    def gather(self, positions: Tensor, into: LayerCache) -> None:
        """Copy selected entries of this cache, which has one row, to the first entries of another one with one row.

        Args:
            positions: Entries to copy, int64 ``[N, E]``.
            into: The target, with ``E`` entries or more of the same dtype.
        """
        self._require_same_dtype(into)
        for mine, theirs in zip(self.tensors, into.tensors, strict=True):
            copy_rows(mine[0], positions, theirs[0, :, : positions.shape[1]])

    def gathered(self, positions: Tensor) -> LayerCache:
        """Copy entries, as :meth:`gather` does, to a new cache."""
        shape = (1, *positions.shape, self.keys.shape[3])
        into = type(self)([tensor.new_empty(shape) for tensor in self.tensors])
        self.gather(positions, into)
        return into

    def take(self, row: int, entries: Tensor) -> LayerCache:
        """Copy entries ``[E]`` of one sequence to a new cache."""
        return type(self)([tensor[row : row + 1].index_select(2, entries) for tensor in self.tensors])

    def joined(self, other: LayerCache) -> LayerCache:
        """A new cache with the entries of this one, then those of another."""
        return type(self)([torch.cat(pair, 2) for pair in zip(self.tensors, other.tensors, strict=True)])

    def copy_to(self, target: LayerCache, first: int, end: int) -> None:
        """Copy entries ``first .. end`` to a cache with as many."""
        target.put(self.span(first, end))

    def put(self, other: LayerCache, tokens: int = 0) -> None:
        """Copy all entries of a cache with one row to the first entries of this one, which has one row, too.

        Args:
            other: The other cache.
            tokens: Tokens of the sequence so far; only a state needs to know.
        """
        self._require_same_dtype(other)
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine[0, :, : other.entries].copy_(theirs[0])

    def converted(self, dtype: torch.dtype) -> LayerCache:
        """The same entries in another dtype; this cache itself if it has that dtype already.

        No other method converts entries.
        """
        return self if self.dtype == dtype else type(self)([tensor.to(dtype) for tensor in self.tensors])

    def _require_same_dtype(self, other: LayerCache) -> None:
        assert self.dtype == other.dtype, f"entries of {other.dtype} and {self.dtype}; see converted()"


class GroupedCache(LayerCache):
    """Separate keys and values; a group of query heads reads each KV head."""

    stored = 2

    @property
    @override
    def values(self) -> Tensor:
        return self.tensors[1]


class LatentCache(LayerCache):
    """Latents: values are the first elements of keys, so attention gets the keys twice and truncates its result."""

    stored = 1

    @property
    @override
    def values(self) -> Tensor:
        return self.keys
