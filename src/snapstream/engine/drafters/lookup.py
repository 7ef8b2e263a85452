"""Prompt lookup: what followed the last tokens when they were last seen.

The tokens of the whole prompt are looked through, also of what the cache has dropped. It costs no product of the model,
and it helps where an output copies from its prompt, or repeats itself. The method: Saxena, "Prompt Lookup Decoding",
2023; n-gram speculation in vLLM.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy

from snapstream.engine.drafters.base import Drafter
from snapstream.engine.request import Request

SHORTEST, LONGEST = 2, 16
"""Tokens that have to be the same as the last ones, and how many are compared."""


class PromptLookup(Drafter):
    """Continues like the longest earlier occurrence of the text's end, and the latest of several."""

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Request, Text] = WeakKeyDictionary()

    def guess(self, requests: Sequence[Request], most: Sequence[int]) -> list[Sequence[int]]:
        """See :class:`Drafter`."""
        return [
            self._text_of(each).continuation(many) if many else () for each, many in zip(requests, most, strict=True)
        ]

    def _text_of(self, request: Request) -> Text:
        text = self._texts.get(request)
        if text is None:
            text = self._texts[request] = Text(request.all_tokens)
        text.extend(request.tokens[len(text) - text.prompt :])
        return text


class Text:
    """Tokens that only grow.

    Attributes:
        prompt: How many of them were there at the start.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = numpy.array(tokens, dtype=numpy.int32)
        self._length = self.prompt = len(tokens)

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        end = self._length + len(tokens)
        if end > len(self._tokens):
            larger = numpy.zeros(max(end, 2 * len(self._tokens), 64), dtype=numpy.int32)
            larger[: self._length] = self._tokens[: self._length]
            self._tokens = larger
        self._tokens[self._length : end] = tokens
        self._length = end

    def continuation(self, most: int) -> list[int]:
        """What followed the longest earlier occurrence of the end, up to ``most`` tokens.

        An occurrence that reaches into the end makes it a cycle, which goes on as often as it has to.
        """
        tokens = self._tokens[: self._length]
        ends = numpy.flatnonzero(tokens[:-1] == tokens[-1]) if self._length else tokens[:0]
        for same in range(1, min(LONGEST, self._length)):
            longer = ends[ends >= same]
            longer = longer[tokens[longer - same] == tokens[-1 - same]]
            if not len(longer):
                break
            ends = longer
        else:
            same = min(LONGEST, self._length)
        if not len(ends) or same < SHORTEST:
            return []
        start = int(ends[-1]) + 1
        following = tokens[start : start + most].tolist()
        return [following[at % len(following)] for at in range(most)]
