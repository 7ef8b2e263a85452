"""Calls as Llama 3 writes them: JSON alone, or calls in Python's syntax."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from snapstream.errors import RequestError
from snapstream.serving.tools.base import ToolFormat, Tools, end_call, json_call, json_rule, members
from snapstream.serving.tools.events import Sink
from snapstream.serving.tools.grammar import GrammarWriter
from snapstream.serving.tools.source import NotACallError, Reading, Source

MOST_CHARACTERS = 2**16
"""Length of a value in Python's syntax; longer ones are no calls."""


class LlamaJson(ToolFormat):
    """``{"name": ..., "parameters": {...}}``; several are separated by semicolons."""

    name = "llama3_json"
    marks = ("<|python_tag|>", '"parameters": dictionary of argument name')
    openings = ("<|python_tag|>",)
    marked = openings
    first_openings = ("{",)

    @override
    def read(self, source: Source, sink: Sink, tools: Tools) -> Reading[None]:
        yield from source.accept(self.openings[0])
        yield from json_call(source, sink, marked=False)
        while True:
            yield from source.spaces()
            if not (yield from source.accept(";")):
                break
            yield from json_call(source, sink, marked=False)

    @override
    def block(self, call: str, write: GrammarWriter) -> str:
        return write.repeated(call, write.literal("; "))

    @override
    def call(self, name: str, schema: Mapping[str, Any], write: GrammarWriter) -> str:
        return json_rule(name, "parameters", schema, write)


class Pythonic(ToolFormat):
    """``[name(argument=value, ...), ...]``: Llama 3.2 and 4, and Gemma 3 as its documentation asks it to."""

    name = "pythonic"
    marks = ("<|python_start|>", "[func_name1(")
    openings = ("<|python_start|>",)
    marked = ("<|python_start|>", "<|python_end|>")
    first_openings = ("[",)

    @override
    def read(self, source: Source, sink: Sink, tools: Tools) -> Reading[None]:
        yield from source.accept(self.openings[0])
        yield from source.expect("[")
        while True:
            yield from source.spaces()
            yield from self._call(source, sink)
            yield from source.spaces()
            if not (yield from source.accept(",")):
                break
        yield from source.accept("]")
        yield from source.accept("<|python_end|>")

    def _call(self, source: Source, sink: Sink) -> Reading[None]:
        name = yield from source.name()
        yield from source.expect("(")
        sink.check(name)
        pairs: list[str] = []
        while True:
            yield from source.spaces()
            if (yield from source.accept(")")):
                break
            key = yield from source.name()
            yield from source.spaces()
            yield from source.expect("=")
            pairs.append(f"{json.dumps(key)}: {_literal((yield from _until_comma(source)))}")
            yield from source.accept(",")
        sink.call(name, f"{{{', '.join(pairs)}}}")
        end_call(source, sink)

    @override
    def block(self, call: str, write: GrammarWriter) -> str:
        return f'"[" {write.repeated(call, write.literal(", "))} "]"'

    @override
    def call(self, name: str, schema: Mapping[str, Any], write: GrammarWriter) -> str:
        properties, required = members(schema)
        odd = next((each for each in properties if not (each.isidentifier() and each.isascii())), None)
        if odd is not None:
            raise RequestError(f"the tool {name!r}: an argument named {odd[:64]!r} cannot be written in this format")
        arguments = {key: f"{write.literal(f'{key}=')} {write.json(each)}" for key, each in properties.items()}
        return f'{write.literal(name + "(")} {write.pairs(arguments, required, ", ")} ")"'


_ENDS = re.compile(r"""[,()\[\]{}"']""")


def _until_comma(source: Source) -> Reading[str]:
    """Read a value in Python's syntax, up to the comma or parenthesis after it."""
    parts: list[str] = []
    depth, length = 0, 0
    while length < MOST_CHARACTERS:
        char = yield from source.char()
        if not char:
            raise NotACallError
        if char in "\"'":
            text = yield from _quoted(source, char)
        elif char in "([{":
            depth, text = depth + 1, source.take(1)
        elif char in ")]}" and depth:
            depth, text = depth - 1, source.take(1)
        elif char in ",)" and not depth:
            return "".join(parts)
        else:
            there = source.there()
            found = _ENDS.search(there, 1)
            text = source.take(found.start() if found else len(there))
        parts.append(text)
        length += len(text)
    raise NotACallError


def _quoted(source: Source, quote: str) -> Reading[str]:
    parts = [source.take(1)]
    for _ in range(MOST_CHARACTERS):
        char = yield from source.char()
        if not char:
            raise NotACallError
        parts.append(source.take(1))
        if char == quote:
            return "".join(parts)
        if char == "\\":
            yield from source.char()
            parts.append(source.take(1))
    raise NotACallError


def _literal(text: str) -> str:
    """JSON of a value in Python's syntax, or in JSON's."""
    try:
        return json.dumps(ast.literal_eval(text.strip()), ensure_ascii=False, allow_nan=False)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass
    try:
        return json.dumps(json.loads(text), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        raise NotACallError from None
