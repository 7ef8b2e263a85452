"""Answers of gpt-oss, which writes everything in channels (harmony)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import override

from snapstream.serving.tools.base import ToolFormat, Tools, begin_call, end_call
from snapstream.serving.tools.events import Sink
from snapstream.serving.tools.grammar import TEXT, GrammarWriter
from snapstream.serving.tools.source import NotACallError, Reading, Source

_CHANNEL, _MESSAGE, _START, _CONSTRAIN = "<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_TOOL = "to=functions."
_ASIDES = ("analysis", "commentary")


class GptOss(ToolFormat):
    """``<|channel|>commentary to=functions.name <|constrain|>json<|message|>{...}<|call|>``."""

    name = "gpt_oss"
    marks = (_CHANNEL,)
    openings = (_CHANNEL, _START)
    opening = ""
    always = True
    marked = (_CHANNEL, _MESSAGE, _START, _CONSTRAIN, *_ENDS)

    @override
    def read(self, source: Source, sink: Sink, tools: Tools) -> Reading[None]:
        header: list[str] = []
        if (yield from source.accept(_START)):  # the role, and perhaps a tool, come before the channel
            yield from source.until((_CHANNEL,), header.append)
            header.append(" ")
        else:
            yield from source.expect(_CHANNEL)
        if not (yield from source.until((_MESSAGE,), header.append)):
            raise NotACallError
        head = "".join(header)
        name = head.partition(_TOOL)[2].partition("<")[0].split()
        if name and name[0] in tools:
            begin_call(source, sink, name[0])
            yield from source.until(_ENDS, sink.arguments)
            end_call(source, sink)
        elif "analysis" in head:
            source.commit()
            yield from source.until(_ENDS, sink.reasoning)
        else:
            source.commit()
            yield from source.until(_ENDS, sink.text)
        source.mark()

    @override
    def block(self, call: str, write: GrammarWriter) -> str:
        return f"{self._asides(write, 'analysis')} {call}"  # a call ends the answer

    @override
    def may_call(self, tools: Tools, write: GrammarWriter) -> str:
        return f"{self._asides(write, *_ASIDES)} ({self.one_of(tools, write)} | {self._final(write)} {TEXT})"

    @override
    def before_text(self, write: GrammarWriter) -> str:
        return f"{self._asides(write, *_ASIDES)} {self._final(write)}"

    def _asides(self, write: GrammarWriter, *names: str) -> str:
        """Channels before the one of the answer."""
        heads = [write.literal(f"{_CHANNEL}{name}{_MESSAGE}") for name in names]
        end = write.literal(f"{_ENDS[0]}{_START}assistant")
        return write.rule(f"({' | '.join(heads)}) {TEXT} {end}") + "*"

    def _final(self, write: GrammarWriter) -> str:
        return write.literal(f"{_CHANNEL}final{_MESSAGE}")

    @override
    def call(self, name: str, schema: Mapping[str, Any], write: GrammarWriter) -> str:
        head = f"{_CHANNEL}commentary {_TOOL}{name} {_CONSTRAIN}json{_MESSAGE}"
        return f"{write.literal(head)} {write.json(schema)} {write.literal(_ENDS[2])}"
