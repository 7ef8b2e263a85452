"""Where the tokens of a step or of a chunk are stored."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

PENDING, STRAIGHT, RING = 0, 1, 2


@dataclass(frozen=True)
class Places:
    """Where the tokens of each slot go.

    Attributes:
        kind: ``PENDING``: token ``t`` to entry ``t``. ``STRAIGHT``: to entry ``count + t``. ``RING``: to where
            :func:`~snapstream.compression.next_entry` says; the ring must have at least ``tokens`` entries.
        tokens: Tokens per slot (``T``).
        count: Tokens stored before these, int64 ``[B]``.
        base: First entry of the ring, int64 ``[B]``; used with ``RING`` only.
        limit: End of the ring, int64 ``[B]``; used with ``RING`` only.
        active: Slots to write, bool ``[B]``; for the others nothing is written, not even queries. ``None``: all.
    """

    kind: int
    tokens: int
    count: Tensor
    base: Tensor | None = None
    limit: Tensor | None = None
    active: Tensor | None = None

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Count, base, limit and active; ``count`` takes the place of unused ones."""
        base, limit, active = (self.count if each is None else each for each in (self.base, self.limit, self.active))
        return self.count, base, limit, active


@triton.jit
def rows_of_tokens(active, rows, tokens, ROWS: tl.constexpr, ALL_ACTIVE: tl.constexpr):
    """The rows of a program: their numbers, which of them are to be processed, and their slots and tokens."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    is_row = row < rows
    slot, token = row // tokens, row % tokens
    if not ALL_ACTIVE:
        is_row = is_row & (tl.load(active + slot, mask=is_row, other=0) != 0)
    return row, is_row, slot, token


@triton.jit
def entry_of(slot, token, count, base, limit, is_row, KIND: tl.constexpr):
    """The entry of a token, as :class:`Places` says."""
    if KIND == 0:
        entry = token.to(tl.int64)
    else:
        entry = tl.load(count + slot, mask=is_row, other=0) + token
    if KIND == 2:
        start = tl.load(base + slot, mask=is_row, other=0)
        end = tl.load(limit + slot, mask=is_row, other=0)
        # Before the ring wraps around, the difference may be negative and is not used.
        turn = tl.maximum(entry - start, 0) % tl.maximum(end - start, 1)
        entry = tl.where(entry < end, entry, start + turn)
    return entry
