"""A sequence in a paged cache: how many blocks it holds, when, and which of them others may share.

A prompt that does not fit its budget is read into blocks of its own, as in stock vLLM. With its last chunk the row of
the block table gets blocks for the compressed cache at its end::

    [ blocks of the prompt | blocks of the compressed cache ]
      0..prompt_blocks       prompt_blocks..prompt_blocks + cache_blocks

When that chunk has run, the kept entries have been copied and the prompt's blocks go back to the pool. Prompts are
copied out, not rewritten in place, because prefix caching may share their blocks with other requests. A prompt that
fits is not copied: its entries lie where the prompt put them, and the ring turns in the same blocks.

Scheduler and worker compute the same plan from the same numbers, so no message passes between them.
"""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.compression.layout import PromptPlan, plan_prompt
from snapstream.config import CacheBudget


@dataclass(frozen=True)
class PagePlan:
    """The blocks of one sequence.

    Attributes:
        prompt: Layout of the compressed cache. Its ``length`` is the tokens known when the request was admitted: the
            prompt, and after a preemption also what had been generated.
        budget: The policy.
        block_size: Tokens per block of the manager.
    """

    prompt: PromptPlan
    budget: CacheBudget
    block_size: int

    @property
    def compressed(self) -> bool:
        """Whether the prompt is copied into a compressed cache when its prefill ends."""
        return self.prompt.dropped > 0

    @property
    def prompt_blocks(self) -> int:
        """Blocks of the row in front of the compressed cache; 0 for a prompt that fits."""
        return blocks_for(self.prompt.length, self.block_size) if self.compressed else 0

    @property
    def cache_blocks(self) -> int:
        """Blocks that the sequence holds for as long as it decodes."""
        return blocks_for(self.prompt.limit, self.block_size)

    def blocks(self, tokens: int) -> int:
        """Length of the block table's row once ``tokens`` tokens have been computed."""
        if not self.compressed:
            return blocks_for(min(tokens, self.prompt.limit), self.block_size)
        if tokens < self.prompt.length:
            return blocks_for(tokens, self.block_size)
        return self.prompt_blocks + self.cache_blocks

    def shareable(self, longest: int) -> int:
        """Tokens from the start whose blocks never change, so that prefix caching may publish them.

        Args:
            longest: Most tokens the sequence can reach (prompt and output).
        """
        if self.compressed:
            return self.prompt.length
        return longest if longest <= self.prompt.limit else self.prompt.base

    def reusable(self, longest: int) -> int:
        """Tokens from the start that may be taken from the prefix cache.

        The observation window must be computed anew, for its queries; and the ring must not turn in blocks that other
        requests read.

        Args:
            longest: Most tokens the sequence can reach (prompt and output).
        """
        if self.compressed:
            return self.prompt.length - self.budget.window
        return self.shareable(longest)


def plan_pages(length: int, budget: CacheBudget, block_size: int) -> PagePlan:
    """Plan the blocks of a sequence with ``length`` known tokens (1 or more)."""
    return PagePlan(plan_prompt(length, budget), budget, block_size)


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens."""
    return -(-tokens // block_size)
