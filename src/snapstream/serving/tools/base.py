"""What the formats of tool calls have in common."""

from __future__ import annotations

import json
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
        marked: Texts of special tokens that calls are told apart by.
        short_ids: See :class:`~snapstream.serving.tools.events.Sink`.
        always: Whether answers are written in this format even without tools.
    """

    name: ClassVar[str]
    marks: ClassVar[Sequence[str]] = ()
    openings: ClassVar[tuple[str, ...]] = ()
    first_openings: ClassVar[tuple[str, ...]] = ()
    marked: ClassVar[tuple[str, ...]] = ()
    short_ids: ClassVar[bool] = False
    always: ClassVar[bool] = False

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
            return rf"{block} | /\s*([^{first}\s](.|\n)*)?/"
        if write.is_special(self.opening):
            return f"({TEXT} {write.literal(self.opening)} {block})* {TEXT}"
        return f"({write.text_until(re.escape(self.opening))} {block})* {TEXT}"

    def one_of(self, tools: Tools, write: GrammarWriter) -> str:
        """The grammar of a call of any tool."""
        return write.rule(" | ".join(write.rule(self.call(name, schema, write)) for name, schema in tools.items()))

    def before_text(self, write: GrammarWriter) -> str:
        """The grammar of what comes before the text of an answer."""
        return ""

    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str | None:
        """Instructions for a template that has none; ``None`` if calls cannot be asked for in this way."""
        return None


class CallReader:
    """Splits an answer into text and calls, as it comes in.

    Args:
        form: The format of calls.
        tools: The tools that may be called.
        parallel: Whether there may be several calls; if not, further ones are left out.
        strict: Whether calls must be written as grammars write them, so that none escapes its schema.
    """

    def __init__(self, form: ToolFormat, tools: Tools, *, parallel: bool = True, strict: bool = False) -> None:
        self._form, self._tools, self._parallel = form, tools, parallel
        self._source = Source()
        self.sink = Sink(tools, short_ids=form.short_ids, strict=strict)
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
            sink.begun = False
            try:
                yield from self._form.read(source, sink, self._tools)
                is_first = True
            except NotACallError:
                is_first = False
                if not sink.begun:  # since the mark
                    source.back()
                    sink.text(source.take(len(opening)))
            sink.begun = False
            source.mark()

    def _text(self, is_first: bool) -> Reading[str]:
        """Hand on text up to the next opening, which is returned and not read; nothing at the end."""
        source, sink, form = self._source, self.sink, self._form
        if is_first and form.first_openings:
            while (char := (yield from source.char())) and char.isspace():
                sink.text(source.take(1))
            for opening in sorted((*form.first_openings, *form.openings), key=len, reverse=True):
                if (yield from source.starts_with(opening)):
                    return opening
        opening = yield from source.until(form.openings, sink.text)
        source.at -= len(opening)
        return opening


def json_call(source: Source, sink: Sink, *, marked: bool = True) -> Reading[None]:
    """Read a call in JSON, an object with a name and arguments; these are handed on as they come, if they are last.

    Args:
        source: The text.
        sink: Takes the call.
        marked: Whether something has said that it is a call; if not, it must have arguments.

    Raises:
        NotACallError: This is not a call, or there is no such tool.
    """
    yield from source.spaces()
    yield from source.expect("{")
    call = _JsonCall(source, sink)
    while True:
        yield from source.spaces()
        if (yield from source.accept("}")):
            break
        if not (yield from source.accept(",")):
            yield from call.read_member()
    call.end(marked)
    end_call(source, sink)


class _JsonCall:
    """A call in JSON that is being read."""

    def __init__(self, source: Source, sink: Sink) -> None:
        self._source, self._sink = source, sink
        self._name: str | None = None
        self._held: str | None = None
        self._has_begun = False

    def read_member(self) -> Reading[None]:
        """Read a member of the object."""
        source, sink = self._source, self._sink
        if (yield from source.char()) != '"':
            raise NotACallError
        key = loads((yield from source.text_of_value()))
        yield from source.spaces()
        yield from source.expect(":")
        yield from source.spaces()
        wanted = ("name",) if self._name is None else () if self._has_begun else ("arguments", "parameters")
        if sink.strict and key not in wanted:  # grammars write the name first, then the arguments, and nothing else
            raise NotACallError
        if key == "name":
            found = loads((yield from source.text_of_value()))
            sink.check(found)
            self._name = str(found)
        elif key in ("arguments", "parameters") and not self._has_begun:
            if self._name is not None and (yield from source.char()) == "{":
                begin_call(source, sink, self._name)
                self._has_begun = True
                yield from source.value(sink.arguments)
            elif sink.strict:
                raise NotACallError
            else:
                self._held = yield from source.text_of_value()
        else:
            yield from source.text_of_value()

    def end(self, marked: bool) -> None:
        """End the call; see :func:`json_call`."""
        if self._name is None or not (marked or self._has_begun or self._held):
            raise NotACallError
        if not self._has_begun:
            self._sink.call(self._name, _arguments(self._held))


def begin_call(source: Source, sink: Sink, name: str) -> None:
    """Begin a call, which can no longer turn out to be text.

    Raises:
        NotACallError: There is no such tool.
    """
    sink.begin(name)
    source.commit()


def named_call(source: Source, sink: Sink, name: str) -> Reading[None]:
    """Read the arguments of a call whose name has been read, a JSON object.

    Raises:
        NotACallError: Something else comes next, or there is no such tool.
    """
    yield from source.spaces()
    if (yield from source.char()) != "{":
        raise NotACallError
    begin_call(source, sink, name)
    yield from source.value(sink.arguments)


def json_rule(name: str, key: str, schema: Any, write: GrammarWriter) -> str:
    """The grammar of a call in JSON, whose arguments are under ``key``."""
    return f'{write.literal(f"""{{"name": {json.dumps(name)}, "{key}": """)} {write.json(schema)} "}}"'


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


_DEFINITIONS = ("$defs", "definitions")


def members(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The schema of each property, with the definitions it may refer to, and the names of those that are required."""
    properties = schema.get("properties")
    known = {name: inherited(each, schema) for name, each in (properties or {}).items()}
    return known, [name for name in schema.get("required") or () if name in known]


def inherited(inner: Any, outer: Mapping[str, Any]) -> Any:
    """A part of a schema, with the definitions of the whole."""
    shared = {name: outer[name] for name in _DEFINITIONS if name in outer}
    return shared | dict(inner) if shared and isinstance(inner, Mapping) else inner


def referenced(schema: Mapping[str, Any]) -> Any:
    """The definition that a reference names; a schema that allows anything if it is unknown."""
    kind, _, name = str(schema["$ref"]).removeprefix("#/").partition("/")
    known = schema.get(kind) if kind in _DEFINITIONS else None
    return inherited(known.get(name, {}) if isinstance(known, Mapping) else {}, schema)
