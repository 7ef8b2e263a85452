"""What the operations of a decode step work on: buffers, the state of the slots, and their caches.

A buffer has a row for each token of each slot: row ``slot * T + t``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapstream.cache import LayerCache
from snapstream.compression import next_slot


@dataclass(frozen=True)
class Part:
    """Numbers of every row of a buffer.

    Attributes:
        buffer: Its name.
        size: Numbers of a head.
        heads: Heads of a row.
        offset: Where the first head begins in a row.
        stride: Numbers from one head to the next; 0: they lie side by side.
        dtype: Of the buffer; ``None``: that of the model.
        copies: Rows of the buffer for each token.
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
        """Numbers from one head to the next."""
        return self.stride or self.size

    @property
    def end(self) -> int:
        """Numbers that a row must have."""
        return self.offset + (self.heads - 1) * self.step + self.size

    def of(self, buffers: dict[str, Tensor]) -> Tensor:
        """The part itself, ``[rows, heads, size]``, in the buffer's memory."""
        buffer = buffers[self.buffer]
        shape = (len(buffer), self.heads, self.size)
        return buffer.as_strided(shape, (buffer.stride(0), self.step, 1), buffer.storage_offset() + self.offset)


@dataclass(frozen=True)
class Slots:
    """State of the slots, which operations read, and those that take tokens write.

    With several tokens per slot the first is certain, and those after it are guesses of what comes next.

    Attributes:
        token: Tokens to read, int64 ``[B, T]``.
        position: True position of the first of them, int64 ``[B]``.
        base: See :mod:`snapstream.compression.layout`; int64 ``[B]``.
        count: The same.
        limit: The same.
        active: Slots that take part, bool ``[B]``; the others are left alone.
        forced: Tokens that must be taken next, -1 for none, int64 ``[B, steps]``.
        taken: Tokens that were taken, int64 ``[steps, B]``.
        drafted: How many guesses each slot has, int64 ``[B]``; ``None``: as many as there is room for.
        accepted: How many of the tokens taken are certain, int64 ``[B]``; ``None`` where nothing is verified.
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
        """Slots of which only what they see matters, for attention alone.

        Args:
            valid: Entries that each one's token sees, int64 ``[B]``; one that sees none takes no part.
            entries: Of their caches.
        """
        nothing = torch.zeros_like(valid)
        return cls(
            token=nothing[:, None],
            position=nothing,
            base=nothing,
            count=valid - 1,
            limit=torch.full_like(valid, entries),
            active=valid > 0,
            forced=nothing[:, None],
            taken=nothing[None],
        )

    @property
    def tokens(self) -> int:
        """Tokens of a slot (``T``)."""
        return self.token.shape[1]

    def used(self) -> Tensor:
        """Which tokens there are, bool ``[B, T]``."""
        places = torch.arange(self.tokens, device=self.active.device)
        there = self.active[:, None].expand_as(self.token)
        return there if self.drafted is None else there & (places <= self.drafted[:, None])

    def positions(self) -> Tensor:
        """True positions of all rows, int64 ``[B * T]``."""
        return self._of_rows(self.position)

    def entries(self) -> Tensor:
        """Entries that the tokens go to, int64 ``[B, T]``."""
        return next_slot(self._of_rows(self.count), *self._expanded(self.base, self.limit)).view_as(self.token)

    def valid(self) -> Tensor:
        """Entries that each token sees, its own included, int64 ``[B, T]``; 0 where there is no token."""
        seen = torch.minimum(self._of_rows(self.count) + 1, *self._expanded(self.limit)).view_as(self.token)
        return torch.where(self.used(), seen, 0)

    def _of_rows(self, first: Tensor) -> Tensor:
        return (first[:, None] + torch.arange(self.tokens, device=first.device)).flatten()

    def _expanded(self, *columns: Tensor) -> list[Tensor]:
        return [column.repeat_interleave(self.tokens) for column in columns]


@dataclass
class Machine:
    """What the operations work on.

    Attributes:
        buffers: By name; each ``[rows, width]``.
        slots: State of the slots.
        caches: One per layer.
        pending: Where ``T > 1``: entries ``[B, N, T, D]`` of the tokens, which are not certain yet.
        step: Of the launch.
    """

    buffers: dict[str, Tensor]
    slots: Slots
    caches: Sequence[LayerCache]
    pending: Sequence[LayerCache]
    step: int = 0


def allocate_buffers(
    parts: Iterable[Part],
    rows: int,
    dtype: torch.dtype,
    given: dict[str, Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> dict[str, Tensor]:
    """Buffers that are wide enough for all parts, zero; those that are given stay."""
    widths: dict[str, int] = {}
    kinds: dict[str, Part] = {}
    for part in parts:
        widths[part.buffer] = max(widths.get(part.buffer, 0), part.end)
        first = kinds.setdefault(part.buffer, part)
        assert (part.dtype, part.copies) == (first.dtype, first.copies), part
    made = {}
    for name, width in widths.items():
        kind = kinds[name].dtype or dtype
        wide = torch.promote_types(kind, dtype) if kind.is_floating_point else kind
        made[name] = torch.zeros(rows * kinds[name].copies, width, dtype=wide, device=device)
    return made | (given or {})
