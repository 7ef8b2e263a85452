"""Keeps what launches overwrite in layers with a sliding window, so that a saved sequence has its whole window.

A launch may decode past the end of a text. In layers with a budget, the ring has then lost a few more of its oldest
entries, which were next to be evicted anyway. A window is exact, so here the entries that were overwritten come back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from snapstream.cache import LayerCache, LayerGroup
from snapstream.inference import in_inference_mode

FURTHEST = 16
"""Number of decoded tokens after the end of a text, such as a stop string of several tokens, that can be taken back."""


class Evicted:
    """The latest entries that were overwritten in every slot, per layer with a window."""

    def __init__(self, groups: Sequence[LayerGroup], caches: Sequence[LayerCache], most: int) -> None:
        """Allocate memory.

        Args:
            groups: The model's groups of layers.
            caches: The slots' caches, ``[B, N, C, D]`` per layer.
            most: Maximum number of tokens that a launch stores in a slot.
        """
        self._groups, self._caches, self._most = groups, caches, most
        self._held = {
            layer: caches[layer].pending(kept_entries(most))
            for group in groups
            if group.slides
            for layer in group.layers
        }

    @property
    def nbytes(self) -> int:
        """Bytes in memory; frames are those of the slots."""
        return sum(each.nbytes for cache in self._held.values() for each in cache.tensors[: cache.stored])

    @in_inference_mode
    def before_launch(self, position: Tensor, count: Tensor) -> None:
        """Copy the entries that the next launch may overwrite.

        Args:
            position: True position of the next token of each slot, int64 ``[B]``.
            count: Tokens ever stored, int64 ``[groups, B]``.
        """
        coming = torch.arange(self._most, device=position.device)
        held = (position[:, None] + coming) % kept_entries(self._most)
        for number, group in enumerate(self._groups):
            if not group.slides:
                continue
            assert group.window is not None
            places = (count[number, :, None] + coming) % group.window
            for layer in group.layers:
                self._held[layer].write_stored(held, self._caches[layer].read(places))

    def window(self, layer: int, slot: int, window: int, tokens: range, position: int, count: int) -> LayerCache:
        """Copy the entries of consecutive tokens out of a slot.

        Args:
            layer: Index of the layer.
            slot: Index of the slot.
            window: Its window.
            tokens: Their true positions, ``window`` at most.
            position: True position of the slot's next token.
            count: Tokens ever stored there.
        """
        cache, held = self._caches[layer], self._held[layer]
        device = cache.device
        first_there = max(tokens.start, position - window)
        gone = torch.arange(tokens.start, min(tokens.stop, first_there), device=device)
        there = torch.arange(min(first_there, tokens.stop), tokens.stop, device=device)
        old = held.take(slot, (gone + window) % kept_entries(self._most))
        return old.joined(cache.take(slot, (there - position + count) % window))


def kept_entries(most: int) -> int:
    """Entries that are kept per slot and layer, if a launch stores at most ``most`` tokens."""
    return most + FURTHEST
