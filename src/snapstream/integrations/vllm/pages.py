"""A sequence in a paged cache: how many blocks it holds at which time, and which of them may be shared.

A prompt that is compressed is prefilled into its own blocks, as in stock vLLM. With its last chunk, blocks for the
compressed cache are appended to its row of the block table::

    [ blocks of the prompt | blocks of the compressed cache ]
      0..front_blocks        front_blocks..front_blocks + cache_blocks

That step copies the kept entries, and afterwards the prompt's blocks return to the pool. Entries are copied out rather
than compressed in place, because prefix caching may share the blocks with other requests.

A prompt that leaves room for the ring is not compressed. Nor is any other that fits, under policies that do not pin
recent tokens, unless it has pins near its end. It grows in its own blocks until the cache is full, and from then on the
ring overwrites entries. With prefix caching, it must not overwrite blocks that other requests read, so a full cache is
copied out in the same way. Without prefix caching, it is overwritten in place.

A cache that another instance has compressed arrives in its final form. There is nothing to prefill, copy out or share,
so it has no blocks in front, and its ring overwrites in place.

With speculative decoding, both parts have room for a step's draft tokens at the end (see
:mod:`~snapstream.integrations.vllm.drafts`). An uncompressed cache is copied out in every step whose tokens, draft
tokens included, reach its limit; the copy is used once that many tokens are certain.

Scheduler and worker compute the same layout from the same numbers, so they need not exchange messages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from snapstream.compression.layout import Layout, lay_out
from snapstream.config import CacheBudget


@dataclass(frozen=True)
class PageLayout:
    """The blocks of one sequence.

    Attributes:
        prompt: Layout of the cache. Its ``length`` is the number of tokens known when the request was admitted: the
            prompt, and after a preemption also the generated tokens.
        budget: The request's budget.
        block_size: Tokens per block of the manager.
        shares: Whether prefix caching may share the sequence's blocks.
        arrives: Whether another instance has prefilled the prompt and sends its cache.
        drafts: Maximum number of draft tokens per step.
    """

    prompt: Layout
    budget: CacheBudget
    block_size: int
    shares: bool
    arrives: bool = False
    drafts: int = 0

    @property
    def compressed(self) -> bool:
        """Whether entries are selected."""
        return self.prompt.selects

    @property
    def moves_at(self) -> int | None:
        """Number of computed tokens at which the cache is copied into separate blocks; ``None``: never."""
        if self.arrives:
            return None
        if self.compressed:
            return self.prompt.length
        return self.prompt.limit if self.shares else None

    @property
    def most_entries(self) -> int:
        """Maximum number of entries in use while the sequence decodes: a full cache, and draft tokens."""
        return self.prompt.limit + self.drafts

    @property
    def source_tokens(self) -> int:
        """Number of tokens at the start of the row that entries are copied from; meaningless if nothing is copied."""
        return self.prompt.length if self.compressed else self.most_entries

    @property
    def copied_entries(self) -> int:
        """Number of entries that are copied: the selected ones of a compressed prompt, otherwise all possible ones."""
        return self.prompt.limit if self.compressed else self.most_entries

    @property
    def front_blocks(self) -> int:
        """Number of blocks of the row in front of the copy; 0 if nothing is ever copied."""
        return blocks_for(self.moves_at + self.drafts, self.block_size) if self.moves_at else 0

    @property
    def cache_blocks(self) -> int:
        """Maximum number of blocks that the sequence holds while it decodes, except in the step that copies."""
        return blocks_for(self.most_entries, self.block_size)

    @cached_property
    def longest(self) -> int:
        """Final length of the block table's row, at which it needs no more blocks."""
        return self.front_blocks + self.cache_blocks

    @property
    def voters(self) -> int:
        """Number of last tokens that must be computed here: those whose queries vote, and at least the last one."""
        return self.budget.window if self.compressed else 1

    def has_moved(self, tokens: int) -> bool:
        """Whether the copy exists once ``tokens`` tokens have been computed; it is used if they are certain."""
        return self.moves_at is not None and tokens >= self.moves_at

    def blocks(self, tokens: int) -> int:
        """Length of the block table's row once ``tokens`` tokens have been computed."""
        if self.has_moved(tokens):
            return self.longest
        grows_whole = self.compressed and not self.arrives
        return blocks_for(tokens if grows_whole else min(tokens, self.most_entries), self.block_size)

    def shareable(self, tokens: int) -> int:
        """How many of ``tokens`` computed tokens are in blocks that never change and may be published."""
        return min(tokens, self.moves_at or 0)

    def reusable(self) -> int:
        """Number of leading tokens that may come from the prefix cache; the window's queries must be computed."""
        if self.arrives:
            return 0
        return max(0, self.prompt.length - self.voters)


def lay_out_pages(
    length: int,
    budget: CacheBudget,
    block_size: int,
    *,
    shares: bool,
    arrives: bool = False,
    drafts: int = 0,
    generated: int = 0,
) -> PageLayout:
    """Plan the blocks of a sequence with ``length`` known tokens (1 or more).

    The last ``generated`` tokens are not of the prompt: the request was preempted. If nothing was selected before,
    nothing is while the sequence fits, and its answer stays the same.
    """
    layout = lay_out(length, budget)
    if generated and not layout.dropped and not lay_out(length - generated, budget).selects:
        layout = replace(layout, candidate_end=min(layout.candidate_end, layout.base))
    return PageLayout(layout, budget, block_size, shares, arrives, drafts)


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_size)
