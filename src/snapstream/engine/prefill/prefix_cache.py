"""The prefix cache: prefixes shared by prompts are prefilled once and kept as full caches in host memory.

Prompts are compared in blocks of ``prefill_chunk`` tokens. A prefix that two prompts share is cached, layer by layer,
while the second one is prefilled, and the third prompt is prefilled from its end on. This is lossless: the cached
entries are the ones that would be computed again, in the same chunks, and the whole prompt is compressed at its end as
usual. Answers are identical bit for bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from snapstream.cache import LayerCache

REMEMBERED_BLOCKS = 4096
"""Number of prompt blocks that are remembered, one hash each, to detect repeated prefixes."""


@dataclass(eq=False)
class Prefix:
    """A cached prefix of prompts.

    Attributes:
        tokens: Its tokens, a whole number of blocks.
        widened: Whether it was read with widened weights, so its entries are not those of other prompts to the bit.
        layers: Per finished layer, the full cache of these tokens in host memory, with a batch size of 1.
    """

    tokens: list[int]
    widened: bool = False
    layers: list[LayerCache] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes of its caches."""
        return sum(layer.nbytes for layer in self.layers)


class Prefixes:
    """Keeps the ``limit`` most recently used prefixes.

    Args:
        limit: Maximum number of prefixes.
        block: Tokens of a prefill chunk.
        only_whole: Whether a prompt must have a whole prefix to begin behind it: states are those after its last token.
    """

    def __init__(self, limit: int, block: int, *, only_whole: bool = False) -> None:
        self.limit, self.block, self._only_whole = limit, block, only_whole
        self._kept: list[Prefix] = []  # most recently used last
        self._seen: OrderedDict[int, None] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Bytes of all cached prefixes."""
        return sum(prefix.nbytes for prefix in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, prompt: Sequence[int], most: int, *, widened: bool = False) -> tuple[Prefix, int, int] | None:
        """Find the cached prefix that shares the most tokens with a prompt.

        Args:
            prompt: The prompt.
            most: Maximum number of tokens that may be skipped.
            widened: Whether the prompt is read with widened weights; so must be the prefix.

        Returns:
            The prefix, how many tokens can be skipped, and how many it shares with the prompt; ``None`` if no tokens
            can be skipped.
        """
        common = {id(each): self._common(each.tokens, prompt) for each in self._kept if each.widened == widened}
        found = [each for each in self._kept if common.get(id(each))]
        if self._only_whole:
            found = [each for each in found if common[id(each)] == len(each.tokens) <= most]
        if not found:
            return None
        found.sort(key=lambda each: common[id(each)])  # of equal ones, the most recently used is last
        best, length = found[-1], common[id(found[-1])]
        usable = self._whole(min(length, most))
        if usable <= 0:
            return None
        # The longest does not stand in for shorter ones where only whole ones can be used.
        used = found if self._only_whole else [best]
        self._kept = [each for each in self._kept if each not in used] + used
        return best, usable, length

    def worth_keeping(self, prompt: Sequence[int], waiting: Iterable[Sequence[int]], known: int, most: int) -> int:
        """Decide how much of a prompt to cache when it is prefilled.

        Args:
            prompt: The prompt; its blocks are remembered from now on.
            waiting: Prompts that will be prefilled after it.
            known: Number of its tokens that are already cached.
            most: Maximum number of its tokens that may be skipped.

        Returns:
            Number of tokens to cache; 0 for none.
        """
        blocks = list(self._blocks(prompt))
        again = next((at for at, block in enumerate(blocks) if block not in self._seen), len(blocks)) * self.block
        for other in waiting:
            again = max(again, self._common(prompt, other))
        if self._only_whole:  # a longer one could not be used
            again = min(again, self._whole(most))
        for block in blocks:
            self._seen[block] = None
            self._seen.move_to_end(block)
        while len(self._seen) > REMEMBERED_BLOCKS:
            self._seen.popitem(last=False)
        return again if again > known else 0

    def keep(self, prefix: Prefix) -> None:
        """Cache a prefix whose layers are all complete; shorter prefixes of it are dropped."""
        alike = [one for one in self._kept if one.widened == prefix.widened]
        if self._only_whole:  # neither a shorter nor a longer one can stand in for it
            alike = [one for one in alike if len(one.tokens) == len(prefix.tokens)]
        if any(one.tokens[: len(prefix.tokens)] == prefix.tokens for one in alike):
            return
        shorter = {id(one) for one in alike if prefix.tokens[: len(one.tokens)] == one.tokens}
        self._kept = [one for one in self._kept if id(one) not in shorter]
        self._kept.append(prefix)
        del self._kept[: -self.limit]

    def _common(self, one: Sequence[int], other: Sequence[int]) -> int:
        """Number of leading tokens that two prompts share, in whole blocks; both must be lists."""
        whole = self._whole(min(len(one), len(other)))
        for start in range(0, whole, self.block):
            if one[start : start + self.block] != other[start : start + self.block]:
                return start
        return whole

    def _whole(self, tokens: int) -> int:
        """Round a number of tokens down to whole blocks."""
        return tokens // self.block * self.block

    def _blocks(self, prompt: Sequence[int]) -> Iterable[int]:
        """Yield one hash per whole block, over the block and all blocks before it."""
        before = 0
        for start in range(0, self._whole(len(prompt)), self.block):
            before = hash((before, *prompt[start : start + self.block]))
            yield before
