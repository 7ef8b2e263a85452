"""Writes answers of OpenAI's ``/v1/responses``."""

from __future__ import annotations

import itertools
import json
import uuid
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, Literal

from pydantic import BaseModel
from typing_extensions import override

from snapstream.engine import RequestOutput
from snapstream.serving.apis.responses import ResponseRequest
from snapstream.serving.call import Call
from snapstream.serving.errors import ApiError
from snapstream.serving.streams import event
from snapstream.serving.tools.events import Arguments, CallBegin, Event, Part, Reasoning, Said, Text
from snapstream.serving.writer import Writer

Item = dict[str, Any]


class InputDetails(BaseModel):
    """Details of the input's tokens."""

    cached_tokens: int


class OutputDetails(BaseModel):
    """Details of the output's tokens; those of reasoning are not counted apart."""

    reasoning_tokens: int


class ResponseUsage(BaseModel):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ResponseAnswer(BaseModel):
    """A response."""

    id: str
    object: Literal["response"] = "response"
    created_at: int
    status: str
    error: dict[str, Any] | None
    incomplete_details: dict[str, Any] | None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[Item]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: Any
    tools: list[dict[str, Any]]
    top_p: float | None
    truncation: str
    usage: ResponseUsage | None
    metadata: dict[str, Any]


class ResponseWriter(Writer):
    """Writes items of reasoning, text, and calls of tools."""

    prefix: ClassVar[str] = "resp_"

    def __init__(
        self, call: Call, request_id: str, created: int, *, body: ResponseRequest, keep: Callable[[str, Said], None]
    ) -> None:
        """Create a writer.

        Args:
            call: See :class:`Writer`.
            request_id: Not used: a response has an id of its own.
            created: See :class:`Writer`.
            body: The request.
            keep: Stores what was said, for later requests, given the response's id.
        """
        # Not the request's id, which clients may choose.
        super().__init__(call, uuid.uuid4().hex, created)
        self._body, self._keep = body, keep
        self._numbers = itertools.count()
        self._items: list[Item] = []
        self._open: str | None = None

    @override
    def whole(self) -> ResponseAnswer:
        (output,) = self.ended()
        for new in self._events_of(self.said[0]):
            for _ in self._add(new):
                pass
        for _ in self._end_item(self._status(output)):
            pass
        self._keep(self.id, self.said[0])
        return self._response(output)

    @override
    def opening(self) -> Iterable[str]:
        yield self._event("response.created", response=self._response(None).model_dump())
        yield self._event("response.in_progress", response=self._response(None).model_dump())

    @override
    def pieces(self, index: int, events: list[Event], output: RequestOutput) -> Iterable[str]:
        for new in events:
            yield from self._add(new)
        if output.finished:
            if not self._items:
                yield from self._add(Text(""))
            yield from self._end_item(self._status(output))
            self._keep(self.id, self.said[0])
            response = self._response(output)
            yield self._event(f"response.{response.status}", response=response.model_dump())

    @override
    def closing(self) -> Iterable[str]:
        return ()

    @staticmethod
    def _events_of(said: Said) -> list[Event]:
        """The events of a whole answer."""
        events: list[Event] = []
        for part in said.parts or [Part("text")]:
            if part.kind == "call":
                events += [CallBegin(0, part.call_id, part.name), Arguments(0, part.text)]
            else:
                events.append(Text(part.text) if part.kind == "text" else Reasoning(part.text))
        return events

    # -- items --------------------------------------------------------------------------------------------------------

    def _add(self, new: Event) -> Iterable[str]:
        """Add to the answer; yields the events."""
        if isinstance(new, Text):
            yield from self._begin_item("message", "msg", role="assistant", content=[])
            part = self._items[-1]["content"]
            if not part:
                part.append({"type": "output_text", "text": "", "annotations": [], "logprobs": []})
                yield self._of_item("response.content_part.added", content_index=0, part=dict(part[0]))
            part[0]["text"] += new.text
            yield self._of_item("response.output_text.delta", content_index=0, delta=new.text, logprobs=[])
        elif isinstance(new, Reasoning):
            yield from self._begin_item("reasoning", "rs", summary=[], content=[])
            part = self._items[-1]["content"]
            if not part:
                part.append({"type": "reasoning_text", "text": ""})
                yield self._of_item("response.content_part.added", content_index=0, part=dict(part[0]))
            part[0]["text"] += new.text
            yield self._of_item("response.reasoning_text.delta", content_index=0, delta=new.text)
        elif isinstance(new, CallBegin):
            yield from self._end_item("completed")
            named = self._body.named(new.name)
            yield from self._begin_item("function_call", "fc", call_id=new.call_id, **named, arguments="")
        else:
            self._items[-1]["arguments"] += new.text
            yield self._of_item("response.function_call_arguments.delta", delta=new.text)

    def _begin_item(self, kind: str, prefix: str, **fields: Any) -> Iterable[str]:
        """Begin an item, unless one of this kind is open."""
        if self._open == kind:
            return
        yield from self._end_item("completed")
        self._open = kind
        name = f"{prefix}_{len(self._items)}_{self.id.removeprefix(self.prefix)}"
        self._items.append({"id": name, "type": kind, "status": "in_progress"} | fields)
        shown = json.loads(json.dumps(self._items[-1]))
        yield self._event("response.output_item.added", output_index=len(self._items) - 1, item=shown)

    def _end_item(self, status: str) -> Iterable[str]:
        """End the open item."""
        if self._open is None:
            return
        item, kind = self._items[-1], self._open
        self._open, item["status"] = None, status
        if kind == "function_call":
            yield self._of_item("response.function_call_arguments.done", arguments=item["arguments"], name=item["name"])
        elif item["content"]:
            part = item["content"][0]
            name = "response.output_text.done" if kind == "message" else "response.reasoning_text.done"
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            yield self._of_item(name, content_index=0, text=part["text"], **more)
            yield self._of_item("response.content_part.done", content_index=0, part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _of_item(self, event_name: str, /, **fields: Any) -> str:
        return self._event(event_name, item_id=self._items[-1]["id"], output_index=len(self._items) - 1, **fields)

    def _event(self, event_name: str, /, **fields: Any) -> str:
        data = {"type": event_name, "sequence_number": next(self._numbers)} | fields
        return event(json.dumps(data, allow_nan=False), event_name)

    # -- the response -------------------------------------------------------------------------------------------------

    @staticmethod
    def _status(output: RequestOutput) -> str:
        return "incomplete" if output.finish_reason == "length" else "completed"

    def _response(self, output: RequestOutput | None) -> ResponseAnswer:
        """The response so far; ``output`` is the last one, once it has ended."""
        body, used = self._body, None
        status = "in_progress" if output is None else self._status(output)
        if output is not None:
            counts = self.call.usage()
            used = ResponseUsage(
                input_tokens=counts.prompt_tokens,
                input_tokens_details=InputDetails(cached_tokens=counts.prompt_tokens_details.cached_tokens),
                output_tokens=counts.completion_tokens,
                output_tokens_details=OutputDetails(reasoning_tokens=0),
                total_tokens=counts.total_tokens,
            )
        shown = {"reasoning", "text", "tool_choice", "tools"}
        given = body.model_dump(by_alias=True, exclude_none=True, include=shown)
        return ResponseAnswer(
            id=self.id,
            object="response",
            created_at=self.created,
            status=status,
            error=None,
            incomplete_details={"reason": "max_output_tokens"} if status == "incomplete" else None,
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            model=self.parts.settings.model_name,
            output=self._items,
            parallel_tool_calls=body.parallel_tool_calls is not False,
            previous_response_id=body.previous_response_id,
            reasoning=given.get("reasoning", {}),
            store=body.store is not False,
            temperature=body.temperature,
            text=given.get("text", {"format": {"type": "text"}}),
            tool_choice=given.get("tool_choice", "auto"),
            tools=given.get("tools", []),
            top_p=body.top_p,
            truncation="disabled",
            usage=used,
            metadata={},
        )

    @staticmethod
    @override
    def error_event(error: ApiError, request_id: str) -> str:
        detail = error.body(request_id)["error"]
        data = {"type": "error", "sequence_number": 0, "code": detail["code"] or detail["type"]}
        data |= {"message": detail["message"], "param": detail["param"]}
        return event(json.dumps(data, allow_nan=False), "error")
