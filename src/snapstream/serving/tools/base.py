"""What the formats of tool calls have in common."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from snapstream.serving.tools.events import Arguments, CallBegin, Event, Sink
from snapstream.serving.tools.grammar import TEXT, GrammarWriter
from snapstream.serving.tools.source import NotACallError, Reading, Source, loads

Tools = Mapping[str, Mapping[str, Any]]
"""The JSON schema of the arguments of each tool."""


class ToolFormat(ABC):
    """How a family of models writes calls of tools.

    Attributes:
        name: Its name.
        marks: Texts in a chat template that tell the format.
        openings: What calls begin with, wherever they are; the first one is how grammars begin them.
        first_openings: What they also begin with at the beginning of an answer, and after another call.
        short_ids: See :class:`~snapstream.serving.tools.events.Sink`.
    """

    name: ClassVar[str]
    marks: ClassVar[Sequence[str]] = ()
    openings: ClassVar[tuple[str, ...]] = ()
    first_openings: ClassVar[tuple[str, ...]] = ()
    short_ids: ClassVar[bool] = False

    @abstractmethod
    def read(self, source: Source, sink: Sink, tools: Tools) -> Reading[None]:
        """Read one or several calls, from an opening on; :meth:`Source.mark` after each.

        Raises:
            NotACallError: It is no call.
        """

    @abstractmethod
    def block(self, call: str, write: GrammarWriter) -> str:
        """The grammar of a block of calls after its opening, given that of one call."""

    @abstractmethod
    def call(self, name: str, schema: Mapping[str, Any], write: GrammarWriter) -> str:
        """The grammar of one call."""

    @property
    def opening(self) -> str:
        """What a block of calls begins with; empty if an answer consists of calls alone."""
        return "" if self.first_openings else self.openings[0]

    def must_call(self, tools: Tools, write: GrammarWriter) -> str:
        """The grammar of an answer that calls tools."""
        return f"{write.literal(self.opening)} {self.block(self.one_of(tools, write), write)}"

    def may_call(self, tools: Tools, write: GrammarWriter) -> str:
        """The grammar of any answer in which calls fit the schemas of their tools."""
        block = write.rule(self.block(self.one_of(tools, write), write))
        if not self.opening:
            first = re.escape("".join(each[0] for each in self.first_openings))
            return rf"{block} | /([^{first}](.|\n)*)?/"
        if write.is_special(self.opening):
            return f"({TEXT} {write.literal(self.opening)} {block})* {TEXT}"
        return f"({write.text_until(re.escape(self.opening))} {block})* {TEXT}"

    def one_of(self, tools: Tools, write: GrammarWriter) -> str:
        """The grammar of a call of any tool."""
        return write.rule(" | ".join(write.rule(self.call(name, schema, write)) for name, schema in tools.items()))

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str | None:
        """Instructions for a template that has none; ``None`` if calls cannot be asked for in this way."""
        return None


class CallReader:
    """Splits an answer into text and calls, as it comes in.

    Args:
        form: The format of calls.
        tools: The tools that may be called.
        parallel: Whether there may be several calls; if not, further ones are left out.
    """

    def __init__(self, form: ToolFormat, tools: Tools, *, parallel: bool = True) -> None:
        self._form, self._tools, self._parallel = form, tools, parallel
        self._source = Source()
        self.sink = Sink(tools, short_ids=form.short_ids)
        self._reading = self._read()

    def feed(self, text: str, *, last: bool = False) -> list[Event]:
        """Take what comes next; ``last`` says that it is the end."""
        self._source.put(text)
        self._source.ended = last
        next(self._reading, None)
        if last:
            self.sink.end()
        events = self.sink.take()
        if self._parallel:
            return events
        return [each for each in events if not isinstance(each, CallBegin | Arguments) or each.number == 0]

    def _read(self) -> Reading[None]:
        source, sink, is_first = self._source, self.sink, True
        while (yield from source.char()):
            opening = yield from self._text(is_first)
            if not opening:
                continue
            source.mark()
            try:
                sink.begun = False
                yield from self._form.read(source, sink, self._tools)
                is_first = True
            except NotACallError:
                if not sink.begun:  # since the mark
                    source.back()
                    is_first = sink.calls > 0
                    if (yield from source.starts_with(opening)):
                        sink.text(source.take(len(opening)))
                    is_first = False
            sink.begun = False
            source.mark()

    def _text(self, is_first: bool) -> Reading[str]:
        """Hand on text up to the next opening, which is returned and not read; nothing at the end."""
        source, sink = self._source, self.sink
        if is_first and self._form.first_openings:
            spaces = 0
            while (char := (yield from source.char())) and char.isspace():
                sink.text(source.take(1))
                spaces += 1
            for opening in sorted((*self._form.first_openings, *self._form.openings), key=len, reverse=True):
                if (yield from source.starts_with(opening)):
                    return opening
        opening = yield from source.until(self._form.openings or ("\0",), sink.text)
        source.at -= len(opening)
        source.mark()
        return opening


def json_call(source: Source, sink: Sink) -> Reading[None]:
    """Read a call in JSON, an object with a name and arguments; these are handed on as they come, if they are last.

    Raises:
        NotACallError: It is none, or there is no such tool.
    """
    yield from source.spaces()
    yield from source.expect("{")
    name: str | None = None
    held: str | None = None
    has_begun = False
    while True:
        yield from source.spaces()
        if (yield from source.accept("}")):
            break
        if (yield from source.accept(",")):
            continue
        if (yield from source.char()) != '"':
            raise NotACallError
        key = loads((yield from source.text_of_value()))
        yield from source.spaces()
        yield from source.expect(":")
        yield from source.spaces()
        if key in ("arguments", "parameters") and not has_begun:
            if name is not None and (yield from source.char()) == "{":
                sink.begin(name)
                has_begun = True
                yield from source.value(sink.arguments)
            else:
                held = yield from source.text_of_value()
        elif key == "name":
            found = loads((yield from source.text_of_value()))
            sink.check(found)
            name = str(found)
        else:
            yield from source.text_of_value()
    if name is None:
        raise NotACallError
    if not has_begun:
        sink.call(name, _arguments(held))
    end_call(source, sink)


def end_call(source: Source, sink: Sink) -> None:
    """What has been read is a call, whatever follows."""
    source.mark()
    sink.begun = False


def _arguments(text: str | None) -> str:
    """Arguments as a JSON object, which may have been written as a string."""
    value = {} if text is None else loads(text)
    if isinstance(value, str):
        text, value = value, loads(value)
    if value is None:
        text, value = None, {}
    if not isinstance(value, dict):
        raise NotACallError
    return text or "{}"
