"""Text that is read while it comes in.

Readers are generators: they read like ordinary code, and ``yield`` where more text is needed. No character is looked at
twice, however small the pieces are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import TypeVar

from snapstream.engine.requests.text import held_back

T = TypeVar("T")
Reading = Generator[None, None, T]
"""A reader that returns something."""
Write = Callable[[str], None]

_SPACES = frozenset(" \t\r\n")
_NAME = re.compile(r"[A-Za-z0-9_.:-]+")
_SCALAR = re.compile(r"[^\s,\]}\"{\[]+")
_STRUCTURE, _IN_STRING = re.compile(r'["{}\[\]]'), re.compile(r'["\\]')


class NotACallError(Exception):
    """What looked like a call is not one."""


class Source:
    """Text that has come in so far.

    Attributes:
        ended: Whether nothing more comes.
        at: Place of the next character, in the text that is held.
    """

    def __init__(self) -> None:
        self.ended, self.at = False, 0
        self._text, self._mark, self._keeps = "", 0, True

    def put(self, text: str) -> None:
        """Add text; what was read before the last mark is dropped."""
        start = self._mark if self._keeps else self.at
        self._text = self._text[start:] + text
        self.at, self._mark = self.at - start, 0

    def mark(self) -> None:
        """Remember this place for :meth:`back`."""
        self._mark, self._keeps = self.at, True

    def commit(self) -> None:
        """Forget the mark: what is read need not be kept."""
        self._keeps = False

    def back(self) -> None:
        """Return to the mark."""
        self.at = self._mark

    def take(self, count: int) -> str:
        """Read so many characters, which are there."""
        self.at += count
        return self._text[self.at - count : self.at]

    def char(self) -> Reading[str]:
        """The next character, which is not read; empty at the end."""
        while self.at >= len(self._text) and not self.ended:
            yield
        return self._text[self.at : self.at + 1]

    def there(self) -> str:
        """All that is there and not read."""
        return self._text[self.at :]

    def starts_with(self, word: str) -> Reading[bool]:
        """Whether a word comes next; it is not read."""
        while True:
            have = self._text[self.at : self.at + len(word)]
            if have == word or not word.startswith(have) or self.ended:
                return have == word
            yield

    def accept(self, word: str) -> Reading[bool]:
        """Read a word if it comes next."""
        found = yield from self.starts_with(word)
        self.at += len(word) if found else 0
        return found

    def expect(self, word: str) -> Reading[None]:
        """Read a word.

        Raises:
            NotACallError: Something else comes next.
        """
        if not (yield from self.accept(word)):
            raise NotACallError

    def spaces(self) -> Reading[None]:
        """Read whitespace."""
        while (yield from self.char()) in _SPACES and self.at < len(self._text):
            self.at += 1

    def name(self) -> Reading[str]:
        """Read a name.

        Raises:
            NotACallError: Something else comes next.
        """
        return (yield from self._run(_NAME))

    def until(self, words: tuple[str, ...], write: Write) -> Reading[str]:
        """Read and hand on text until one of some words, which is read, too; returns it, or nothing at the end."""
        while True:
            there = self.there()
            found = [(at, word) for word in words if (at := there.find(word)) >= 0]
            if found:
                at, word = min(found)
                write(self.take(at))
                self.at += len(word)
                return word
            write(self.take(len(there) - (0 if self.ended else held_back(there, words))))
            if self.ended:
                return ""
            yield

    def value(self, write: Write) -> Reading[None]:
        """Read a JSON value, and hand on its text as it comes.

        Raises:
            NotACallError: There is no value, or it is incomplete.
        """
        depth = 0
        while True:
            char = yield from self.char()
            if not char:
                raise NotACallError
            if char == '"':
                yield from self._string(write)
            elif char in "{}[]":
                depth += 1 if char in "{[" else -1
                if depth < 0:
                    raise NotACallError
                write(self.take(1))
            elif depth:
                found = _STRUCTURE.search(self._text, self.at)
                write(self.take((found.start() if found else len(self._text)) - self.at))
                continue
            else:
                write((yield from self._run(_SCALAR)))
            if not depth:
                return

    def text_of_value(self) -> Reading[str]:
        """Read a JSON value; returns its text.

        Raises:
            NotACallError: There is no value, or it is incomplete.
        """
        parts: list[str] = []
        yield from self.value(parts.append)
        return "".join(parts)

    def _string(self, write: Write) -> Reading[None]:
        write(self.take(1))
        while True:
            if not (yield from self.char()):
                raise NotACallError
            found = _IN_STRING.search(self._text, self.at)
            write(self.take((found.start() if found else len(self._text)) - self.at))
            if found is None:
                continue
            if found.group() == '"':
                write(self.take(1))
                return
            while len(self._text) - self.at < 2:  # a backslash and what it stands before
                if self.ended:
                    raise NotACallError
                yield
            write(self.take(2))

    def _run(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read as many characters as fit, at least one."""
        parts: list[str] = []
        while (yield from self.char()):
            found = pattern.match(self._text, self.at)
            if found is None:
                break
            parts.append(self.take(found.end() - self.at))
            if self.at < len(self._text):
                break
        if not parts:
            raise NotACallError
        return "".join(parts)


def loads(text: str) -> object:
    """Decode JSON.

    Raises:
        NotACallError: It is not JSON.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise NotACallError from None
