"""A sequence in a paged cache: how many blocks it holds, when, and which of them others may share.

A prompt that does not fit its budget is read into blocks of its own, as in stock vLLM. With its last chunk the row of
the block table gets blocks for the compressed cache at its end::

    [ blocks of the prompt | blocks of the compressed cache ]
      0..front_blocks        front_blocks..front_blocks + cache_blocks

When that chunk has run, the kept entries have been copied and the prompt's blocks go back to the pool. They are copied
out, not rewritten in place, because prefix caching may share the blocks with other requests.

A prompt that fits is not compressed. It grows in its own blocks until the cache is full; from then on the ring turns.
With prefix caching that must not happen in blocks that others read, so a full cache is copied out in the same way;
without, it turns where it is.

A cache that another instance has compressed arrives as it will be decoded in: there is nothing to read, to copy out or
to share, so it has no blocks in front, and its ring turns where it is.

With speculative decoding there is room for a step's drafts behind either part (see
:mod:`~snapstream.integrations.vllm.drafts`). A cache that fits is copied out in every step whose tokens, drafts
included, reach its limit; the copy counts once as many tokens are certain.

Scheduler and worker compute the same layout from the same numbers, so no message passes between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from snapstream.compression.layout import Layout, lay_out
from snapstream.config import CacheBudget


@dataclass(frozen=True)
class PageLayout:
    """The blocks of one sequence.

    Attributes:
        prompt: Layout of the cache. Its ``length`` is the tokens known when the request was admitted: the prompt, and
            after a preemption also what had been generated.
        budget: The policy.
        block_size: Tokens per block of the manager.
        shares: Whether prefix caching may share the sequence's blocks.
        arrives: Whether another instance has read the prompt, and sends its cache.
        drafts: Most tokens of a step that may turn out wrong.
    """

    prompt: Layout
    budget: CacheBudget
    block_size: int
    shares: bool
    arrives: bool = False
    drafts: int = 0

    @property
    def compressed(self) -> bool:
        """Whether the prompt exceeds its budget."""
        return self.prompt.dropped > 0

    @property
    def moves_at(self) -> int | None:
        """Computed tokens after which the cache is copied into blocks of its own; ``None``: never."""
        if self.arrives:
            return None
        if self.compressed:
            return self.prompt.length
        return self.prompt.limit if self.shares else None

    @property
    def most_entries(self) -> int:
        """Most entries in use while the sequence decodes: a full cache, and drafts."""
        return self.prompt.limit + self.drafts

    @property
    def source_tokens(self) -> int:
        """Tokens from the start of the row among which the copied entries are; meaningless if nothing is copied."""
        return self.prompt.length if self.compressed else self.most_entries

    @property
    def copied_entries(self) -> int:
        """Entries that are copied: of a prompt that was compressed what was chosen, else all there may be."""
        return self.prompt.limit if self.compressed else self.most_entries

    @property
    def front_blocks(self) -> int:
        """Blocks of the row in front of the copy; 0 if nothing is ever copied."""
        return blocks_for(self.moves_at + self.drafts, self.block_size) if self.moves_at else 0

    @property
    def cache_blocks(self) -> int:
        """Most blocks that the sequence holds while it decodes, but for the step that copies."""
        return blocks_for(self.most_entries, self.block_size)

    @cached_property
    def longest(self) -> int:
        """Length of the block table's row from when on it asks for no more blocks."""
        return self.front_blocks + self.cache_blocks

    def has_moved(self, tokens: int) -> bool:
        """Whether the copy is made by the time ``tokens`` tokens have been computed; it counts if they are certain."""
        return self.moves_at is not None and tokens >= self.moves_at

    def blocks(self, tokens: int) -> int:
        """Length of the block table's row once ``tokens`` tokens have been computed."""
        if self.has_moved(tokens):
            return self.longest
        grows_whole = self.compressed and not self.arrives
        return blocks_for(tokens if grows_whole else min(tokens, self.most_entries), self.block_size)

    def shareable(self, tokens: int) -> int:
        """How many of ``tokens`` computed tokens lie in blocks that never change and may be published."""
        return min(tokens, self.moves_at or 0)

    def reusable(self) -> int:
        """Tokens from the start that may come from the prefix cache: the window's queries must be computed."""
        if self.arrives:
            return 0
        return self.prompt.length - (self.budget.window if self.compressed else 1)


def lay_out_pages(
    length: int, budget: CacheBudget, block_size: int, *, shares: bool, arrives: bool = False, drafts: int = 0
) -> PageLayout:
    """Plan the blocks of a sequence with ``length`` known tokens (1 or more)."""
    return PageLayout(lay_out(length, budget), budget, block_size, shares, arrives, drafts)


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_size)
