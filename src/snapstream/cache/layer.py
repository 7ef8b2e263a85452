"""One layer's keys and values, whatever they are made of. Nothing else writes, gathers or counts them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def plain_copy_rows(source: Tensor, positions: Tensor, target: Tensor) -> None:
    """Copy rows ``positions`` ``[N, E]`` of ``source`` ``[N, L, D]`` to ``target`` ``[N, E, D]``."""
    target.copy_(source.gather(1, positions[..., None].expand(-1, -1, source.shape[-1])))


copy_rows = torch.library.custom_op("snapstream::copy_rows", plain_copy_rows, mutates_args=("target",))
""":func:`plain_copy_rows` as an operation, so that a device may have a kernel for it."""


@copy_rows.register_fake
def _copy_rows_shape(source: Tensor, positions: Tensor, target: Tensor) -> None:
    return None


@dataclass(frozen=True)
class EntryShape:
    """What one token leaves in one layer.

    Attributes:
        heads: KV heads (``N``).
        size: Numbers of a key (``D``); of a latent, all of it.
        latent: Values are part of the keys, as in multi-head latent attention; only keys are stored.
    """

    heads: int
    size: int
    latent: bool

    def shape(self, rows: int, entries: int) -> tuple[int, int, int, int]:
        """Shape of each tensor of a cache of ``entries`` entries for ``rows`` sequences."""
        return (rows, self.heads, entries, self.size)

    def empty(self, rows: int, entries: int, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> LayerCache:
        """A cache of ``entries`` entries for ``rows`` sequences, all zero."""
        kind, shape = self.kind, self.shape(rows, entries)
        return kind([torch.zeros(shape, dtype=dtype, device=device) for _ in range(kind.stored)])

    def of(self, tensors: Sequence[Tensor]) -> LayerCache:
        """A cache of one row made of tensors ``[1, N, E, D]``.

        Raises:
            ValueError: They have another shape.
        """
        kind = self.kind
        shapes = {(*tensor.shape[:2], tensor.shape[3]) for tensor in tensors}
        if len(tensors) != kind.stored or shapes != {(1, self.heads, self.size)}:
            raise ValueError(f"tensors of {[tuple(t.shape) for t in tensors]} are no entries of {self}")
        return kind(tensors)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of one entry."""
        return self.kind.stored * self.heads * self.size * dtype.itemsize

    @property
    def kind(self) -> type[GroupedCache] | type[LatentCache]:
        """Caches of such entries."""
        return LatentCache if self.latent else GroupedCache


class LayerCache(ABC):
    """Entries of ``B`` sequences in one layer.

    Attributes:
        stored: Tensors that a cache of this kind holds.
        tensors: These tensors, each ``[B, N, C, D]``.
    """

    stored: int

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        assert len(tensors) == self.stored
        self.tensors = tuple(tensors)

    @property
    def keys(self) -> Tensor:
        """What attention takes for keys, ``[B, N, C, D]``."""
        return self.tensors[0]

    @property
    @abstractmethod
    def values(self) -> Tensor:
        """What attention takes for values, ``[B, N, C, D]``."""

    @property
    def rows(self) -> int:
        """Sequences (``B``)."""
        return self.keys.shape[0]

    @property
    def entries(self) -> int:
        """Entries of each (``C``)."""
        return self.keys.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all entries."""
        return sum(tensor.nbytes for tensor in self.tensors)

    def write(self, entries: Tensor, key: Tensor, value: Tensor, active: Tensor | None = None) -> None:
        """Store tokens in every row; of fixed shape, so it may be part of a static graph.

        Args:
            entries: Where, int64 ``[B, T]``.
            key: ``[B, T, N, D]``.
            value: ``[B, T, N, D]``; not looked at where values are part of keys.
            active: Rows that are written, bool ``[B]``; the others stay as they are. ``None``: all.
        """
        device = entries.device
        rows = torch.arange(self.rows, device=device)[:, None, None]
        heads = torch.arange(self.keys.shape[1], device=device)
        place = (rows, heads, entries[..., None])
        for mine, new in zip(self.tensors, (key, value), strict=False):
            stored = new if active is None else torch.where(active[:, None, None, None], new, mine[place])
            mine.index_put_(place, stored)

    def row(self, row: int, entries: int | None = None) -> LayerCache:
        """The first ``entries`` entries of one sequence, in the same memory: a cache with ``B = 1``."""
        return type(self)([tensor[row : row + 1, :, :entries] for tensor in self.tensors])

    def gather(self, positions: Tensor, into: LayerCache) -> None:
        """Copy some entries of a cache with one row to the first entries of another with one row.

        Args:
            positions: Of these entries, int64 ``[N, E]``.
            into: Has ``E`` entries or more.
        """
        for mine, theirs in zip(self.tensors, into.tensors, strict=True):
            copy_rows(mine[0], positions, theirs[0, :, : positions.shape[1]])

    def take(self, row: int, entries: Tensor) -> LayerCache:
        """Copy entries ``[E]`` of one sequence out, to a cache of their own."""
        return type(self)([tensor[row : row + 1].index_select(2, entries) for tensor in self.tensors])

    def to_host(self, entries: int) -> LayerCache:
        """Copy the first entries of a cache with one row to the host's memory.

        Head by head: what one head has is in one piece, so nothing is gathered on the device first.
        """
        copied = []
        for tensor in self.tensors:
            _, heads, _, size = tensor.shape
            copied.append(torch.empty(1, heads, entries, size, dtype=tensor.dtype))
            for head in range(heads):
                copied[-1][0, head].copy_(tensor[0, head, :entries])
        return type(self)(copied)

    def put_from_host(self, other: LayerCache, entries: int) -> None:
        """Copy the first entries of a cache of :meth:`to_host` to those of this one, which has one row, too."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            for head in range(mine.shape[1]):
                mine[0, head, :entries].copy_(theirs[0, head, :entries])

    def put(self, other: LayerCache) -> None:
        """Copy all entries of a cache with one row to the first entries of this one, which has one row, too."""
        for mine, theirs in zip(self.tensors, other.tensors, strict=True):
            mine[0, :, : other.entries].copy_(theirs[0])


class GroupedCache(LayerCache):
    """Keys and values apart; each KV head is read by a group of query heads."""

    stored = 2

    @property
    def values(self) -> Tensor:
        """See :attr:`LayerCache.values`."""
        return self.tensors[1]


class LatentCache(LayerCache):
    """Latents: values are the first numbers of keys, so attention is given the keys twice and cuts its result."""

    stored = 1

    @property
    def values(self) -> Tensor:
        """See :attr:`LayerCache.values`."""
        return self.keys
