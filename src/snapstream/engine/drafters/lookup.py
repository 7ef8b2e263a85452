"""Prompt lookup: drafts what followed the latest earlier occurrence of the last tokens.

It searches all tokens of the prompt, including those dropped from the cache. It needs no forward pass, and helps where
an output copies from its prompt or repeats itself. The method is from Saxena, "Prompt Lookup Decoding", 2023; vLLM
calls it n-gram speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy
from typing_extensions import override

from snapstream.engine.drafters.base import Drafter
from snapstream.engine.requests.request import Request

SHORTEST, LONGEST = 2, 16
"""Minimum length of a match with the last tokens, and maximum length that is compared."""


class PromptLookup(Drafter):
    """Continues after the longest earlier match with the end of the text; the latest one if several are as long."""

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Request, Text] = WeakKeyDictionary()

    @override
    def guess(self, requests: Sequence[Request], most: Sequence[int]) -> list[Sequence[int]]:
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
    """A growing sequence of tokens.

    Attributes:
        prompt: Number of tokens it started with.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens = numpy.array(tokens, dtype=numpy.int32)
        self._length = self.prompt = len(tokens)

    def __len__(self) -> int:
        return self._length

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        end = self._length + len(tokens)
        if end > len(self._tokens):
            larger = numpy.zeros(max(end, 2 * len(self._tokens), 64), dtype=numpy.int32)
            larger[: self._length] = self._tokens[: self._length]
            self._tokens = larger
        self._tokens[self._length : end] = tokens
        self._length = end

    def continuation(self, most: int) -> list[int]:
        """Return what followed the longest earlier match with the end of the text.

        If fewer than ``most`` tokens follow the match, they are repeated as a cycle.

        Args:
            most: Number of tokens to return.

        Returns:
            ``most`` tokens, or none if there is no match of at least :data:`SHORTEST` tokens.
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
