"""What many prompts begin with: read once, and kept as full caches in the host's memory.

Prompts are compared in blocks of ``prefill_chunk`` tokens. A beginning that two prompts have in common is kept while
the second one is read, layer by layer as they pass, and the third one goes on behind it. Nothing is lost by that: what
is kept are the entries that would be computed again, in the same chunks, and the whole prompt is compressed at its end
as ever. So answers are the same to the bit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from snapstream.cache import LayerCache

REMEMBERED_BLOCKS = 4096
"""Blocks of prompts that are remembered, to see which beginnings come again; a number each."""


@dataclass(eq=False)
class Prefix:
    """The beginning of prompts.

    Attributes:
        tokens: Its tokens, whole blocks.
        layers: Per layer that was read, the full cache of these tokens, of one row, in the host's memory.
    """

    tokens: list[int]
    layers: list[LayerCache] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Memory of its caches."""
        return sum(layer.nbytes for layer in self.layers)


class Prefixes:
    """Keeps the ``limit`` beginnings that were used last.

    Args:
        limit: How many.
        block: Tokens of a prefill chunk.
    """

    def __init__(self, limit: int, block: int) -> None:
        self.limit, self.block = limit, block
        self._kept: list[Prefix] = []  # the one used last is the last
        self._seen: OrderedDict[int, None] = OrderedDict()

    @property
    def nbytes(self) -> int:
        """Memory of all that is kept."""
        return sum(prefix.nbytes for prefix in self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, prompt: Sequence[int], most: int) -> tuple[Prefix, int, int] | None:
        """What is kept of a prompt's beginning.

        Args:
            prompt: The prompt.
            most: Tokens that may be left out.

        Returns:
            A beginning, how many tokens can be left out, and how many it has in common with the prompt; or ``None``.
        """
        best, length = None, 0
        for prefix in self._kept:
            common = self._common(prefix.tokens, prompt)
            if common > length:
                best, length = prefix, common
        usable = self._whole(min(length, most))
        if best is None or usable <= 0:
            return None
        self._kept.remove(best)
        self._kept.append(best)
        return best, usable, length

    def worth_keeping(self, prompt: Sequence[int], waiting: Iterable[Sequence[int]], known: int) -> int:
        """How much of a prompt that is about to be read should be kept; 0: nothing.

        Args:
            prompt: Remembered from now on.
            waiting: Prompts that will be read after it.
            known: Tokens that are kept already.
        """
        blocks = list(self._blocks(prompt))
        again = next((at for at, block in enumerate(blocks) if block not in self._seen), len(blocks)) * self.block
        for other in waiting:
            again = max(again, self._common(prompt, other))
        for block in blocks:
            self._seen[block] = None
            self._seen.move_to_end(block)
        while len(self._seen) > REMEMBERED_BLOCKS:
            self._seen.popitem(last=False)
        return again if again > known else 0

    def keep(self, prefix: Prefix) -> None:
        """Keep a beginning whose layers have all been read, instead of those that it begins with."""
        if any(one.tokens[: len(prefix.tokens)] == prefix.tokens for one in self._kept):
            return
        self._kept = [one for one in self._kept if prefix.tokens[: len(one.tokens)] != one.tokens]
        self._kept.append(prefix)
        del self._kept[: -self.limit]

    def _common(self, one: Sequence[int], other: Sequence[int]) -> int:
        """How many tokens two prompts begin with in common, in whole blocks; both are lists."""
        whole = self._whole(min(len(one), len(other)))
        for start in range(0, whole, self.block):
            if one[start : start + self.block] != other[start : start + self.block]:
                return start
        return whole

    def _whole(self, tokens: int) -> int:
        """So many tokens in whole blocks."""
        return tokens // self.block * self.block

    def _blocks(self, prompt: Sequence[int]) -> Iterable[int]:
        """A number for each whole block that says what it and all before it are."""
        before = 0
        for start in range(0, self._whole(len(prompt)), self.block):
            before = hash((before, *prompt[start : start + self.block]))
            yield before
