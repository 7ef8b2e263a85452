"""Routes of ``/v1/responses`` and of Anthropic's ``/v1/messages``."""

from __future__ import annotations

from functools import partial
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from snapstream.serving.apis.anthropic import CountRequest, MessagesRequest
from snapstream.serving.apis.anthropic_writer import AnthropicAnswer, AnthropicWriter, TokenCount
from snapstream.serving.apis.conversion import chat_request, joined
from snapstream.serving.apis.history import ResponseHistory
from snapstream.serving.apis.responses import ResponseRequest
from snapstream.serving.apis.responses_writer import ResponseAnswer, ResponseWriter
from snapstream.serving.completions import Completions
from snapstream.serving.errors import ApiError
from snapstream.serving.parts import Parts
from snapstream.serving.routes import STREAM
from snapstream.serving.tools.events import Said


class DeletedResponse(BaseModel):
    """Answer to the deletion of a response."""

    id: str
    object: str = "response"
    deleted: bool = True


def router(parts: Parts, completions: Completions) -> APIRouter:
    """Create the routes of one server."""
    routes, history = APIRouter(), ResponseHistory()

    def owner_of(request: Request) -> str:
        return str(request.scope["state"].get("owner", ""))

    @routes.post("/v1/responses", response_model=ResponseAnswer, responses=STREAM, tags=["Responses"])
    async def respond(body: ResponseRequest, request: Request) -> Response:
        """Answer a conversation, which may continue an earlier response."""
        owner, earlier = owner_of(request), list[dict[str, Any]]()
        if body.previous_response_id is not None:
            found = history.get(owner, body.previous_response_id)
            if found is None:
                message = f"there is no response {body.previous_response_id[:64]!r}; send the whole conversation"
                raise ApiError(404, message, param="previous_response_id", code="previous_response_not_found")
            earlier = found

        def keep(name: str, said: Said) -> None:
            if body.store is False:
                return
            messages = [dict(message) for message in earlier]
            for message in (*body.messages(), _spoken(said)):
                joined(messages, message)
            history.put(owner, name, messages)

        return await completions.chat(body.as_chat(earlier), request, partial(ResponseWriter, body=body, keep=keep))

    @routes.delete("/v1/responses/{name}", tags=["Responses"])
    async def forget(name: str, request: Request) -> DeletedResponse:
        """Forget a response, so that no other one can follow it."""
        if not history.delete(owner_of(request), name):
            raise ApiError(404, f"there is no response {name[:64]!r}")
        return DeletedResponse(id=name)

    @routes.post("/v1/messages", response_model=AnthropicAnswer, responses=STREAM, tags=["Anthropic"])
    async def messages(body: MessagesRequest, request: Request) -> Response:
        """Answer a conversation, in Anthropic's format."""
        return await completions.chat(body.as_chat(), request, AnthropicWriter)

    @routes.post("/v1/messages/count_tokens", tags=["Anthropic"])
    async def count(body: CountRequest) -> TokenCount:
        """The length of a prompt."""
        completions.check_model(body.model)
        chat = chat_request(**body.fields())
        chat.callable_tools()
        shown = [tool.for_template() for tool in chat.shown_tools()]
        prompt = await parts.reader.messages(chat.messages, parts.reader.variables(chat), shown, pin=False)
        return TokenCount(input_tokens=len(prompt.tokens))

    return routes


def _spoken(said: Said) -> dict[str, Any]:
    """An answer as a message of the conversation."""
    message: dict[str, Any] = {"role": "assistant", "content": said.text}
    if said.reasoning:
        message["reasoning_content"] = said.reasoning
    if said.calls:
        message["tool_calls"] = [
            {"id": call.call_id, "type": "function", "function": call.function()} for call in said.calls
        ]
    return message
