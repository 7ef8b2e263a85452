"""Calls as Gemma 4 and FunctionGemma write them. Gemma 3 has no format of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, ClassVar

from typing_extensions import override

from snapstream.serving.tools.base import ToolFormat, Tools, begin_call, end_call, inherited, members, referenced
from snapstream.serving.tools.events import Sink
from snapstream.serving.tools.grammar import GrammarWriter
from snapstream.serving.tools.source import NotACallError, Reading, Source, loads

DEEPEST = 32
"""How deep values may be nested."""


class Gemma(ToolFormat):
    """``<|tool_call>call:name{key:<|"|>text<|"|>,other:1}<tool_call|>``."""

    name = "gemma4"
    marks = ("<|tool_call>",)
    openings = ("<|tool_call>",)
    marked = ("<|tool_call>", "<tool_call|>", '<|"|>')
    closing: ClassVar[str] = "<tool_call|>"
    quote: ClassVar[str] = '<|"|>'

    @override
    def read(self, source: Source, sink: Sink, tools: Tools) -> Reading[None]:
        yield from source.expect(self.openings[0])
        yield from source.expect("call:")
        name = yield from source.name()
        yield from source.expect("{")
        begin_call(source, sink, name)
        sink.arguments("{")
        yield from self._pairs(source, sink, 0)
        sink.arguments("}")
        end_call(source, sink)
        yield from source.accept(self.closing)

    def _pairs(self, source: Source, sink: Sink, depth: int) -> Reading[None]:
        """Read pairs up to the end of the object, which is read."""
        separator = ""
        while True:
            yield from source.spaces()
            if (yield from source.accept("}")):
                return
            yield from source.accept(",")
            yield from source.spaces()
            key = yield from self._key(source)
            yield from source.spaces()
            sink.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
            yield from self._value(source, sink, depth)
            separator = ", "

    def _key(self, source: Source) -> Reading[str]:
        parts: list[str] = []
        if (yield from source.accept(self.quote)):
            yield from source.until((self.quote,), parts.append)
            yield from source.expect(":")
        elif not (yield from source.until((":",), parts.append)):
            raise NotACallError
        return "".join(parts)

    def _value(self, source: Source, sink: Sink, depth: int) -> Reading[None]:
        if depth > DEEPEST:
            raise NotACallError
        if (yield from source.accept(self.quote)):
            sink.arguments('"')
            if not (yield from source.until((self.quote,), lambda text: sink.arguments(_escaped(text)))):
                raise NotACallError
            sink.arguments('"')
        elif (yield from source.accept("{")):
            sink.arguments("{")
            yield from self._pairs(source, sink, depth + 1)
            sink.arguments("}")
        elif (yield from source.accept("[")):
            sink.arguments("[")
            separator = ""
            while True:
                yield from source.spaces()
                if (yield from source.accept("]")):
                    break
                yield from source.accept(",")
                yield from source.spaces()
                sink.arguments(separator)
                yield from self._value(source, sink, depth + 1)
                separator = ", "
            sink.arguments("]")
        else:
            text = yield from source.text_of_value()
            loads(text)
            sink.arguments(text)

    @override
    def block(self, call: str, write: GrammarWriter) -> str:
        return write.repeated(write.rule(f"{call} {write.literal(self.closing)}"), write.literal(self.opening))

    @override
    def call(self, name: str, schema: Mapping[str, Any], write: GrammarWriter) -> str:
        return f"{write.literal(f'call:{name}')} {self._object(schema, write, 0)}"

    def _object(self, schema: Mapping[str, Any], write: GrammarWriter, depth: int) -> str:
        """An object."""
        properties, required = members(schema)
        pairs = {
            key: f"{write.literal(f'{key}:')} {self._typed(each, write, depth)}" for key, each in properties.items()
        }
        return f'"{{" {write.pairs(pairs, required, ",")} "}}"'

    def _typed(self, schema: Any, write: GrammarWriter, depth: int) -> str:
        schema = schema if isinstance(schema, Mapping) else {}
        quote = write.literal(self.quote)
        if "$ref" in schema and depth < DEEPEST:
            return self._typed(referenced(schema), write, depth + 1)
        alternatives = schema.get("anyOf") or schema.get("oneOf")
        if isinstance(alternatives, list) and depth < DEEPEST:
            inner = [self._typed(inherited(each, schema), write, depth + 1) for each in alternatives]
            return f"({' | '.join(map(write.rule, inner))})"
        kind, text = schema.get("type"), f"{quote} /[^<]*/ {quote}"
        if schema.get("enum"):
            made = f"({' | '.join(self._constant(one, write) for one in schema['enum'])})"
        elif kind == "object" and depth < DEEPEST:
            made = self._object(schema, write, depth + 1)
        elif kind == "array" and depth < DEEPEST:
            item = write.rule(self._typed(inherited(schema.get("items"), schema), write, depth + 1))
            made = f'"[" ({item} ("," {item})*)? "]"'
        elif kind in ("integer", "number", "boolean", "null"):
            made = write.json(schema)
        else:
            made = text if kind == "string" else f"({text} | {write.json({'type': ['number', 'boolean', 'null']})})"
        return made

    def _constant(self, value: Any, write: GrammarWriter) -> str:
        return write.literal(f"{self.quote}{value}{self.quote}" if isinstance(value, str) else json.dumps(value))


class FunctionGemma(Gemma):
    """``<start_function_call>call:name{key:<escape>text<escape>}<end_function_call>``."""

    name = "functiongemma"
    marks = ("<start_function_call>",)
    openings = ("<start_function_call>",)
    marked = ("<start_function_call>", "<end_function_call>", "<escape>")
    closing = "<end_function_call>"
    quote = "<escape>"


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
