"""Applies the model's chat template to conversations, and checks that it leaves no message out."""

from __future__ import annotations

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

T = TypeVar("T")


class Templates:
    """Applies a model's chat template.

    Args:
        llm: The engine; only its chat template is used.
        seconds: Maximum time that a template may take.
    """

    def __init__(self, llm: LLM, seconds: float) -> None:
        self._llm, self._seconds = llm, seconds

    def render(self, variables: Mapping[str, Any] | None) -> Render:
        """The chat template as a function of messages, with the time limit."""
        return lambda messages: within(self._seconds, lambda: self._llm.chat_text(messages, variables))

    def apply(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None
    ) -> tuple[list[dict[str, Any]], str]:
        """Convert messages to the form that the template expects, and render them.

        1. The role ``developer`` becomes ``system`` if the template does not have it.
        2. Arguments of tool calls become objects, unless the template needs the original strings.
        3. Every message must occur in the template's output, because many templates leave out what they do not know.

        Returns:
            The messages in this form, and the text of the conversation.

        Raises:
            ApiError: A message would not occur in the prompt; the error names it.
            RequestError: There is no chat template, it rejects the messages, or it takes too long.
        """
        source, render = self._llm.template_source, self.render(variables)
        for index, message in enumerate(messages):
            thought = "reasoning_content" if message.reasoning_content else "reasoning" if message.reasoning else None
            if thought and "reasoning" not in source:
                raise _lost(index, thought, f"this model's chat template does not support {thought}; leave it out")

        def form(*, objects: bool) -> list[dict[str, Any]]:
            given = [message.for_template(objects=objects) for message in messages]
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
        return given, text

    def _check(self, given: Sequence[Mapping[str, Any]], text: str, render: Render) -> None:
        """Step 3: render the conversation with a unique mark in place of each message's content, and find the marks."""
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
