"""Pinned tokens of a batch: which entries of the cache and which new tokens they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snapstream.compression import end_of_pins, pinned_levels
from snapstream.compression.pins import PastEntries, pins_compete
from snapstream.config import CacheBudget
from snapstream.config.checks import is_integer
from snapstream.config.pins import Span, read_spans
from snapstream.errors import RequestError


def pins_of(pin: Sequence[Any]) -> list[tuple[Span, ...]]:
    """Read pins: one list of spans for all sequences, or a list of spans for each.

    Raises:
        ConfigurationError: They are invalid.
    """
    is_apart = isinstance(pin, Sequence) and any(
        isinstance(each, Sequence) and not isinstance(each, str) and not any(map(is_integer, each)) for each in pin
    )
    return [read_spans(spans) for spans in pin] if is_apart else [read_spans(pin)]


@dataclass(frozen=True)
class Row:
    """One sequence of a batch.

    Attributes:
        budget: Its budget, with its pins.
        length: Tokens of its prompt, entries of its cache included.
        known: Number of these entries.
        base: First of them that was in the ring.
        seen: Tokens of the sequence so far.
    """

    budget: CacheBudget
    length: int
    known: int
    base: int
    seen: int

    @property
    def before(self) -> int:
        """Tokens of earlier prompts and answers."""
        return self.seen - (self.length - self.known)

    def positions(self, entries: Tensor | None) -> Tensor:
        """True positions of its tokens, int64 ``[N or 1, length]``, given those of the entries, ``[N or 1, C]``."""
        new = torch.arange(self.before, self.seen)
        if entries is None:
            return new[None]
        known = entries[:, : self.known].cpu()
        return torch.cat((known, new.expand(len(known), -1)), 1)

    def end(self, levels: Tensor) -> int:
        """End of its pinned tokens, given the levels of all, ``[N or 1, length]``."""
        if not self.known:
            return end_of_pins(self.budget, self.seen)
        ring_has_pins = bool((levels[:, self.base : self.known] > 0).any())
        return end_of_pins(self.budget, self.seen, PastEntries(self.known, self.before, self.base, ring_has_pins))


@dataclass(frozen=True)
class BatchPins:
    """The pinned tokens of a batch of prompts that may continue from caches.

    Attributes:
        positions: True positions of all tokens, int64 ``[B, N or 1, L]``, on the CPU.
        levels: Their levels, int8, likewise.
        ends: Per sequence, where they end; see ``Layout.pinned_end``.
    """

    positions: Tensor
    levels: Tensor
    ends: list[int]

    @classmethod
    def of(cls, rows: Sequence[Row], entries: Tensor | None, total: int) -> BatchPins:
        """Find them.

        Args:
            rows: The sequences.
            entries: True positions of the entries of their caches, ``[B, N or 1, C]``; ``None`` if they are new.
            total: Padded length (``L``).
        """
        heads = 1 if entries is None else entries.shape[1]
        positions = torch.zeros(len(rows), heads, total, dtype=torch.int64)
        levels, ends = torch.zeros(positions.shape, dtype=torch.int8), []
        for number, row in enumerate(rows):
            positions[number, :, : row.length] = row.positions(None if entries is None else entries[number])
            own = pinned_levels(row.budget, row.seen)[positions[number, :, : row.length]]
            levels[number, :, : row.length] = own
            ends.append(row.end(own))
        return cls(positions, levels, ends)

    @property
    def compete(self) -> bool:
        """Whether there are more of them than fit."""
        return pins_compete(self.levels)

    def positions_of(self, chosen: Tensor) -> Tensor:
        """True positions of chosen tokens ``[B, N or 1, C]``."""
        heads = max(self.positions.shape[1], chosen.shape[1])
        chosen = chosen.cpu().expand(-1, heads, -1)
        return self.positions.expand(-1, heads, -1).gather(2, chosen)


def row_budgets(budgets: Sequence[CacheBudget], batch: int) -> list[CacheBudget]:
    """A budget for each sequence of a batch: ``generate`` repeats each sequence for its beams.

    Raises:
        RequestError: There are pins for another number of sequences.
    """
    if batch % len(budgets):
        raise RequestError(
            f"there are pins for {len(budgets)} sequences, but {batch} sequences were given; give pins for each of "
            "them, or for all together"
        )
    return [budgets[row * len(budgets) // batch] for row in range(batch)]
