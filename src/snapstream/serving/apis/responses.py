"""Requests of OpenAI's ``/v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, model_validator
from typing_extensions import override

from snapstream.serving.apis.conversion import call_of, chat_request, joined
from snapstream.serving.body import Body, Text, encodable
from snapstream.serving.errors import ApiError
from snapstream.serving.messages import MAX_MESSAGES, TemplateVariables
from snapstream.serving.pins import Pins
from snapstream.serving.protocol import ChatRequest
from snapstream.serving.tools.definitions import MOST_TOOLS, Name
from snapstream.serving.unsupported import TEXT_ONLY

_TEXTS = frozenset(("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal"))
_ITEMS = frozenset(("message", "function_call", "function_call_output", "reasoning"))
_HOSTED = (
    "web_search",
    "file_search",
    "code_interpreter",
    "image_generation",
    "computer",
    "mcp",
    "local_shell",
    "shell",
)
"""Beginnings of the types of tools that run on OpenAI's servers or in its clients; the model is not shown them."""


class Part(Body):
    """A part of a message: text."""

    unused: ClassVar[frozenset[str]] = frozenset(("annotations", "logprobs"))

    type: Text
    text: Text | None = None
    refusal: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _only_text(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in _TEXTS:
            raise ValueError(f"a part of type {encodable(kind[:40])!r} is not supported: {TEXT_ONLY}")
        return data

    @classmethod
    @override
    def called(cls) -> str:
        return "a part"


Content = Text | Annotated[list[Part], Field(fail_fast=True)]


class Item(Body):
    """A message, a call, the output of a call, or earlier reasoning."""

    unused: ClassVar[frozenset[str]] = frozenset(("id", "status", "encrypted_content", "phase"))

    type: Literal["message", "function_call", "function_call_output", "reasoning"] = "message"
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: Content | None = None
    call_id: Text | None = None
    name: Text | None = None
    namespace: Text | None = None
    arguments: Text | None = None
    output: Content | None = None
    summary: Annotated[list[Part], Field(fail_fast=True)] | None = None

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind not in _ITEMS:
            raise ValueError(f"an item of type {encodable(kind[:40])!r} is not supported")
        return data

    @model_validator(mode="after")
    def _complete(self) -> Item:
        needed = {
            "message": ("role", "content"),
            "function_call": ("call_id", "name", "arguments"),
            "function_call_output": ("call_id", "output"),
            "reasoning": (),
        }[self.type]
        missing = [name for name in needed if getattr(self, name) is None]
        if missing:
            raise ValueError(f"an item of type {self.type!r} needs {missing[0]}")
        return self

    @classmethod
    @override
    def called(cls) -> str:
        return "an item"

    def message(self) -> dict[str, Any]:
        """The item as a message of a chat completion."""
        if self.type == "function_call":
            call = call_of(self.call_id or "", qualified(self.namespace, self.name or ""), self.arguments or "")
            return {"role": "assistant", "content": "", "tool_calls": [call]}
        if self.type == "function_call_output":
            return {"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)}
        if self.type == "reasoning":
            return {"role": "assistant", "content": "", "reasoning_content": _text(self.content) or _text(self.summary)}
        return {"role": self.role, "content": _text(self.content)}


class FunctionTool(Body):
    """A function of a namespace."""

    type: Literal["function"] = "function"
    name: Name
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @classmethod
    @override
    def called(cls) -> str:
        return "a function"


class ResponseTool(Body):
    """A function that the model may call, a namespace of functions, or a tool that does not exist here."""

    type: Text
    name: Name | None = None
    description: Text | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = Field(
        None, description="The functions of a namespace."
    )

    @model_validator(mode="before")
    @classmethod
    def _hosted(cls, data: Any) -> Any:
        kind = data.get("type") if isinstance(data, dict) else None
        if isinstance(kind, str) and kind.startswith(_HOSTED):
            return {"type": kind}
        if isinstance(kind, str) and kind not in ("function", "namespace"):
            raise ValueError(f"a tool of type {encodable(kind[:40])!r} is not supported; tools are functions here")
        return data

    @classmethod
    @override
    def called(cls) -> str:
        return "a tool"

    def functions(self, place: str) -> list[dict[str, Any]]:
        """The functions in the form of chat completions; the model sees those of a namespace by their full names.

        Raises:
            ApiError: It has no name.
        """
        if self.type.startswith(_HOSTED):
            return []
        if self.name is None:
            raise ApiError(400, f"{place}.name: a {self.type} needs a name", param=f"{place}.name")
        if self.type == "function":
            return [{"type": "function", "function": self.model_dump(exclude={"type", "tools"}, exclude_none=True)}]
        inner = (tool.model_dump(exclude={"type"}, exclude_none=True) for tool in self.tools or ())
        return [{"type": "function", "function": one | {"name": qualified(self.name, one["name"])}} for one in inner]


class NamedChoice(Body):
    """The function to call."""

    type: Literal["function"]
    name: Name
    namespace: Text | None = None


class TextFormat(Body):
    """The shape of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None
    description: Text | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TextSettings(Body):
    """What the text is like."""

    unused: ClassVar[frozenset[str]] = frozenset(("verbosity",))

    format: TextFormat | None = None


class ReasoningSettings(Body):
    """How much to think, for chat templates that know it."""

    unused: ClassVar[frozenset[str]] = frozenset(("summary", "generate_summary", "context"))

    effort: Text | None = None


class ResponseRequest(Body):
    """Body of ``/v1/responses``."""

    unused: ClassVar[frozenset[str]] = frozenset(
        (
            "include",
            "metadata",
            "prompt_cache_key",
            "prompt_cache_retention",
            "prompt_cache_options",
            "safety_identifier",
            "service_tier",
            "user",
            "stream_options",
            "client_metadata",
            "context_management",
        )
    )
    neutral: ClassVar[Mapping[str, Sequence[Any]]] = {"background": (False,), "truncation": ("disabled",)}
    reasons: ClassVar[Mapping[str, str]] = {
        "background": "background is not supported: stream the answer, or wait for it",
        "truncation": "truncation is not supported: a prompt is used in full or refused; the cache has a fixed size",
        "conversation": "conversation is not supported; use previous_response_id",
        "prompt": "prompt is not supported: there are no stored prompts here",
        "max_tool_calls": "max_tool_calls is not supported: no tools run here",
        "top_logprobs": "top_logprobs is not supported here; /v1/chat/completions has it",
    }

    model: Text | None = None
    input: Text | Annotated[list[Item], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    instructions: Text | None = None
    previous_response_id: Text | None = Field(
        None, description="The response that this one follows, whose conversation need not be sent again."
    )
    store: bool | None = Field(True, description="Whether a later request may name this response as its previous one.")
    stream: bool | None = False
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    tools: Annotated[list[ResponseTool], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedChoice | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    reasoning: ReasoningSettings | None = None
    chat_template_kwargs: TemplateVariables | None = None
    kv_budget: Annotated[int, Field(ge=1)] | None = Field(None, description="See chat completions.")
    pin: Pins | None = Field(None, description="See chat completions; messages are counted as converted to them.")

    def messages(self) -> list[dict[str, Any]]:
        """The input as messages of a chat completion."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        messages: list[dict[str, Any]] = []
        for item in self.input:
            joined(messages, item.message())
        return messages

    def as_chat(self, earlier: Sequence[dict[str, Any]]) -> ChatRequest:
        """The request for a chat completion.

        Args:
            earlier: The messages of earlier responses.

        Raises:
            ApiError: Something is not possible.
        """
        messages = [dict(message) for message in earlier]
        if self.instructions:
            messages.insert(0, {"role": "system", "content": self.instructions})
        for message in self.messages():
            joined(messages, message)
        choice = self.tool_choice
        if isinstance(choice, NamedChoice):
            name = qualified(choice.namespace, choice.name)
            choice = {"type": "function", "function": {"name": name}}  # type: ignore[assignment]
        return chat_request(
            model=self.model,
            messages=messages,
            stream=self.stream,
            max_completion_tokens=self.max_output_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            tools=[each for at, tool in enumerate(self.tools or ()) for each in tool.functions(f"tools[{at}]")],
            tool_choice=choice,
            parallel_tool_calls=self.parallel_tool_calls,
            response_format=self._format(),
            reasoning_effort=None if self.reasoning is None else self.reasoning.effort,
            chat_template_kwargs=self.chat_template_kwargs,
            kv_budget=self.kv_budget,
            pin=self.pin,
        )

    def named(self, name: str) -> dict[str, str]:
        """The name of a called function, as a call has it, and its namespace, if it is in one."""
        for tool in self.tools or ():
            if tool.type == "namespace" and name.startswith(f"{tool.name}."):
                return {"name": name.removeprefix(f"{tool.name}."), "namespace": tool.name or ""}
        return {"name": name}

    def _format(self) -> dict[str, Any] | None:
        form = None if self.text is None else self.text.format
        if form is None or form.type != "json_schema":
            return None if form is None else {"type": form.type}
        if form.schema_ is None:
            raise ApiError(400, "text.format.schema: give a schema", param="text.format.schema")
        return {"type": "json_schema", "json_schema": {"name": form.name, "schema": form.schema_}}


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text or part.refusal or "" for part in content)


def qualified(namespace: str | None, name: str) -> str:
    """The name of a function that the model sees."""
    return f"{namespace}.{name}" if namespace else name
