"""Groups of layers whose caches grow alike."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapstream.cache.codes import EntryType
from snapstream.cache.layer import EntryShape, LayerCache
from snapstream.cache.state import StateShape
from snapstream.compression import Layout, lay_out, lay_out_window
from snapstream.config import CacheBudget
from snapstream.pages import tensors_of_zeros


@dataclass(frozen=True)
class LayerGroup:
    """Layers whose sequences have the same layout.

    A model lists the groups with the budget first. Layers with a sliding window need no budget: their ring is the
    window, without sinks and pinned entries, so it holds exactly what they attend to. Layers with a state have a window
    too: as many inputs as their convolution looks back.

    Attributes:
        layers: Their indices.
        entry: Shape of an entry, or of the state.
        window: How many tokens a token attends to, itself included; ``None`` for all. Then the budget applies.
        rotation: Name of their RoPE parameters in the configuration; ``None`` if it has only one set.
        taken_back: How many more inputs a slot keeps, so that a state can be taken back.
    """

    layers: tuple[int, ...]
    entry: EntryShape | StateShape
    window: int | None = None
    rotation: str | None = None
    taken_back: int = 0

    @property
    def has_budget(self) -> bool:
        """Whether a cache budget applies."""
        return self.window is None

    @property
    def has_state(self) -> bool:
        """Whether layers have a state."""
        return isinstance(self.entry, StateShape)

    @property
    def slides(self) -> bool:
        """Whether layers attend to a sliding window."""
        return self.window is not None and not self.has_state

    def entries(self, capacity: int) -> int:
        """Entries per slot, if a budget has ``capacity``."""
        return capacity if self.window is None else self.window + self.taken_back

    def lay_out(self, length: int, budget: CacheBudget, first_voter: int = 0, pinned_end: int | None = None) -> Layout:
        """Lay out the cache of a prompt; see :func:`~snapstream.compression.layout.lay_out`."""
        if self.window is None:
            return lay_out(length, budget, first_voter, pinned_end)
        return lay_out_window(length, self.window)

    def resumed(self, layout: Layout) -> Layout:
        """The layout of a saved sequence here: its window may have been cut to a shorter ``max_model_len``."""
        return layout if self.window is None else lay_out_window(layout.count, self.window)

    def nbytes(self, entries: int, entry_type: EntryType) -> int:
        """Bytes of so many entries of a sequence over all its layers, and of what it has besides them."""
        return len(self.layers) * (entries * self.entry.nbytes(entry_type) + self.entry.fixed_nbytes(entry_type))

    def positions(self, entries: int) -> int:
        """Number of true positions in a saved sequence: one per entry and head, and none for a state."""
        return 0 if self.has_state else entries * len(self.layers) * self.entry.heads


SMALLEST_BLOCK = 4 * 2**20
"""Bytes from which on the caches of a sequence are in a block of their own; the number of blocks is limited."""


def make_caches(
    groups: Sequence[LayerGroup],
    entries: Sequence[int],
    *,
    entry_type: EntryType,
    device: torch.device,
    rows: int = 1,
) -> list[LayerCache]:
    """Caches for ``rows`` sequences, one per layer, all zero.

    On a CPU they are next to each other, so that all of their memory goes back to the system when they are dropped.

    Args:
        groups: The model's groups.
        entries: Entries per group.
        entry_type: Type of entries.
        device: Where they are.
        rows: Sequences.
    """
    wanted = {
        layer: (group.entry, count) for group, count in zip(groups, entries, strict=True) for layer in group.layers
    }
    shapes = [wanted[layer][0].tensors(rows, wanted[layer][1], entry_type) for layer in range(len(wanted))]
    every = [each for layer in shapes for each in layer]
    memory: list[Tensor] = []
    if device.type == "cpu" and sum(math.prod(shape) * dtype.itemsize for shape, dtype in every) >= SMALLEST_BLOCK:
        with contextlib.suppress(MemoryError):  # there may be too many blocks
            memory = tensors_of_zeros(every)
    # Written, not only allocated: planned memory is committed from the start.
    parts = iter(memory or [torch.zeros(shape, dtype=dtype, device=device).zero_() for shape, dtype in every])
    made = (list(itertools.islice(parts, len(layer))) for layer in shapes)
    return [wanted[layer][0].made_of(tensors, entry_type) for layer, tensors in enumerate(made)]


def reported_layers(groups: Sequence[LayerGroup]) -> list[int]:
    """Layers that reports of kept tokens are about: those with a budget or, without any, those of the first window."""
    return sorted(layer for group in groups if group.window == groups[0].window for layer in group.layers)


@dataclass(frozen=True)
class CacheSizes:
    """Sizes of sequences' caches in bytes.

    Attributes:
        groups: The model's groups.
        entry_type: Type of entries.
    """

    groups: Sequence[LayerGroup]
    entry_type: EntryType

    def of(self, entries: Sequence[int]) -> int:
        """Bytes of a sequence with so many entries per group."""
        return sum(group.nbytes(count, self.entry_type) for group, count in zip(self.groups, entries, strict=True))

    def of_prompt(self, tokens: int, capacity: int | None = None) -> int:
        """Bytes of the entries of a prompt; without a budget of ``capacity`` of all that its layers attend to."""
        capacity = tokens if capacity is None else capacity
        return self.of([min(tokens, group.window or capacity) for group in self.groups])

    def saved(self, entries: Sequence[int]) -> int:
        """Bytes of a saved sequence of so many entries per group: entries, and the true position of each."""
        return self.of(entries) + sum(
            4 * group.positions(count) for group, count in zip(self.groups, entries, strict=True)
        )
