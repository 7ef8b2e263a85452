"""What an answer consists of: text, reasoning, and calls of tools."""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from snapstream.serving.tools.source import NotACallError

_LETTERS = string.ascii_letters + string.digits


class Text(NamedTuple):
    """A piece of text."""

    text: str


class Reasoning(NamedTuple):
    """A piece of the reasoning before the answer."""

    text: str


class CallBegin(NamedTuple):
    """A call begins.

    Attributes:
        number: Its number in the answer.
        call_id: Its id.
        name: The tool.
    """

    number: int
    call_id: str
    name: str


class Arguments(NamedTuple):
    """A piece of the arguments of a call, in JSON."""

    number: int
    text: str


Event = Text | Reasoning | CallBegin | Arguments


@dataclass
class Part:
    """A part of a whole answer.

    Attributes:
        kind: ``text``, ``reasoning`` or ``call``.
        call_id: Id of a call.
        name: The tool of a call.
        pieces: Its text, or the arguments of the call.
    """

    kind: str
    call_id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """Its text."""
        return "".join(self.pieces)

    @property
    def arguments(self) -> str:
        """The arguments of a call."""
        return self.text

    def function(self) -> dict[str, str]:
        """The name and the arguments of a call."""
        return {"name": self.name, "arguments": self.text}


@dataclass
class Said:
    """An answer so far.

    Attributes:
        parts: Its parts, in order.
    """

    parts: list[Part] = field(default_factory=list)

    def add(self, event: Event) -> None:
        """Add what is new."""
        if isinstance(event, CallBegin):
            self.parts.append(Part("call", event.call_id, event.name))
            return
        kind = "text" if isinstance(event, Text) else "reasoning" if isinstance(event, Reasoning) else "call"
        if not self.parts or self.parts[-1].kind != kind:
            self.parts.append(Part(kind))
        self.parts[-1].pieces.append(event.text)

    @property
    def text(self) -> str:
        """The text."""
        return "".join(part.text for part in self.parts if part.kind == "text")

    @property
    def reasoning(self) -> str:
        """The reasoning."""
        return "".join(part.text for part in self.parts if part.kind == "reasoning")

    @property
    def calls(self) -> list[Part]:
        """The calls."""
        return [part for part in self.parts if part.kind == "call"]


class Sink:
    """Collects the events of one answer.

    Attributes:
        strict: Whether calls must be written as grammars write them.
        calls: Number of calls so far.
        begun: Whether the call that is being read has begun, so that it can no longer turn out to be text.
    """

    def __init__(self, tools: Collection[str], *, short_ids: bool = False, strict: bool = False) -> None:
        """Create an empty answer.

        Args:
            tools: Names of the tools that may be called.
            short_ids: Whether ids of calls are nine letters and digits, as Mistral's templates want them.
            strict: See :attr:`strict`.
        """
        self.strict, self.calls, self.begun = strict, 0, False
        self._tools, self._short = tools, short_ids
        self._events: list[Event] = []
        self._spaces, self._after_call = "", False

    def text(self, text: str) -> None:
        """Add text; whitespace around calls is left out."""
        if not text:
            return
        kept = text.rstrip()
        if not kept:
            self._spaces += text
            return
        self._add(Text(kept.lstrip() if self._after_call else self._spaces + kept))
        self._spaces, self._after_call = text[len(kept) :], False

    def reasoning(self, text: str) -> None:
        """Add reasoning."""
        if text:
            self._add(Reasoning(text))

    def begin(self, name: str) -> None:
        """Begin a call.

        Raises:
            NotACallError: There is no such tool.
        """
        self.check(name)
        letters = "".join(secrets.choice(_LETTERS) for _ in range(9 if self._short else 24))
        self._add(CallBegin(self.calls, letters if self._short else f"call_{letters}", name))
        self.calls, self.begun, self._spaces, self._after_call = self.calls + 1, True, "", True

    def check(self, name: object) -> None:
        """Check that a tool exists.

        Raises:
            NotACallError: It does not.
        """
        if not isinstance(name, str) or name not in self._tools:
            raise NotACallError

    def arguments(self, text: str) -> None:
        """Add to the arguments of the call that has begun."""
        if text:
            self._add(Arguments(self.calls - 1, text))

    def call(self, name: str, arguments: str) -> None:
        """Add a whole call."""
        self.begin(name)
        self.arguments(arguments)

    def end(self) -> None:
        """End the answer: whitespace that was held back belongs to its text, unless it follows a call."""
        if self._spaces and not self._after_call:
            self._add(Text(self._spaces))
        self._spaces = ""

    def take(self) -> list[Event]:
        """The new events."""
        new, self._events = self._events, []
        return new

    def _add(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, Text) and isinstance(last, Text):
            self._events[-1] = Text(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            self._events[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            self._events[-1] = Arguments(event.number, last.text + event.text)
        else:
            self._events.append(event)
