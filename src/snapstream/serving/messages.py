"""Messages of a conversation: the format that clients send, and the format that chat templates expect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from snapstream.serving.body import Body, Text, encodable
from snapstream.serving.unsupported import TEXT_ONLY

MAX_MESSAGES = 10_000
_NOTHING: Sequence[Any] = ("", [], {}, False)
"""Empty values of a field, besides null."""


class TextPart(Body):
    """A text part of a message."""

    unused: ClassVar[frozenset[str]] = frozenset(("cache_control", "id"))
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {"annotations": _NOTHING, "citations": _NOTHING}

    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "text":
            raise ValueError(f"a part of type {encodable(kind[:40])!r} is not supported: {TEXT_ONLY}")
        return data

    @classmethod
    @override
    def called(cls) -> str:
        return "a text part"


class Message(Body):
    """One message of a conversation.

    Clients send back the messages of servers with all their fields, so unsupported fields are accepted if empty.
    """

    unused: ClassVar[frozenset[str]] = frozenset(("id", "cache_control"))
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {
        "annotations": _NOTHING,
        "audio": _NOTHING,
        "function_call": _NOTHING,
        "images": _NOTHING,
        "parsed": _NOTHING,
        "prefix": _NOTHING,
        "provider_specific_fields": (*_NOTHING, {"refusal": None}),
        "reasoning_details": _NOTHING,
        "refusal": _NOTHING,
        "thinking_blocks": _NOTHING,
    }
    reasons: ClassVar[Mapping[str, str]] = {
        "annotations": "annotations are not passed to the model; leave them out",
        "audio": f"audio is not supported: {TEXT_ONLY}",
        "function_call": "function_call is not supported; use tool_calls",
        "images": f"images are not supported: {TEXT_ONLY}",
        "prefix": "a message cannot be continued: the model starts a new answer; /v1/completions continues a text",
        "refusal": "a refusal is not passed to the model; give its text as content, or leave it out",
    }

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Text | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: Text | None = None
    tool_calls: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = Field(
        None, description="Passed to the chat template, if it supports them."
    )
    tool_call_id: Text | None = None
    reasoning_content: Text | None = Field(
        None, description="The model's reasoning before an earlier answer, for templates that support it."
    )
    reasoning: Text | None = Field(None, description="Another name for reasoning_content.")

    @classmethod
    @override
    def called(cls) -> str:
        return "a message"

    @property
    def text(self) -> str:
        """The content as a single text."""
        parts = self.content
        return "\n".join(part.text for part in parts) if isinstance(parts, list) else parts or ""

    def for_template(self, *, objects: bool = True) -> dict[str, Any]:
        """The message as chat templates expect it: content is a single text, and arguments of tool calls are objects.

        Args:
            objects: Whether to decode arguments, which are JSON in a string. Most templates serialize them themselves
                or iterate over their items; a few (DeepSeek's) insert the string into the prompt unchanged.
        """
        fields = self.model_dump(exclude_none=True, exclude={"reasoning", "reasoning_content"})
        thought = self.reasoning_content or self.reasoning
        if thought:
            fields |= {"reasoning_content": thought, "reasoning": thought}
        if objects and self.tool_calls:
            fields["tool_calls"] = [_with_objects(call) for call in self.tool_calls]
        return fields | {"content": self.text}


Messages = Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
TemplateVariables = Annotated[dict[str, Any], Field(max_length=64)]


def _with_objects(call: dict[str, Any]) -> dict[str, Any]:
    """Decode the arguments of a tool call, unless they are not a JSON object, which models may also write."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"].strip() or "{}")
    except (ValueError, RecursionError):
        return call
    return call | {"function": function | {"arguments": arguments}} if isinstance(arguments, dict) else call
