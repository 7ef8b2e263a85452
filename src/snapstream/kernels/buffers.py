"""What operations work on: buffers, the state of the slots, and their caches.

A buffer has a row for each token of each slot: row ``slot * T + t``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapstream.cache import LayerCache
from snapstream.compression import next_entry


@dataclass(frozen=True)
class BufferView:
    """A range of elements in every row of a buffer.

    Attributes:
        buffer: Name of the buffer.
        size: Elements per head.
        heads: Heads per row.
        offset: Offset of the first head in a row.
        stride: Elements from one head to the next; 0 if heads are contiguous.
        dtype: Dtype of the buffer; ``None`` for that of activations.
        copies: Rows of the buffer per token.
    """

    buffer: str
    size: int
    heads: int = 1
    offset: int = 0
    stride: int = 0
    dtype: torch.dtype | None = None
    copies: int = 1

    @property
    def step(self) -> int:
        """Elements from one head to the next."""
        return self.stride or self.size

    @property
    def end(self) -> int:
        """Elements that a row must have."""
        return self.offset + (self.heads - 1) * self.step + self.size

    def of(self, buffers: dict[str, Tensor]) -> Tensor:
        """The view, ``[rows, heads, size]``, in its buffer."""
        buffer = buffers[self.buffer]
        shape = (len(buffer), self.heads, self.size)
        return buffer.as_strided(shape, (buffer.stride(0), self.step, 1), buffer.storage_offset() + self.offset)


@dataclass(frozen=True)
class Slots:
    """State of the slots. All operations read it; those that take tokens also write it.

    With several tokens per slot, the first is certain, and the others are guesses of what comes next.

    Attributes:
        token: Tokens to process, int64 ``[B, T]``.
        position: True position of the first of them, int64 ``[B]``.
        base: Per group of layers, first entry of the ring, int64 ``[groups, B]``; see
            :mod:`snapstream.compression.layout`.
        count: Tokens ever stored, int64 ``[groups, B]``.
        limit: End of the ring, int64 ``[groups, B]``.
        active: Slots to process, bool ``[B]``; the others stay unchanged.
        forced: Tokens that must be taken next, -1 for none, int64 ``[B, steps]``.
        taken: Tokens that were taken, int64 ``[steps, B]``.
        drafted: Number of guesses of each slot, int64 ``[B]``; ``None``: as many as there is room for.
        accepted: How many of the tokens taken are certain, int64 ``[B]``; ``None`` without verification.
    """

    token: Tensor
    position: Tensor
    base: Tensor
    count: Tensor
    limit: Tensor
    active: Tensor
    forced: Tensor
    taken: Tensor
    drafted: Tensor | None = None
    accepted: Tensor | None = None

    @classmethod
    def that_see(cls, valid: Tensor, entries: int) -> Slots:
        """Slots for attention alone: only the number of entries that they attend to matters.

        Args:
            valid: Entries that each slot's token attends to, int64 ``[B]``; a slot with 0 is inactive.
            entries: Entries of the caches (``C``).
        """
        nothing = torch.zeros_like(valid)
        return cls(
            token=nothing[:, None],
            position=nothing,
            base=nothing[None],
            count=(valid - 1)[None],
            limit=torch.full_like(valid, entries)[None],
            active=valid > 0,
            forced=nothing[:, None],
            taken=nothing[None],
        )

    @classmethod
    def of_prompt(cls, token: Tensor, entries: int, groups: int = 1) -> Slots:
        """A prompt as one slot that never wraps around: entry ``i`` of its cache is token ``i``.

        Args:
            token: Tokens of its first chunk, int64 ``[1, T]``.
            entries: Entries of the cache (``L``).
            groups: Groups of layers.
        """

        def column(value: int, rows: int = 1) -> Tensor:
            return torch.full((rows, 1), value, dtype=torch.int64, device=token.device)

        return cls(
            token=token,
            position=column(0)[0],
            base=column(0, groups),
            count=column(0, groups),
            limit=column(entries, groups),
            active=torch.ones(1, dtype=torch.bool, device=token.device),
            forced=column(-1),
            taken=column(0),
        )

    @classmethod
    def that_settle(cls, position: Tensor, accepted: Tensor, tokens: int) -> Slots:
        """Slots that feed recorded inputs to states, see :class:`~snapstream.kernels.recurrence.Recur`.

        Args:
            position: True position of the first input of each slot, int64 ``[B]``.
            accepted: How many inputs there are, int64 ``[B]``.
            tokens: At most so many.
        """
        nothing = torch.zeros_like(position)
        return cls(
            token=nothing[:, None].repeat(1, tokens),
            position=position,
            base=nothing[None],
            count=nothing[None],
            limit=nothing[None],
            active=torch.ones_like(position, dtype=torch.bool),
            forced=nothing[:, None],
            taken=nothing[None],
            accepted=accepted,
        )

    @property
    def tokens(self) -> int:
        """Tokens per slot (``T``)."""
        return self.token.shape[1]

    @property
    def room(self) -> int:
        """Tokens per slot that there is room for; steps of fewer use the first columns."""
        return max(self.tokens, self.token.stride(0))

    def used(self) -> Tensor:
        """Which tokens are in use, bool ``[B, T]``."""
        places = torch.arange(self.tokens, device=self.active.device)
        there = self.active[:, None].expand_as(self.token)
        return there if self.drafted is None else there & (places <= self.drafted[:, None])

    def positions(self) -> Tensor:
        """True positions of all rows, int64 ``[B * T]``."""
        return self._of_rows(self.position)

    def entries(self, group: int = 0) -> Tensor:
        """Entries that the tokens are written to in layers of a group, int64 ``[B, T]``."""
        ring = self._expanded(self.base[group], self.limit[group])
        return next_entry(self._of_rows(self.count[group]), *ring).view_as(self.token)

    def valid(self, group: int = 0) -> Tensor:
        """Number of entries that each token attends to in layers of a group, its own included, int64 ``[B, T]``.

        It is 0 for unused tokens.
        """
        seen = torch.minimum(self._of_rows(self.count[group]) + 1, *self._expanded(self.limit[group]))
        return torch.where(self.used(), seen.view_as(self.token), 0)

    def _of_rows(self, first: Tensor) -> Tensor:
        return (first[:, None] + torch.arange(self.tokens, device=first.device)).flatten()

    def _expanded(self, *columns: Tensor) -> list[Tensor]:
        return [column.repeat_interleave(self.tokens) for column in columns]


@dataclass
class StepBuffers:
    """What the operations work on.

    Attributes:
        buffers: Buffers by name, each ``[rows, width]``.
        slots: State of the slots.
        caches: One per layer.
        pending: If ``T > 1``, one per layer: entries ``[B, N, T, D]`` of tokens that are not certain yet; of a layer
            with a state, its cache, which has room for their inputs.
        dtype: Dtype of activations.
        groups: The group of each layer; empty if all are in the first one.
        step: Index of the current step in the launch.
    """

    buffers: dict[str, Tensor]
    slots: Slots
    caches: Sequence[LayerCache]
    pending: Sequence[LayerCache]
    dtype: torch.dtype
    groups: Sequence[int] = ()
    step: int = 0

    def group_of(self, layer: int) -> int:
        """The group of a layer, which says where in its cache tokens go."""
        return self.groups[layer] if self.groups else 0


@dataclass
class PromptChunk(StepBuffers):
    """A chunk of one prompt: one slot, whose tokens are all certain, so they are stored in the cache at once.

    Attributes:
        packed: Of each group of layers, the attention backend's copy of values, if it keeps one.
        packed_until: Entries that earlier chunks have packed, int64 scalar.
        ends: Of each group of layers, the end of the entries in use, those of the chunk included; empty: of its cache.
    """

    packed: Sequence[Tensor] = ()
    packed_until: Tensor | None = None
    ends: Sequence[int] = ()


@dataclass(frozen=True)
class BufferShape:
    """Shape of a buffer, per token.

    Attributes:
        width: Elements of a row.
        copies: Rows per token.
        dtype: Dtype of the elements.
    """

    width: int
    copies: int
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes per token."""
        return self.width * self.copies * self.dtype.itemsize


def buffer_shapes(parts: Iterable[BufferView], dtype: torch.dtype) -> dict[str, BufferShape]:
    """Shapes of buffers that are wide enough for all parts, by name; ``dtype`` is that of activations."""
    kinds: dict[str, BufferView] = {}
    widths: dict[str, int] = {}
    for part in parts:
        first = kinds.setdefault(part.buffer, part)
        assert (part.dtype, part.copies) == (first.dtype, first.copies), part
        widths[part.buffer] = max(part.end, widths.get(part.buffer, 0))

    def wide(kind: torch.dtype) -> torch.dtype:
        return torch.promote_types(kind, dtype) if kind.is_floating_point else kind

    return {name: BufferShape(widths[name], kind.copies, wide(kind.dtype or dtype)) for name, kind in kinds.items()}


def allocate_buffers(
    parts: Iterable[BufferView],
    rows: int,
    dtype: torch.dtype,
    given: dict[str, Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Allocate zeroed buffers that are wide enough for all parts; those in ``given`` are used as they are."""
    made = {
        name: torch.zeros(rows * shape.copies, shape.width, dtype=shape.dtype, device=device)
        for name, shape in buffer_shapes(parts, dtype).items()
    }
    return made | (given or {})
