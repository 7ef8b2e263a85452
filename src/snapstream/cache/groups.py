"""Groups of layers whose caches grow alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from snapstream.cache.layer import EntryShape
from snapstream.compression import Layout, lay_out, lay_out_window
from snapstream.config import CacheBudget


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose sequences have the same layout.

    A model lists the groups with the budget first. Layers with a sliding window need no budget: their ring is the
    window, without sinks and pinned entries, so it holds exactly what they attend to.

    Attributes:
        layers: Their indices.
        entry: Shape of an entry.
        window: How many tokens a token attends to, itself included; ``None`` for all. Then the budget applies.
        rotation: Name of their RoPE parameters in the configuration; ``None`` if it has only one set.
    """

    layers: tuple[int, ...]
    entry: EntryShape
    window: int | None = None
    rotation: str | None = None

    def entries(self, capacity: int) -> int:
        """Entries per sequence, if a budget has ``capacity``."""
        return capacity if self.window is None else self.window

    def lay_out(self, length: int, budget: CacheBudget, first_voter: int = 0) -> Layout:
        """Lay out the cache of a prompt of ``length`` tokens (1 or more)."""
        if self.window is None:
            return lay_out(length, budget, first_voter)
        return lay_out_window(length, self.window)

    def resumed(self, layout: Layout) -> Layout:
        """The layout of a saved sequence here: its window may have been cut to a shorter ``max_model_len``."""
        return layout if self.window is None else lay_out_window(layout.count, self.window)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of one entry over all its layers."""
        return len(self.layers) * self.entry.nbytes(dtype)


def reported_layers(groups: Sequence[LayerGroup]) -> list[int]:
    """Layers that reports of kept tokens are about: those with a budget or, without any, those of the first window."""
    return sorted(layer for group in groups if group.window == groups[0].window for layer in group.layers)


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of sequences' caches in bytes.

    Attributes:
        groups: The model's groups.
        dtype: Dtype of entries.
    """

    groups: Sequence[LayerGroup]
    dtype: torch.dtype

    def of(self, entries: Sequence[int]) -> int:
        """Bytes of so many entries per group."""
        return sum(count * group.nbytes(self.dtype) for group, count in zip(self.groups, entries, strict=True))

    def of_slot(self, capacity: int) -> int:
        """Bytes of a slot whose budget has ``capacity``."""
        return self.of([group.entries(capacity) for group in self.groups])

    def of_prompt(self, tokens: int, capacity: int | None = None) -> int:
        """Bytes of the entries of a prompt; without a budget of ``capacity`` of all that its layers attend to."""
        capacity = tokens if capacity is None else capacity
        return self.of([min(tokens, group.entries(capacity)) for group in self.groups])

    def saved(self, entries: Sequence[int]) -> int:
        """Bytes of a saved sequence of so many entries per group: entries, and the true position of each."""
        positions = (
            4 * count * len(group.layers) * group.entry.heads for group, count in zip(self.groups, entries, strict=True)
        )
        return self.of(entries) + sum(positions)
