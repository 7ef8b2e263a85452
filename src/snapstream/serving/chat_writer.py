"""Writes answers of ``/v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typing_extensions import override

from snapstream.engine import RequestOutput
from snapstream.serving.answers import (
    CalledFunction,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatPart,
    ToolCall,
    ToolCallPart,
)
from snapstream.serving.tools.events import CallBegin, Event, Reasoning, Said, Text
from snapstream.serving.writer import OpenAIWriter


class ChatWriter(OpenAIWriter):
    """Writes messages of the assistant: reasoning, text, and calls of tools."""

    prefix = "chatcmpl-"

    @override
    def whole(self) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=_message(self.said[index]),
                logprobs=self._new_logprobs(index, output),
                finish_reason=self.finish_reason(index, output),
                stop_reason=output.stopped_by,
                **self.cache(output),
            )
            for index, output in enumerate(self.ended())
        ]
        return ChatCompletion(
            **self.frame, object="chat.completion", choices=choices, usage=self.call.usage(), **self.session()
        )

    @override
    def chunk(self, choices: list[Any], **more: Any) -> ChatChunk:
        return ChatChunk(**self.frame, object="chat.completion.chunk", choices=choices, **more)

    @override
    def opening(self) -> Iterable[str]:
        for index in range(len(self.said)):
            first = ChatDelta(role="assistant", content="")
            yield self.send(ChatPart(index=index, delta=first, logprobs=None, finish_reason=None))

    @override
    def pieces(self, index: int, events: list[Event], output: RequestOutput) -> Iterable[str]:
        deltas = [_delta(each) for each in events]
        if not deltas and self.call.logprobs is not None and not output.finished:
            deltas = [ChatDelta(content="")]  # text is held back, but its log-probabilities are not
        logprobs = self._new_logprobs(index, output) if deltas else None
        for delta in deltas:
            yield self.send(ChatPart(index=index, delta=delta, logprobs=logprobs, finish_reason=None))
            logprobs = None
        if output.finished:
            last = ChatPart(
                index=index,
                delta=ChatDelta(),
                logprobs=self._new_logprobs(index, output),
                finish_reason=self.finish_reason(index, output),
                stop_reason=output.stopped_by,
                **self.cache(output),
            )
            yield self.send(last, **self.session())

    def _new_logprobs(self, index: int, output: RequestOutput) -> ChatLogprobs | None:
        return None if self.call.logprobs is None else self.logprobs[index].chat(output)


def _message(said: Said) -> ChatAnswer:
    more: dict[str, Any] = {}
    if said.reasoning:
        more = {"reasoning_content": said.reasoning, "reasoning": said.reasoning}
    if said.calls:
        more["tool_calls"] = [
            ToolCall(id=each.call_id, type="function", function=CalledFunction(**each.function()))
            for each in said.calls
        ]
    return ChatAnswer(role="assistant", content=said.text or (None if said.calls else ""), **more)


def _delta(new: Event) -> ChatDelta:
    if isinstance(new, Text):
        return ChatDelta(content=new.text)
    if isinstance(new, Reasoning):
        return ChatDelta(reasoning_content=new.text, reasoning=new.text)
    if isinstance(new, CallBegin):
        begun = CalledFunction(name=new.name, arguments="")
        return ChatDelta(tool_calls=[ToolCallPart(index=new.number, id=new.call_id, type="function", function=begun)])
    return ChatDelta(tool_calls=[ToolCallPart(index=new.number, function=CalledFunction(arguments=new.text))])
