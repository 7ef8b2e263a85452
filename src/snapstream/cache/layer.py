"""One layer's keys and values, in whatever form they are stored. Nothing else writes, gathers or sizes them.

Entries are numbers here, and codes in :mod:`snapstream.cache.quantized`. Layers with linear attention have a state
instead: :mod:`snapstream.cache.state`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from snapstream.cache.codes import EntryType, QuantizedType, type_name
from snapstream.operators import Operator


def plain_copy_rows(source: Tensor, positions: Tensor, target: Tensor) -> None:
    """Copy rows ``positions`` ``[N, E]`` of ``source`` ``[N, L, D]`` to ``target`` ``[N, E, D]``."""
    target.copy_(source.gather(1, positions[..., None].expand(-1, -1, source.shape[-1])))


def _copy_rows_shape(source: Tensor, positions: Tensor, target: Tensor) -> None:
    return None


copy_rows = Operator("copy_rows", plain_copy_rows, _copy_rows_shape, changes=("target",))
""":func:`plain_copy_rows`, for which devices have kernels."""


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

    def tensors(self, rows: int, entries: int, entry_type: EntryType) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of the tensors of such a cache."""
        if isinstance(entry_type, QuantizedType):
            codes = [entry_type.keys, entry_type.values][: self.kind.stored]
            stored = [((rows, self.heads, entries, each.nbytes(self.size)), torch.uint8) for each in codes]
            return [*stored, ((rows, self.heads, 2, self.size), torch.float32)]
        return [(self.shape(rows, entries), entry_type)] * self.kind.stored

    def made_of(self, tensors: Sequence[Tensor], entry_type: EntryType) -> LayerCache:
        """A cache of tensors that :meth:`tensors` describes."""
        if isinstance(entry_type, QuantizedType):
            from snapstream.cache.quantized import QuantizedCache

            return QuantizedCache(tensors, self, entry_type)
        return self.kind(tensors)

    def empty(
        self, rows: int, entries: int, *, entry_type: EntryType, device: torch.device | str = "cpu"
    ) -> LayerCache:
        """A cache of ``entries`` entries for ``rows`` sequences, all zero."""
        shapes = self.tensors(rows, entries, entry_type)
        return self.made_of([torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes], entry_type)

    def within(self, memory: Tensor, rows: int, entries: int) -> LayerCache:
        """A cache of ``entries`` entries for ``rows`` sequences at the start of a flat tensor that has room for it."""
        kind, shape = self.kind, self.shape(rows, entries)
        parts = memory[: kind.stored * math.prod(shape)].view(kind.stored, *shape)
        return kind(list(parts))

    def of(self, tensors: Sequence[Tensor], entry_type: EntryType) -> LayerCache:
        """A cache of one row from its tensors.

        Raises:
            ValueError: The tensors have another shape or dtype.
        """
        entries = tensors[0].shape[2] if tensors[0].dim() == 4 else 0
        if [(tuple(tensor.shape), tensor.dtype) for tensor in tensors] != self.tensors(1, entries, entry_type):
            given = [f"{type_name(tensor.dtype)} {list(tensor.shape)}" for tensor in tensors]
            raise ValueError(f"{', '.join(given)} are not entries of {self} as {type_name(entry_type)}")
        return self.made_of(tensors, entry_type)

    def nbytes(self, entry_type: EntryType) -> int:
        """Bytes of one entry."""
        shapes = self.tensors(1, 1, entry_type)[: self.kind.stored]
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)

    def fixed_nbytes(self, entry_type: EntryType) -> int:
        """Bytes of a sequence besides its entries."""
        shapes = self.tensors(1, 1, entry_type)[self.kind.stored :]
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in shapes)

    @property
    def kind(self) -> type[GroupedCache] | type[LatentCache]:
        """The class of caches of such entries."""
        return LatentCache if self.latent else GroupedCache


class LayerCache(ABC):
    """Entries of ``B`` sequences in one layer.

    Attributes:
        stored: Number of tensors that have a row for each entry.
        tensors: These tensors, each ``[B, N, C, D]``, then what a sequence has besides its entries, ``[B, ...]``.
    """

    stored: int

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tuple(tensors)

    @property
    def keys(self) -> Tensor:
        """The keys as they are stored, ``[B, N, C, D]``; with codes, ``D`` is the number of their bytes."""
        return self.tensors[0]

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """The values as they are stored, ``[B, N, C, D]``."""

    @property
    def entry_type(self) -> EntryType:
        """The type of the entries."""
        return self.keys.dtype

    @property
    def size(self) -> int:
        """Elements of a key (``D``)."""
        return self.keys.shape[3]

    @property
    def heads(self) -> int:
        """KV heads (``N``)."""
        return self.keys.shape[1]

    @property
    def device(self) -> torch.device:
        """Device of the entries."""
        return self.keys.device

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
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(self, entries: Tensor, key: Tensor, value: Tensor, active: Tensor | None = None) -> None:
        """Store tokens in every row. All shapes are fixed, so a static graph can contain it.

        Args:
            entries: Entries to write, int64 ``[B, T]``.
            key: ``[B, T, N, D]``; with numbers, in the cache's dtype.
            value: ``[B, T, N, D]``, likewise; ignored if values are part of the keys.
            active: Rows to write, bool ``[B]``; the others stay unchanged. ``None`` writes all rows.
        """
        self.write_stored(entries, [key, value], active)

    def write_stored(self, entries: Tensor, stored: Sequence[Tensor], active: Tensor | None = None) -> None:
        """Write what :meth:`read` returned; arguments as for :meth:`write`."""
        rows = torch.arange(self.rows, device=entries.device)[:, None, None]
        heads = torch.arange(self.heads, device=entries.device)
        place = (rows, heads, entries[..., None])
        for mine, new in zip(self.tensors[: self.stored], stored, strict=False):
            written = new if active is None else torch.where(active[:, None, None, None], new, mine[place])
            mine.index_put_(place, written)

    def read(self, entries: Tensor) -> list[Tensor]:
        """Copy entries of every row, int64 ``[B, T]``, as they are stored: of each tensor, ``[B, T, N, D]``."""
        index = entries[:, None, :, None]
        return [
            tensor.gather(2, index.expand(-1, self.heads, -1, tensor.shape[3])).transpose(1, 2)
            for tensor in self.tensors[: self.stored]
        ]

    def pending(self, tokens: int) -> LayerCache:
        """An empty cache of so many entries for the same sequences, whose entries can be written to this one."""
        shapes = [(*tensor.shape[:2], tokens, tensor.shape[3]) for tensor in self.tensors[: self.stored]]
        made = [tensor.new_zeros(shape) for tensor, shape in zip(self.tensors, shapes, strict=False)]
        return self._with([*made, *self.tensors[self.stored :]])

    def row(self, row: int, entries: int | None = None) -> LayerCache:
        """A view of the first ``entries`` entries of one sequence: a cache with ``B = 1``."""
        only = self._with([tensor[row : row + 1] for tensor in self.tensors])
        return only if entries is None else only.first(entries)

    def first(self, entries: int) -> LayerCache:
        """A view of the first ``entries`` entries of every sequence."""
        return self.span(0, entries)

    def span(self, first: int, end: int) -> LayerCache:
        """A view of entries ``first .. end`` of every sequence."""
        return self._of_entries(lambda tensor: tensor[:, :, first:end])

    def gather(self, positions: Tensor, into: LayerCache) -> None:
        """Copy selected entries of this cache, which has one row, to the first entries of another one with one row.

        Args:
            positions: Entries to copy, int64 ``[N, E]``.
            into: The target, with ``E`` entries or more of the same type.
        """
        self._require_same_type(into)
        for mine, theirs in zip(self.tensors[: self.stored], into.tensors, strict=False):
            copy_rows(mine[0], positions, theirs[0, :, : positions.shape[1]])
        self._copy_rest_to(into)

    def gathered(self, positions: Tensor) -> LayerCache:
        """Copy entries, as :meth:`gather` does, to a new cache."""
        into = self._of_entries(lambda tensor: tensor.new_empty(1, *positions.shape, tensor.shape[3]))
        self.gather(positions, into)
        return into

    def take(self, row: int, entries: Tensor) -> LayerCache:
        """Copy entries ``[E]`` of one sequence to a new cache."""
        one = self.row(row)
        taken = [tensor.index_select(2, entries) for tensor in one.tensors[: self.stored]]
        return self._with([*taken, *(tensor.clone() for tensor in one.tensors[self.stored :])])

    def joined(self, other: LayerCache) -> LayerCache:
        """A new cache with the entries of this one, then those of another."""
        parts = iter(other.tensors)
        return self._of_entries(lambda tensor: torch.cat((tensor, next(parts)), 2))

    def copy_to(self, target: LayerCache, first: int, end: int) -> None:
        """Copy entries ``first .. end`` to a cache with as many."""
        target.put(self.span(first, end))

    def put(self, other: LayerCache, tokens: int = 0) -> None:
        """Copy all entries of a cache with one row to the first entries of this one, which has one row, too.

        Args:
            other: The other cache.
            tokens: Tokens of the sequence so far; only a state needs to know.
        """
        self._require_same_type(other)
        for mine, theirs in zip(self.tensors[: self.stored], other.tensors, strict=False):
            mine[0, :, : other.entries].copy_(theirs[0])
        other._copy_rest_to(self)

    def converted(self, entry_type: EntryType, like: LayerCache | None = None) -> LayerCache:
        """The same entries in another type; this cache itself if it has that type already.

        No other method converts entries.

        Args:
            entry_type: The type.
            like: If they become codes, a cache of one row whose frame they get; ``None`` for a frame of their own.
        """
        if self.entry_type == entry_type:
            return self
        if isinstance(entry_type, QuantizedType):
            from snapstream.cache.quantized import quantized

            return quantized(self, entry_type, like)
        return self._with([tensor.to(entry_type) for tensor in self.tensors])

    def clone(self) -> LayerCache:
        """A copy."""
        return self._with([tensor.clone() for tensor in self.tensors])

    def to(self, device: torch.device | str) -> LayerCache:
        """The same cache on another device."""
        return self._with([tensor.to(device) for tensor in self.tensors])

    def _with(self, tensors: Sequence[Tensor]) -> LayerCache:
        """A cache of this kind."""
        return type(self)(tensors)

    def _of_entries(self, change: Callable[[Tensor], Tensor]) -> LayerCache:
        """A cache whose tensors of entries are changed."""
        return self._with([*map(change, self.tensors[: self.stored]), *self.tensors[self.stored :]])

    def _copy_rest_to(self, into: LayerCache) -> None:
        """Copy what the only sequence has besides its entries to another cache."""
        for mine, theirs in zip(self.tensors[self.stored :], into.tensors[self.stored :], strict=True):
            theirs.copy_(mine)

    def _require_same_type(self, other: LayerCache) -> None:
        assert self.entry_type == other.entry_type, (
            f"entries of {other.entry_type} and {self.entry_type}; see converted()"
        )


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
