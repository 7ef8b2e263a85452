"""Tokens that are computed before it is known whether they belong to the answer.

In a step of speculative decoding vLLM computes the last token of a sequence, which is certain, and drafts of those that
may follow. A ring has no place for drafts, because each would overwrite its oldest entry for good; so they stand behind
it, and those that were right move into the ring before the sequence's next step::

    [ sink | pinned top-K | ring of recent tokens | drafts ]
      0..S   S..base        base..limit             limit..limit + drafts

The certain token enters the ring at once. So without drafts every token sees what it should. The first draft also sees
an entry that it would have found overwritten, the second one two of them, and so on. As long as the cache has room,
tokens stand where they belong, and nothing differs.

Some kernels take the tokens of a step from the batch, and from the cache all but as many entries at its end. For these
the certain token must stand before the drafts, so while the ring turns it takes the ring's last entry. What was there
waits where the oldest entry was, which has to go anyway, and the two change places before the next step. That is done
without drafts, too: beside sequences that have some, such kernels may take a single token for a short prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from snapstream.compression.layout import Layout, entry_of, next_slot

Integers = NDArray[np.int64]


class Placed(NamedTuple):
    """Where the new tokens of several sequences go.

    Attributes:
        owners: Sequence of each token ``[T]``.
        tokens: Indices into the batch's tokens ``[T]``.
        entries: Cache entry that each one takes ``[T]``.
        used: Entries in use with them ``[B]``.
        scheduled: How many there are ``[B]``.
    """

    owners: Integers
    tokens: Integers
    entries: Integers
    used: Integers
    scheduled: Integers


class Moves(NamedTuple):
    """Entries that change their places before a step; all are read before any is written.

    Attributes:
        owners: Sequence of each one ``[M]``.
        sources: Where it is ``[M]``.
        targets: Where it goes ``[M]``.
    """

    owners: Integers
    sources: Integers
    targets: Integers


def place_tokens(
    count: Integers, base: Integers, limit: Integers, first: Integers, scheduled: Integers, *, at_end: bool = False
) -> Placed:
    """Find entries for the new tokens of sequences that decode: of each, a certain one and then drafts.

    Args:
        count: Tokens stored before ``[B]``.
        base: First entry of each ring ``[B]``.
        limit: End of each ring ``[B]``.
        first: Each one's first new token, an index into the batch's tokens ``[B]``.
        scheduled: New tokens of each one ``[B]``, 1 or more.
        at_end: Whether the certain token stands before the drafts; else it takes its slot.
    """
    owners = np.repeat(np.arange(len(count)), scheduled)
    number = np.arange(len(owners)) - np.repeat(np.cumsum(scheduled) - scheduled, scheduled)
    start = np.minimum(count, limit - 1)
    slot = start if at_end else next_slot(*map(torch.from_numpy, (count, base, limit))).numpy()
    entries = np.where(number == 0, slot[owners], start[owners] + number)
    return Placed(owners, first[owners] + number, entries, start + scheduled, scheduled)


class Drafts:
    """Remembers where the tokens of each sequence's last step stand.

    Attributes:
        at_end: Whether the certain token of a step stands before its drafts. Whoever knows the kernels sets it.
    """

    def __init__(self) -> None:
        self.at_end = False
        self._counts: dict[str, int] = {}

    def moves(self, sequences: Iterable[tuple[str, Layout]], counts: Iterable[int]) -> Moves:
        """What changes its place before a step.

        Args:
            sequences: Those that decode in it, and their layouts.
            counts: Tokens each one has stored before it.
        """
        found = []
        for owner, ((request_id, layout), count) in enumerate(zip(sequences, counts, strict=True)):
            before = self._counts.get(request_id)
            if before == count:  # the last step came to nothing; this one finds all as that did
                continue
            sources = {} if before is None else _settled(layout, before, count, at_end=self.at_end)
            if self.at_end and count >= layout.limit:
                last = layout.limit - 1
                sources[entry_of(layout, count)] = sources.get(last, last)
                sources.pop(last, None)  # the step overwrites it
            found += [(owner, source, target) for target, source in sources.items() if source != target]
            self._counts[request_id] = count
        return Moves(*np.array(found, dtype=np.int64).reshape(-1, 3).T)

    def forget(self, request_id: str) -> None:
        """A sequence loses its cache."""
        self._counts.pop(request_id, None)


def _settled(layout: Layout, before: int, count: int, *, at_end: bool) -> dict[int, int]:
    """By target, sources that bring a ring into its order after a step.

    Args:
        layout: The sequence's layout.
        before: Tokens stored before the step.
        count: Tokens stored with it, drafts that were wrong left out.
        at_end: Whether the step's certain token stands before its drafts.
    """
    sources: dict[int, int] = {}
    if at_end and before >= layout.limit:
        certain, last = entry_of(layout, before), layout.limit - 1
        sources |= {certain: last, last: certain}
    stands = min(before, layout.limit - 1) - before
    return sources | {entry_of(layout, index): stands + index for index in range(before + 1, count)}
