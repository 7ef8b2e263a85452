"""Pinned tokens of a batch: which entries of the cache and which new tokens they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from snapstream.compression import pinned_levels
from snapstream.config import CacheBudget
from snapstream.config.checks import is_integer
from snapstream.config.pins import Span, read_spans
from snapstream.errors import RequestError


def pins_of(pin: Sequence[Any]) -> list[tuple[Span, ...]]:
    """Read pins: one list of spans for all sequences, or a list of spans for each.

    Raises:
        ConfigurationError: They are invalid.
    """
    is_apart = not isinstance(pin, str) and any(
        not isinstance(each, str) and not any(map(is_integer, each)) for each in pin
    )
    return [read_spans(spans) for spans in pin] if is_apart else [read_spans(pin)]


def levels_of_batch(
    budgets: Sequence[CacheBudget],
    known: Tensor | None,
    lengths: Sequence[int],
    first: Sequence[int],
    seen: Sequence[int],
    total: int,
    device: torch.device,
) -> Tensor:
    """Levels of the tokens of prompts that continue from caches.

    Args:
        budgets: A budget with pins for all sequences, or for each. ``generate`` repeats each sequence for its beams.
        known: Levels of the entries of the caches, int8 ``[B, N or 1, C]``; ``None`` if there are no caches yet.
        lengths: Number of tokens of each prompt, entries of its cache included.
        first: Number of these entries.
        seen: Number of tokens of each sequence so far.
        total: Padded length (``L``).
        device: Where the result is.

    Returns:
        int8 ``[B, N or 1, L]``; see :func:`~snapstream.compression.pins.pinned_levels`.

    Raises:
        RequestError: There are pins for another number of sequences.
    """
    batch = len(lengths)
    if batch % len(budgets):
        raise RequestError(
            f"there are pins for {len(budgets)} sequences, but {batch} sequences were given; give pins for each of "
            "them, or for all together"
        )
    levels = torch.zeros(batch, 1 if known is None else known.shape[1], total, dtype=torch.int8, device=device)
    for row in range(batch):
        budget, new = budgets[row * len(budgets) // batch], lengths[row] - first[row]
        of_new = pinned_levels(budget, seen[row])[seen[row] - new :]
        levels[row, :, first[row] : lengths[row]] = of_new.to(device)
        if known is not None:
            levels[row, :, : first[row]] = known[row, :, : first[row]]
    return levels


def ends_of(levels: Tensor) -> list[int]:
    """Per sequence, one past the last pinned token of any head; 0 for none."""
    position = torch.arange(1, levels.shape[-1] + 1, device=levels.device)
    ends: list[int] = ((levels > 0).any(1) * position).amax(-1).tolist()
    return ends
