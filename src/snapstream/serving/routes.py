"""Routes of OpenAI's API, tokenization and sessions."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from snapstream.serving.answers import ChatCompletion, Completion
from snapstream.serving.completions import Completions
from snapstream.serving.errors import ApiError
from snapstream.serving.parts import Parts
from snapstream.serving.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

STREAM: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "The answer; with stream, its chunks as server-sent events.",
        "content": {"text/event-stream": {}},
    }
}


class Model(BaseModel):
    """A served model."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "snapstream"
    max_model_len: int
    kv_budget: int
    chat_template: bool


class Models(BaseModel):
    """The list of served models, which has one item."""

    object: str = "list"
    data: list[Model]


class Tokens(BaseModel):
    """Answer of ``/tokenize``."""

    tokens: list[int]
    count: int
    max_model_len: int
    token_strs: list[str] | None = None


class Text(BaseModel):
    """Answer of ``/detokenize``."""

    prompt: str


class Deleted(BaseModel):
    """Answer to the deletion of a session or a context."""

    id: str
    deleted: bool = True


def router(parts: Parts, completions: Completions) -> APIRouter:
    """Create the routes of one server."""
    routes = APIRouter()
    llm, settings, reader = parts.llm, parts.settings, parts.reader
    model = Model(
        id=settings.model_name,
        created=int(time.time()),
        max_model_len=llm.engine.max_model_len,
        kv_budget=llm.engine.budget.capacity,
        chat_template=llm.has_chat_template,
    )

    @routes.post("/v1/completions", response_model=Completion, responses=STREAM, tags=["OpenAI"])
    async def completion(body: CompletionRequest, request: Request) -> Response:
        """Continue a prompt."""
        return await completions.complete(body, request)

    @routes.post("/v1/chat/completions", response_model=ChatCompletion, responses=STREAM, tags=["OpenAI"])
    async def chat(body: ChatRequest, request: Request) -> Response:
        """Answer a conversation, using the model's chat template."""
        return await completions.chat(body, request)

    @routes.get("/v1/models", tags=["OpenAI"])
    async def models() -> Models:
        """The served model."""
        return Models(data=[model])

    @routes.get("/v1/models/{name:path}", tags=["OpenAI"])
    async def one_model(name: str) -> Model:
        """One model, by name."""
        completions.check_model(name)
        return model

    @routes.post("/tokenize", response_model=Tokens, tags=["Tokens"])
    async def tokenize(body: TokenizeRequest) -> Response:
        """Tokenize a prompt, or messages in the model's chat template."""
        completions.check_model(body.model)
        if (body.prompt is None) == (body.messages is None):
            raise ApiError(400, "give either prompt or messages", param="prompt")
        if body.prompt is not None:
            prompt = await reader.text(body.prompt)
        else:
            tools = [tool.for_template() for tool in body.tools or []]
            prompt = await reader.messages(body.messages or [], body.chat_template_kwargs, tools, pin=False)

        def write() -> bytes:
            tokens = list(prompt.tokens)
            words = llm.tokenizer.convert_ids_to_tokens(tokens) if body.return_token_strs else None
            answer = Tokens(tokens=tokens, count=len(tokens), max_model_len=llm.engine.max_model_len, token_strs=words)
            return answer.model_dump_json().encode()

        return Response(await reader.write(write), media_type="application/json")

    @routes.post("/detokenize", tags=["Tokens"])
    async def detokenize(body: DetokenizeRequest) -> Text:
        """Convert tokens to text."""
        completions.check_model(body.model)
        return Text(prompt=await reader.write(lambda: str(llm.tokenizer.decode(llm.engine.tokenize(body.tokens)))))

    @routes.delete("/v1/sessions/{name}", tags=["Sessions"])
    async def forget(name: str, request: Request) -> Deleted:
        """Delete a session and free its cache."""
        if not parts.sessions.delete((request.scope["state"].get("owner", ""), name)):
            raise ApiError(404, f"there is no session {name!r}")
        return Deleted(id=name)

    return routes
