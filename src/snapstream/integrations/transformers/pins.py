"""Pinned tokens of a batch: which entries of the cache and which new tokens they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snapstream.compression import pinned_levels
from snapstream.config import CacheBudget
from snapstream.config.checks import is_integer
from snapstream.config.pins import Span, last_end, read_spans
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
        seen: Tokens of the sequence so far.
    """

    budget: CacheBudget
    length: int
    known: int
    seen: int

    @property
    def pinned_end(self) -> int:
        """End of the tokens among which pinned ones are; those of earlier prompts may be any of the entries."""
        end, before = last_end(self.budget.pin, self.seen), self.seen - (self.length - self.known)
        return self.known + max(end - before, 0) if self.known and end else end

    def levels(self) -> Tensor:
        """Levels of its new tokens, int8; see :func:`~snapstream.compression.pins.pinned_levels`."""
        return pinned_levels(self.budget, self.seen)[self.seen - (self.length - self.known) :]


def rows_of(
    budgets: Sequence[CacheBudget], lengths: Sequence[int], known: Sequence[int], seen: Sequence[int]
) -> list[Row]:
    """The sequences of a batch.

    Args:
        budgets: One for all sequences, or one for each. ``generate`` repeats each sequence for its beams.
        lengths: See :class:`Row`.
        known: See :class:`Row`.
        seen: See :class:`Row`.

    Raises:
        RequestError: There are pins for another number of sequences.
    """
    batch = len(lengths)
    if batch % len(budgets):
        raise RequestError(
            f"there are pins for {len(budgets)} sequences, but {batch} sequences were given; give pins for each of "
            "them, or for all together"
        )
    every = [budgets[row * len(budgets) // batch] for row in range(batch)]
    return [Row(*each) for each in zip(every, lengths, known, seen, strict=True)]


def levels_of(rows: Sequence[Row], known: Tensor | None, total: int, device: torch.device) -> Tensor:
    """Levels of the tokens of prompts that continue from caches.

    Args:
        rows: The sequences.
        known: Levels of the entries of their caches, int8 ``[B, N or 1, C]``; ``None`` if there are none yet.
        total: Padded length (``L``).
        device: Where the result is.

    Returns:
        int8 ``[B, N or 1, L]``.
    """
    levels = torch.zeros(len(rows), 1 if known is None else known.shape[1], total, dtype=torch.int8, device=device)
    for number, row in enumerate(rows):
        levels[number, :, row.known : row.length] = row.levels().to(device)
        if known is not None:
            levels[number, :, : row.known] = known[number, :, : row.known]
    return levels
