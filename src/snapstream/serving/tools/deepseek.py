"""Calls as DeepSeek V3 and R1 write them, and V3.1."""
# ruff: noqa: RUF001

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from snapstream.serving.tools.base import ToolFormat, Tools, end_call, named_call
from snapstream.serving.tools.events import Sink
from snapstream.serving.tools.grammar import GrammarWriter
from snapstream.serving.tools.source import Reading, Source

_CALLS, _END_OF_CALLS = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _SEPARATOR, _END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"


class DeepSeek31(ToolFormat):
    """``<｜tool▁call▁begin｜>name<｜tool▁sep｜>{...}<｜tool▁call▁end｜>`` within a block."""

    name = "deepseek_v31"
    marks = (_CALLS,)
    openings = (_CALLS, _CALL)
    marked = (_CALLS, _END_OF_CALLS, _CALL, _SEPARATOR, _END)

    @override
    def read(self, source: Source, sink: Sink, tools: Tools) -> Reading[None]:
        yield from source.accept(_CALLS)
        yield from source.spaces()
        yield from source.expect(_CALL)
        while True:
            yield from self._call(source, sink)
            yield from source.spaces()
            if not (yield from source.accept(_CALL)):
                break
        yield from source.accept(_END_OF_CALLS)

    def _call(self, source: Source, sink: Sink) -> Reading[None]:
        name = yield from source.name()
        yield from source.expect(_SEPARATOR)
        is_fenced = name == "function"
        if is_fenced:  # V3 and R1
            name = yield from source.name()
            yield from source.spaces()
            is_fenced = yield from source.accept("```json")
        yield from named_call(source, sink, name)
        yield from source.spaces()
        if is_fenced:
            yield from source.accept("```")
        yield from source.accept(_END)
        end_call(source, sink)

    @override
    def block(self, call: str, write: GrammarWriter) -> str:
        return f"{write.repeated(call)} {write.literal(_END_OF_CALLS)}"

    @override
    def call(self, name: str, schema: Mapping[str, Any], write: GrammarWriter) -> str:
        return f"{write.literal(_CALL + name + _SEPARATOR)} {write.json(schema)} {write.literal(_END)}"


class DeepSeek(DeepSeek31):
    """``<｜tool▁call▁begin｜>function<｜tool▁sep｜>name``, and the arguments in a block of Markdown."""

    name = "deepseek"
    marks = ("```json",)

    @override
    def call(self, name: str, schema: Mapping[str, Any], write: GrammarWriter) -> str:
        before, after = f"{_CALL}function{_SEPARATOR}{name}\n```json\n", f"\n```{_END}"
        return f"{write.literal(before)} {write.json(schema)} {write.literal(after)}"

    @override
    def block(self, call: str, write: GrammarWriter) -> str:
        return f"{write.repeated(call, write.literal(chr(10)))} {write.literal(_END_OF_CALLS)}"
