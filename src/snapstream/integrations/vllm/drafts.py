"""Places draft tokens, which are computed before it is known whether they are accepted.

In a step of speculative decoding, vLLM computes the last token of a sequence, which is certain, and draft tokens after
it. A draft token must not go into the ring, because it would overwrite the oldest entry permanently. Draft tokens
therefore go after the ring, and accepted ones move into the ring before the sequence's next step::

    [ sink | pinned top-K | ring of recent tokens | drafts ]
      0..S   S..base        base..limit             limit..limit + drafts

The certain token enters the ring at once, so without draft tokens every token attends to exactly the right entries. The
first draft token also attends to one entry that should already have been overwritten, the second one to two of them,
and so on. As long as the cache is not full, all tokens are at their regular places and there is no difference.

Some kernels take a step's tokens from the batch, and everything except the last entries, as many as there are such
tokens, from the cache. For these, the certain token must come directly before the draft tokens, so once the ring is
full it takes the ring's last entry. The previous content of that entry is moved to the place of the oldest entry, which
is evicted anyway, and the two are swapped before the next step. This is also done without draft tokens: in a batch with
sequences that have some, such kernels may treat a single token as a short prompt.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from snapstream.compression.layout import Layout, entry_of, next_entry

Integers = NDArray[np.int64]


class Placed(NamedTuple):
    """Where the new tokens of several sequences go.

    Attributes:
        owners: Sequence of each token ``[T]``.
        tokens: Index of each token in the batch ``[T]``.
        entries: Cache entry of each token ``[T]``.
        used: Entries in use, the new tokens included ``[B]``.
        scheduled: New tokens per sequence ``[B]``.
    """

    owners: Integers
    tokens: Integers
    entries: Integers
    used: Integers
    scheduled: Integers


class Moves(NamedTuple):
    """Entries to move before a step; all are read before any is written.

    Attributes:
        owners: Sequence of each moved entry ``[M]``.
        sources: Its current place ``[M]``.
        targets: Its new place ``[M]``.
    """

    owners: Integers
    sources: Integers
    targets: Integers


def place_tokens(
    count: Integers, base: Integers, limit: Integers, first: Integers, scheduled: Integers, *, at_end: bool = False
) -> Placed:
    """Assign entries to the new tokens of decoding sequences: per sequence, a certain token and then draft tokens.

    Args:
        count: Tokens stored before the step ``[B]``.
        base: First entry of each ring ``[B]``.
        limit: End of each ring ``[B]``.
        first: First new token of each sequence, as an index into the batch's tokens ``[B]``.
        scheduled: New tokens of each sequence ``[B]``, 1 or more.
        at_end: Whether the certain token goes directly before the draft tokens; otherwise it goes to its regular place.
    """
    owners = np.repeat(np.arange(len(count)), scheduled)
    number = np.arange(len(owners)) - np.repeat(np.cumsum(scheduled) - scheduled, scheduled)
    start = np.minimum(count, limit - 1)
    following = start if at_end else next_entry(*map(torch.from_numpy, (count, base, limit))).numpy()
    entries = np.where(number == 0, following[owners], start[owners] + number)
    return Placed(owners, first[owners] + number, entries, start + scheduled, scheduled)


class Drafts:
    """Tracks where the tokens of each sequence's last step were stored.

    Attributes:
        at_end: Whether the certain token of a step goes directly before its draft tokens; depends on the kernels.
    """

    def __init__(self) -> None:
        self.at_end = False
        self._counts: dict[str, int] = {}

    def moves(self, sequences: Iterable[tuple[str, Layout]], counts: Iterable[int]) -> Moves:
        """Compute the entries to move before a step.

        Args:
            sequences: Request ids and layouts of the sequences that decode in the step.
            counts: Tokens that each sequence has stored before the step.
        """
        found = []
        for owner, ((request_id, layout), count) in enumerate(zip(sequences, counts, strict=True)):
            before = self._counts.get(request_id)
            if before == count:  # the last step stored nothing, so the entries are as that step expected them
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
        """Drop the state of a sequence that loses its cache."""
        self._counts.pop(request_id, None)


def _settled(layout: Layout, before: int, count: int, *, at_end: bool) -> dict[int, int]:
    """Moves that restore the order of a ring after a step, as a mapping from target to source.

    Args:
        layout: The sequence's layout.
        before: Tokens stored before the step.
        count: Tokens stored after the step, without rejected draft tokens.
        at_end: Whether the step's certain token was stored directly before its draft tokens.
    """
    sources: dict[int, int] = {}
    if at_end and before >= layout.limit:
        certain, last = entry_of(layout, before), layout.limit - 1
        sources |= {certain: last, last: certain}
    stands = min(before, layout.limit - 1) - before
    return sources | {entry_of(layout, index): stands + index for index in range(before + 1, count)}
