"""What the conversions of requests share."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from snapstream.serving.errors import ApiError
from snapstream.serving.protocol import ChatRequest


def chat_request(**fields: Any) -> ChatRequest:
    """A request for a chat completion, from fields of another API that were checked.

    Raises:
        ApiError: A value is not allowed here.
    """
    try:
        return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(step) for step in problem["loc"] if not isinstance(step, int)) or "the body"
        message = problem["msg"].removeprefix("Value error, ")
        raise ApiError(400, f"{place}: {message}"[:500], param=place[:100]) from None


def joined(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    """Append a message; parts of one answer, which come apart in other APIs, become one message."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or message["role"] != "assistant":
        messages.append(message)
        return
    for name in ("content", "reasoning_content"):
        texts = [each[name] for each in (last, message) if each.get(name)]
        if texts:
            last[name] = "\n".join(texts)
    if message.get("tool_calls"):
        last["tool_calls"] = [*last.get("tool_calls", ()), *message["tool_calls"]]


def call_of(call_id: str, name: str, arguments: str) -> dict[str, Any]:
    """A call in OpenAI's form for messages."""
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
