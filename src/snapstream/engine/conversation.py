"""What is left of a conversation between two of its turns: its compressed cache, taken out of the slot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class SavedSequence:
    """A compressed sequence that a next turn continues from.

    Keys are rotated, so entries can be put anywhere: the next turn reads them as the beginning of its prompt, oldest
    first, and at its end all of it is compressed as any prompt is. ``E`` is the number of entries.

    Attributes:
        keys: Per layer, ``[N, E, D]``.
        values: Per layer, ``[N, E, D]``; the same object as ``keys`` where values are part of keys.
        positions: Per layer, the true position of each entry in the conversation, int32 ``[N, E]``.
        tokens: All tokens of the conversation that the cache was made from, kept or dropped.
        answer: Text of the last turn's output as far as it is in ``tokens``.
    """

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    positions: Sequence[Tensor]
    tokens: Sequence[int]
    answer: str

    @property
    def entries(self) -> int:
        """Entries per layer and KV head (``E``)."""
        return self.keys[0].shape[1]

    @property
    def bytes(self) -> int:
        """Memory of its tensors."""
        values = () if self.values is self.keys else self.values
        return sum(tensor.nbytes for tensor in (*self.keys, *values, *self.positions))

    def true_positions(self, positions: Tensor, layer: int) -> Tensor:
        """Positions in the conversation of entries of a prompt that begins with this cache.

        Args:
            positions: Of one layer, counted from the cache's first entry, int64 ``[N, C]``; -1 for none.
            layer: Which.
        """
        mine = self.positions[layer].to(torch.int64)
        looked_up = mine.gather(1, positions.clamp(0, self.entries - 1))
        later = positions - self.entries + len(self.tokens)
        return torch.where(positions < 0, -1, torch.where(positions < self.entries, looked_up, later))


def pairs(
    keys: Sequence[Tensor], values: Sequence[Tensor], other_keys: Sequence[Tensor], other_values: Sequence[Tensor]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tensors of one cache with those of another, layer by layer, for copying; values only where they are not keys."""
    yield from zip(keys, other_keys, strict=True)
    if values is not keys:
        yield from zip(values, other_values, strict=True)
