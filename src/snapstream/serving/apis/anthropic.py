"""Requests of Anthropic's ``/v1/messages``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from snapstream.serving.apis.conversion import call_of, chat_request, joined
from snapstream.serving.body import Body, Text, encodable
from snapstream.serving.errors import ApiError
from snapstream.serving.messages import MAX_MESSAGES
from snapstream.serving.pins import Pins
from snapstream.serving.protocol import ChatRequest
from snapstream.serving.tools.definitions import MOST_TOOLS, Name
from snapstream.serving.unsupported import TEXT_ONLY

_UNUSED = frozenset(("cache_control", "citations", "caller", "type"))


class _Block(Body):
    unused: ClassVar[frozenset[str]] = frozenset(("cache_control", "citations"))

    @classmethod
    @override
    def called(cls) -> str:
        return "a content block"


class TextBlock(_Block):
    """Text."""

    type: Literal["text"]
    text: Text


class ThinkingBlock(_Block):
    """The model's reasoning before an earlier answer."""

    type: Literal["thinking"]
    thinking: Text
    signature: Text | None = None


class RedactedBlock(_Block):
    """Reasoning that only its author can read; it is left out."""

    type: Literal["redacted_thinking"]
    data: Any = None


class ToolUseBlock(_Block):
    """A call of a tool in an earlier answer."""

    unused: ClassVar[frozenset[str]] = frozenset(("cache_control", "caller"))

    type: Literal["tool_use"]
    id: Text
    name: Text
    input: dict[str, Any]


class TextDocument(_Block):
    """A document that is plain text."""

    unused: ClassVar[frozenset[str]] = frozenset(("cache_control", "citations", "context"))

    class Source(Body):
        """Its text."""

        type: Literal["text"]
        media_type: Text | None = None
        data: Text

    type: Literal["document"]
    title: Text | None = None
    source: Source


class ToolResultBlock(_Block):
    """What a call of a tool has returned."""

    type: Literal["tool_result"]
    tool_use_id: Text
    content: Text | Annotated[list[TextBlock], Field(fail_fast=True)] | None = None
    is_error: bool | None = None


Texts = Annotated[list[TextBlock], Field(fail_fast=True)]
Block = TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedBlock | TextDocument
_KINDS = frozenset(("text", "thinking", "redacted_thinking", "tool_use", "tool_result", "document"))


class AnthropicMessage(Body):
    """A message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Annotated[Block, Field(discriminator="type")]], Field(fail_fast=True)]

    @model_validator(mode="before")
    @classmethod
    def _known_blocks(cls, data: Any) -> Any:
        content = data.get("content") if isinstance(data, dict) else None
        for block in content if isinstance(content, list) else ():
            kind = block.get("type") if isinstance(block, dict) else None
            if isinstance(kind, str) and kind not in _KINDS:
                raise ValueError(f"a block of type {encodable(kind[:40])!r} is not supported: {TEXT_ONLY}")
        return data

    @classmethod
    @override
    def called(cls) -> str:
        return "a message"


class AnthropicTool(Body):
    """A tool that the model may call."""

    unused: ClassVar[frozenset[str]] = frozenset(
        ("cache_control", "defer_loading", "input_examples", "eager_input_streaming", "allowed_callers")
    )

    type: Literal["custom"] | None = None
    name: Name
    description: Text | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_custom(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind != "custom":
            raise ValueError(f"a tool of type {encodable(kind[:40])!r} runs on Anthropic's servers, not here")
        return data

    @classmethod
    @override
    def called(cls) -> str:
        return "a tool"


class AnthropicChoice(Body):
    """Whether a tool must be called."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(Body):
    """Whether the model reasons, for chat templates that know it."""

    unused: ClassVar[frozenset[str]] = frozenset(("budget_tokens", "display"))

    type: Literal["enabled", "disabled", "adaptive"]


class OutputFormat(Body):
    """The shape of the answer."""

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    """What the answer is like."""

    effort: Text | None = None
    format: OutputFormat | None = None


class CountRequest(Body):
    """Body of ``/v1/messages/count_tokens``."""

    unused: ClassVar[frozenset[str]] = frozenset(
        ("metadata", "service_tier", "cache_control", "betas", "context_management", "container", "inference_geo")
    )
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {"mcp_servers": ([],)}
    reasons: ClassVar[Mapping[str, str]] = {"mcp_servers": "mcp_servers is not supported: nothing is fetched here"}

    model: Text | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    system: Text | Texts | None = None
    tools: Annotated[list[AnthropicTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = Field(None, description="The older place of output_config.format.")

    def fields(self) -> dict[str, Any]:
        """The fields of a chat completion."""
        messages: list[dict[str, Any]] = []
        if self.system:
            messages.append({"role": "system", "content": _text(self.system)})
        for message in self.messages:
            for each in _messages(message):
                joined(messages, each)
        choice, config = self.tool_choice, self.output_config
        form = (config.format if config else None) or self.output_format
        return {
            "model": self.model,
            "messages": messages,
            "tools": None if self.tools is None else [_tool(tool) for tool in self.tools],
            "tool_choice": None if choice is None else _choice(choice),
            "parallel_tool_calls": _parallel(choice),
            "enable_thinking": None if self.thinking is None else self.thinking.type != "disabled",
            "reasoning_effort": config.effort if config else None,
            "response_format": form
            and {"type": "json_schema", "json_schema": {"name": "answer", "schema": form.schema_}},
        }


class MessagesRequest(CountRequest):
    """Body of ``/v1/messages``."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] = Field(description="Maximum number of tokens to generate.")
    stream: bool | None = False
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    stop_sequences: Annotated[list[Text], Field(fail_fast=True)] | None = None
    session_id: Text | None = Field(None, description="See chat completions.")
    kv_budget: Annotated[int, Field(ge=1)] | None = Field(None, description="See chat completions.")
    pin: Pins | None = Field(None, description="See chat completions; messages are counted as converted to them.")

    def as_chat(self) -> ChatRequest:
        """The request for a chat completion.

        Raises:
            ApiError: Something is not possible.
        """
        stops = self.stop_sequences or None
        own = {name: getattr(self, name) for name in ("max_tokens", "stream", "temperature", "top_p", "top_k")}
        own |= {name: getattr(self, name) for name in ("session_id", "kv_budget", "pin")}
        return chat_request(**self.fields(), **own, stop=stops)


def _text(content: Text | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or ())


def _messages(message: AnthropicMessage) -> list[dict[str, Any]]:
    """A message in OpenAI's form, in which results of tools are messages of their own."""
    if isinstance(message.content, str):
        return [{"role": message.role, "content": message.content}]
    results, texts, thoughts, calls = [], list[str](), list[str](), []
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)})
        elif isinstance(block, ToolUseBlock):
            calls.append(call_of(block.id, block.name, json.dumps(block.input, ensure_ascii=False)))
        elif isinstance(block, ThinkingBlock):
            thoughts.append(block.thinking)
        elif isinstance(block, TextDocument):
            texts.append(f"{block.title}\n\n{block.source.data}" if block.title else block.source.data)
        elif isinstance(block, TextBlock):
            texts.append(block.text)
    made: dict[str, Any] = {"role": message.role, "content": "\n".join(texts)}
    if thoughts:
        made["reasoning_content"] = "\n".join(thoughts)
    if calls:
        made["tool_calls"] = calls
    return [*results, made] if texts or calls or not results else results


def _tool(tool: AnthropicTool) -> dict[str, Any]:
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": {**function, "strict": tool.strict}}


def _choice(choice: AnthropicChoice) -> Any:
    if choice.type != "tool":
        return {"auto": "auto", "any": "required", "none": "none"}[choice.type]
    if choice.name is None:
        raise ApiError(400, "tool_choice.name: give the name of the tool to use", param="tool_choice.name")
    return {"type": "function", "function": {"name": choice.name}}


def _parallel(choice: AnthropicChoice | None) -> bool | None:
    wanted = None if choice is None else choice.disable_parallel_tool_use
    return None if wanted is None else not wanted
