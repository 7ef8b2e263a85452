"""Calls as Hermes and Qwen models write them: JSON between tags.

Models that were trained little for it, such as Qwen2.5-Coder, leave the tags out and write the object alone, or in a
block of Markdown.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from typing_extensions import override

from snapstream.serving.tools.base import ToolFormat, Tools, end_call, json_call, json_rule
from snapstream.serving.tools.events import Sink
from snapstream.serving.tools.grammar import TEXT, GrammarWriter
from snapstream.serving.tools.source import NotACallError, Reading, Source

_ENDS = {"<tool_call>": "</tool_call>", "```json": "```", "```": "```"}


class Hermes(ToolFormat):
    """``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``."""

    name = "hermes"
    marks = ("<tool_call>",)
    openings = ("<tool_call>",)
    first_openings = ("```json", "```", "{")
    marked = ("<tool_call>", "</tool_call>")

    @override
    def read(self, source: Source, sink: Sink, tools: Tools) -> Reading[None]:
        end = ""
        for opening, closing in _ENDS.items():
            if (yield from source.accept(opening)):
                end = closing
                break
        yield from source.spaces()
        is_doubled = yield from source.starts_with("{{")  # as some templates have it, by mistake
        if is_doubled:
            source.take(1)
        try:
            yield from json_call(source, sink, marked=end == _ENDS[self.opening])
        except NotACallError:
            if not (sink.begun and end and (yield from source.starts_with(end))):
                raise
            end_call(source, sink)  # a brace is missing
        if is_doubled:
            yield from source.spaces()
            yield from source.accept("}")
        yield from source.spaces()
        if end:
            yield from source.accept(end)

    @property
    @override
    def opening(self) -> str:
        return self.openings[0]

    @override
    def block(self, call: str, write: GrammarWriter) -> str:
        one = write.rule(f'"\\n" {call} {write.literal(chr(10) + _ENDS[self.opening])}')
        return write.repeated(one, write.literal("\n" + self.opening))

    @override
    def may_call(self, tools: Tools, write: GrammarWriter) -> str:
        # With tags, or wherever else the object is: not all models write them.
        def one(name: str, schema: Mapping[str, Any]) -> str:
            before = rf"\{{\s*\"name\"\s*:\s*{re.escape(json.dumps(name))}\s*,\s*\"(arguments|parameters)\"\s*:\s*"
            return write.rule(rf"{write.text_until(before)} {write.json(schema)} /\s*\}}/")

        forms = [one(name, schema) for name, schema in tools.items()]
        if write.is_special(self.opening):  # no text stands for it
            block = write.rule(self.block(self.one_of(tools, write), write))
            forms.append(write.rule(f"{TEXT} {write.literal(self.opening)} {block}"))
        return f"({' | '.join(forms)})* {TEXT}"

    @override
    def call(self, name: str, schema: Mapping[str, Any], write: GrammarWriter) -> str:
        return json_rule(name, "arguments", schema, write)

    @override
    def describe(self, tools: Sequence[Mapping[str, Any]]) -> str:
        listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
        return (
            "# Tools\n\nYou may call one or more of these functions to assist with the request:\n"
            f"<tools>\n{listed}\n</tools>\n\nTo call a function, answer with a JSON object within these tags:\n"
            '<tool_call>\n{"name": "name of the function", "arguments": {"name of an argument": "its value"}}\n'
            "</tool_call>"
        )
