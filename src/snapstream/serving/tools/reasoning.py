"""The reasoning before an answer, between tags."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from snapstream.serving.tools.events import Event, Reasoning
from snapstream.serving.tools.source import Reading, Source


class Tags(NamedTuple):
    """What reasoning begins and ends with."""

    begin: str
    end: str


KNOWN: Sequence[Tags] = (
    Tags("<think>", "</think>"),
    Tags("[THINK]", "[/THINK]"),
    Tags("<seed:think>", "</seed:think>"),
    Tags("<|START_THINKING|>", "<|END_THINKING|>"),
    Tags("<|channel>thought\n", "<channel|>"),
)
"""Qwen, DeepSeek and most others; Mistral; Seed; Command; Gemma 4."""


class ReasoningReader:
    """Splits the reasoning off the beginning of an answer, as it comes in.

    Args:
        tags: The tags of the model.
        is_open: Whether the prompt ends with the first one, so that the answer begins with reasoning.
    """

    def __init__(self, tags: Tags, *, is_open: bool) -> None:
        self._tags, self._is_open = tags, is_open
        self._source, self._events = Source(), list[Event]()
        self._rest = ""
        self._reading = self._read()
        self.done = False

    def feed(self, text: str, *, last: bool = False) -> tuple[list[Event], str]:
        """Take what comes next; returns new reasoning, and text that comes after it."""
        if self.done:
            return [], text
        self._source.put(text)
        self._source.ended = last
        next(self._reading, None)
        events, self._events = self._events, []
        rest, self._rest = self._rest, ""
        return events, rest

    def _read(self) -> Reading[None]:
        source, tags = self._source, self._tags
        spaces: list[str] = []
        if not self._is_open:
            while (char := (yield from source.char())) and char.isspace():
                spaces.append(source.take(1))
        if (yield from source.accept(tags.begin)) or self._is_open:
            yield from self._skip_spaces()
            held = ""  # whitespace before the end is left out

            def write(text: str) -> None:
                nonlocal held
                kept = (held + text).rstrip()
                held = (held + text)[len(kept) :]
                if kept:
                    self._events.append(Reasoning(kept))

            yield from source.until((tags.end,), write)
            yield from self._skip_spaces()
        else:
            self._rest = "".join(spaces)
        self._rest += source.there()
        self.done = True

    def _skip_spaces(self) -> Reading[None]:
        while (char := (yield from self._source.char())) and char.isspace():
            self._source.take(1)
