"""Applies the model's chat template to conversations, and checks that it leaves no message out."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, TypeVar

from snapstream.engine import LLM
from snapstream.engine.context import Render
from snapstream.errors import RequestError
from snapstream.serving.errors import ApiError
from snapstream.serving.messages import Message
from snapstream.serving.pins import Rendered, RenderWith

T = TypeVar("T")
Describe = Callable[[Sequence[Mapping[str, Any]]], str | None]
"""Describes tools, in OpenAI's form; ``None`` if they cannot be asked for in words."""


class Templates:
    """Applies a model's chat template.

    Args:
        llm: The engine; only its chat template is used.
        seconds: Maximum time that a template may take.
    """

    def __init__(self, llm: LLM, seconds: float) -> None:
        self._llm, self._seconds = llm, seconds

    def render(self, variables: Mapping[str, Any] | None, tools: Sequence[Mapping[str, Any]] = ()) -> Render:
        """The chat template as a function of messages, with the time limit."""
        return lambda messages: within(self._seconds, lambda: self._llm.chat_text(messages, variables, tools))

    def render_for_pins(self, variables: Mapping[str, Any] | None) -> RenderWith:
        """The chat template for any tools; all calls together have the time limit of one."""
        until = time.monotonic() + self._seconds

        def with_tools(tools: Sequence[Mapping[str, Any]]) -> Render:
            return lambda messages: within(
                max(until - time.monotonic(), 0.0), lambda: self._llm.chat_text(messages, variables, tools)
            )

        return with_tools

    def apply(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] = (),
        describe: Describe = lambda tools: None,
    ) -> Rendered:
        """Convert messages to the form that the template expects, and render them.

        1. The role ``developer`` becomes ``system`` if the template does not have it.
        2. Arguments of tool calls become objects, unless the template needs the original strings.
        3. A template that shows no tools gets them in the system message, and calls and their results as text.
        4. Every message must occur in the template's output, because many templates leave out what they do not know.

        Args:
            messages: The conversation.
            variables: Variables of the template.
            tools: Tools that the model may call, in OpenAI's form.
            describe: Describes tools, for templates that do not; ``None`` if that is not possible.

        Returns:
            The messages in this form, and the text of the conversation.

        Raises:
            ApiError: A message would not occur in the prompt; the error names it.
            RequestError: There is no chat template, it rejects the messages, or it takes too long.
        """
        source, described = self._llm.template_source, None
        if tools and not self._shows_tools(variables):
            described = describe(tools)
            if described is None:
                message = (
                    "this model's chat template shows no tools to the model; start the server with --tool-parser hermes"
                )
                raise ApiError(400, message, param="tools")
        shown = tools if described is None else ()
        render = self.render(variables, shown)

        places: list[int] = []

        def form(*, objects: bool) -> list[dict[str, Any]]:
            given = [message.for_template(objects=objects) for message in messages]
            places[:] = range(len(given))
            if described is not None:
                given, places[:] = in_plain_words(given, described)
            if "developer" not in source:
                given = [one | {"role": "system"} if one["role"] == "developer" else one for one in given]
            return given

        given = form(objects=True)
        try:
            text = render(given)
        except RequestError:
            if not any(message.tool_calls for message in messages):
                raise
            given = form(objects=False)
            text = render(given)
        self._check(given, text, render)
        return Rendered(given, shown, text, places, described is not None)

    def _shows_tools(self, variables: Mapping[str, Any] | None) -> bool:
        """Whether the template writes the names of tools."""
        asked = {"role": "user", "content": "."}
        tool = {"type": "function", "function": {"name": _mark(0), "description": "", "parameters": _NO_PARAMETERS}}
        try:
            return _mark(0) in self.render(variables, [tool])([asked])
        except RequestError:
            return "tools" in self._llm.template_source

    def _check(self, given: Sequence[Mapping[str, Any]], text: str, render: Render) -> None:
        """Step 4: render the conversation with a unique mark in place of each message's content, and find the marks."""
        try:
            marked = render([_marked(message, _mark(index)) for index, message in enumerate(given)])
        except RequestError:  # the template depends on the content of messages
            marked = ""
        for index, message in enumerate(given):
            content, called = message["content"].strip(), bool(message.get("tool_calls"))
            written = _mark(index) in marked if marked else called or content in text
            if written or not (content or called):
                continue
            field, what = ("role", f"messages of the role {message['role']!r} here") if content else _CALLS
            why = f"this model's chat template does not write {what}, so the model would not see this message"
            raise _lost(index, field, f"{why}; move its content to a message of another role, such as 'user'")


_CALLS = "tool_calls", "tool calls"
_NO_PARAMETERS: Mapping[str, Any] = {"type": "object", "properties": {}}


def _mark(index: int) -> str:
    return f"Trace{index}OfMessage"


def _marked(message: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """A copy of a message with the mark as its content and as the name of its tools."""
    marked = {**message, "content": mark if message["content"].strip() else message["content"]}
    if message.get("tool_calls"):
        marked["tool_calls"] = [_with_name(call, mark) for call in message["tool_calls"]]
    return marked


def _with_name(call: Mapping[str, Any], name: str) -> dict[str, Any]:
    function = call.get("function")
    return {**call, "function": {**function, "name": name}} if isinstance(function, dict) else {**call, "name": name}


def _lost(index: int, field: str, why: str) -> ApiError:
    place = f"messages[{index}].{field}"
    return ApiError(400, f"{place}: {why}", param=place)


def in_plain_words(given: Sequence[dict[str, Any]], described: str) -> tuple[list[dict[str, Any]], list[int]]:
    """A conversation with tools for a template that knows none: their calls and results are text.

    Args:
        given: The messages.
        described: The description of the tools, for the system message.

    Returns:
        The messages, and for each of the given ones its place among them.
    """
    plain: list[dict[str, Any]] = []
    places: list[int] = []
    for message in given:
        calls, content = message.get("tool_calls") or (), str(message["content"])
        if message["role"] in ("tool", "function"):
            result = f"<tool_response>\n{content}\n</tool_response>"
            if plain and plain[-1].get("is_result"):  # many templates want users and assistants to take turns
                plain[-1]["content"] += f"\n{result}"
            else:
                plain.append({"role": "user", "content": result, "is_result": True})
        elif message["role"] == "user" and plain and plain[-1].get("is_result"):
            plain[-1]["content"] += f"\n{content}"
        elif calls:
            written = "\n".join(f"<tool_call>\n{json.dumps(_plain_call(call))}\n</tool_call>" for call in calls)
            plain.append({"role": message["role"], "content": f"{content}\n{written}".strip()})
        else:
            plain.append(dict(message))
        places.append(len(plain) - 1)
    if plain and plain[0]["role"] in ("system", "developer"):
        plain[0]["content"] = f"{plain[0]['content']}\n\n{described}".strip()
    else:
        plain.insert(0, {"role": "system", "content": described})
        places = [place + 1 for place in places]
    return [{name: value for name, value in message.items() if name != "is_result"} for message in plain], places


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    function = function if isinstance(function, Mapping) else call
    return {"name": function.get("name"), "arguments": function.get("arguments", {})}


class _TooLongError(BaseException):
    """Raised inside code that takes too long; not an Exception, so that a template cannot catch it."""


def within(seconds: float, function: Callable[[], T]) -> T:
    """Run Python code that may loop forever, and stop it after a time limit.

    A thread cannot be killed, but it can be traced. The trace function checks the clock before every line.

    Raises:
        RequestError: It took too long.
    """
    end = time.monotonic() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise _TooLongError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function()
    except _TooLongError:
        raise RequestError(f"the chat template took longer than {seconds:g} s with these messages") from None
    finally:
        sys.settrace(before)
