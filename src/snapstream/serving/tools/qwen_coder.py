"""Calls as Qwen3-Coder writes them: functions and parameters in tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from snapstream.serving.tools.base import ToolFormat, Tools, begin_call, end_call, members
from snapstream.serving.tools.events import Sink
from snapstream.serving.tools.grammar import GrammarWriter
from snapstream.serving.tools.source import NotACallError, Reading, Source


class QwenCoder(ToolFormat):
    """``<tool_call><function=name><parameter=key>value</parameter></function></tool_call>``."""

    name = "qwen3_coder"
    marks = ("<function=",)
    openings = ("<tool_call>", "<function=")
    marked = ("<tool_call>", "</tool_call>")

    @override
    def read(self, source: Source, sink: Sink, tools: Tools) -> Reading[None]:
        yield from source.accept("<tool_call>")
        yield from source.spaces()
        yield from source.expect("<function=")
        name = yield from source.name()
        yield from source.expect(">")
        begin_call(source, sink, name)
        sink.arguments("{")
        (properties, _), separator = members(tools[name]), ""
        while True:
            yield from source.spaces()
            if not (yield from source.accept("<parameter=")):
                break
            letters: list[str] = []
            parts: list[str] = []
            yield from source.until((">",), letters.append)
            key = "".join(letters)
            if not (yield from source.until(("</parameter>",), parts.append)):
                raise NotACallError
            value = _value("".join(parts), properties.get(key))
            sink.arguments(f"{separator}{json.dumps(key, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}")
            separator = ", "
        sink.arguments("}")
        end_call(source, sink)
        yield from source.accept("</function>")
        yield from source.spaces()
        yield from source.accept("</tool_call>")

    @override
    def block(self, call: str, write: GrammarWriter) -> str:
        one = write.rule(f'"\\n" {call} {write.literal(chr(10) + "</tool_call>")}')
        return write.repeated(one, write.literal("\n" + self.opening))

    @override
    def call(self, name: str, schema: Mapping[str, Any], write: GrammarWriter) -> str:
        properties, required = members(schema)
        parts = {each: write.rule(self._parameter(each, properties[each], write)) for each in properties}
        needed = " ".join(parts[each] for each in required)
        optional = " | ".join(parts[each] for each in properties if each not in required)
        rest = f"({optional}){{0,{len(properties) - len(required)}}}" if optional else ""
        return f"{write.literal(f'<function={name}>{chr(10)}')} {needed} {rest} {write.literal('</function>')}"

    def _parameter(self, name: str, schema: Any, write: GrammarWriter) -> str:
        if _is_text(schema):
            choices = schema.get("enum") if isinstance(schema, Mapping) else None
            value = " | ".join(write.literal(str(one)) for one in choices) if choices else r"/[^<]*/"
        else:
            value = write.json(schema)
        before, after = f"<parameter={name}>\n", "\n</parameter>\n"
        return f"{write.literal(before)} ({value}) {write.literal(after)}"


def _is_text(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _value(text: str, schema: Any) -> Any:
    """A value as its schema has it: text, or JSON if it is any."""
    text = text.removeprefix("\n").removesuffix("\n")
    if not _is_text(schema):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            pass
    return text
