"""Writes answers of Anthropic's ``/v1/messages``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from pydantic import BaseModel
from typing_extensions import override

from snapstream.engine import RequestOutput
from snapstream.serving.errors import ApiError
from snapstream.serving.streams import event
from snapstream.serving.tools.events import CallBegin, Event, Part, Reasoning, Text
from snapstream.serving.writer import Writer


class AnthropicUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class AnthropicAnswer(BaseModel):
    """The answer to a conversation."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage


class TokenCount(BaseModel):
    """The length of a prompt."""

    input_tokens: int


_REASONS = {"length": "max_tokens", "tool_calls": "tool_use", "stop": "end_turn"}


class AnthropicWriter(Writer):
    """Writes blocks of reasoning, text, and calls of tools."""

    prefix: ClassVar[str] = "msg_"

    @override
    def whole(self) -> AnthropicAnswer:
        (output,) = self.ended()
        content: list[dict[str, Any]] = []
        for part in self.said[0].parts or [Part("text")]:
            if part.kind == "call":
                block = {"id": part.call_id, "name": part.name, "input": _object(part.text)}
                content.append({"type": "tool_use"} | block)
            elif part.kind == "text":
                content.append({"type": "text", "text": part.text})
            else:
                content.append({"type": "thinking", "thinking": part.text, "signature": ""})
        return self._message(content, output)

    @override
    def opening(self) -> Iterable[str]:
        self._open: str | None = None
        self._blocks = 0
        message = self._message([], None).model_dump()
        yield _event("message_start", message=message)
        yield _event("ping")

    @override
    def pieces(self, index: int, events: list[Event], output: RequestOutput) -> Iterable[str]:
        for new in events:
            if isinstance(new, Text):
                yield from self._in_block("text", {"type": "text", "text": ""})
                yield self._delta(type="text_delta", text=new.text)
            elif isinstance(new, Reasoning):
                yield from self._in_block("thinking", {"type": "thinking", "thinking": "", "signature": ""})
                yield self._delta(type="thinking_delta", thinking=new.text)
            elif isinstance(new, CallBegin):
                block = {"type": "tool_use", "id": new.call_id, "name": new.name, "input": {}}
                yield from self._in_block(new.call_id, block)
            else:
                yield self._delta(type="input_json_delta", partial_json=new.text)
        if output.finished:
            if not self._blocks:  # clients expect a block
                yield from self._in_block("text", {"type": "text", "text": ""})
            yield from self._close()
            last = self._message([], output)
            delta = {"stop_reason": last.stop_reason, "stop_sequence": last.stop_sequence}
            yield _event("message_delta", delta=delta, usage=last.usage.model_dump())

    @override
    def closing(self) -> Iterable[str]:
        yield _event("message_stop")

    def _in_block(self, kind: str, block: dict[str, Any]) -> Iterable[str]:
        """Begin a block, unless one of this kind is open."""
        if self._open == kind:
            return
        yield from self._close()
        self._open, self._blocks = kind, self._blocks + 1
        yield _event("content_block_start", index=self._blocks - 1, content_block=block)

    def _close(self) -> Iterable[str]:
        if self._open is not None:
            yield _event("content_block_stop", index=self._blocks - 1)
            self._open = None

    def _delta(self, **delta: Any) -> str:
        return _event("content_block_delta", index=self._blocks - 1, delta=delta)

    def _message(self, content: list[dict[str, Any]], output: RequestOutput | None) -> AnthropicAnswer:
        reason = stopped = None
        if output is not None:
            stopped = output.stopped_by if isinstance(output.stopped_by, str) else None
            reason = "stop_sequence" if stopped is not None else _REASONS.get(str(self.finish_reason(0, output)))
        used = self.call.usage()
        cached = used.prompt_tokens_details.cached_tokens
        return AnthropicAnswer(
            id=self.id,
            model=self.parts.settings.model_name,
            content=content,
            stop_reason=reason,
            stop_sequence=stopped,
            usage=AnthropicUsage(
                input_tokens=used.prompt_tokens - cached,
                cache_creation_input_tokens=0,
                cache_read_input_tokens=cached,
                output_tokens=used.completion_tokens,
            ),
            type="message",
            role="assistant",
        )

    @staticmethod
    @override
    def error_event(error: ApiError, request_id: str) -> str:
        return event(json.dumps(error.body(request_id, anthropic=True), allow_nan=False), "error")


def _event(name: str, **fields: Any) -> str:
    return event(json.dumps({"type": name} | fields, allow_nan=False), name)


def _object(arguments: str) -> dict[str, Any]:
    """Arguments as an object; those that are cut off or broken as text in one."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return {"invalid_json": arguments}
    return value if isinstance(value, dict) else {"value": value}
