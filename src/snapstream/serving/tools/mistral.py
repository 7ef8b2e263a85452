"""Calls as Mistral's models write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from snapstream.serving.tools.base import ToolFormat, Tools, end_call, json_call, json_rule, named_call
from snapstream.serving.tools.events import Sink
from snapstream.serving.tools.grammar import GrammarWriter
from snapstream.serving.tools.source import Reading, Source

_OPENING = "[TOOL_CALLS]"


class Mistral(ToolFormat):
    """``[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]``, or since 2025 ``[TOOL_CALLS]name[ARGS]{...}``."""

    name = "mistral"
    marks = (_OPENING,)
    openings = (_OPENING,)
    marked = (_OPENING, "[ARGS]", "[CALL_ID]")
    short_ids = True

    @override
    def read(self, source: Source, sink: Sink, tools: Tools) -> Reading[None]:
        yield from source.expect(_OPENING)
        yield from source.spaces()
        if not (yield from source.accept("[")):
            yield from self._named(source, sink)
            return
        while True:
            yield from json_call(source, sink)
            yield from source.spaces()
            if not (yield from source.accept(",")):
                break
        yield from source.accept("]")

    def _named(self, source: Source, sink: Sink) -> Reading[None]:
        name = yield from source.name()
        sink.check(name)
        if (yield from source.accept("[CALL_ID]")):
            yield from source.name()
        yield from source.accept("[ARGS]")
        yield from named_call(source, sink, name)
        end_call(source, sink)

    @override
    def block(self, call: str, write: GrammarWriter) -> str:
        return f'"[" {write.repeated(call, write.literal(", "))} "]"'

    @override
    def call(self, name: str, schema: Mapping[str, Any], write: GrammarWriter) -> str:
        return json_rule(name, "arguments", schema, write)


class MistralNamed(Mistral):
    """The same, for templates that write ``[TOOL_CALLS]name[ARGS]{...}``."""

    name = "mistral_args"
    marks = ("[ARGS]",)

    @override
    def block(self, call: str, write: GrammarWriter) -> str:
        return write.repeated(call, write.literal(_OPENING))

    @override
    def call(self, name: str, schema: Mapping[str, Any], write: GrammarWriter) -> str:
        return f"{write.literal(name + '[ARGS]')} {write.json(schema)}"
