"""Routes of contexts: create, list, show and delete them."""

from __future__ import annotations

from dataclasses import replace

import anyio
import anyio.to_thread
from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel

from snapstream.cache import Stored
from snapstream.config import SamplingParams
from snapstream.engine import CompressedSequence
from snapstream.engine.requests.detokenizer import Detokenizer
from snapstream.serving.clients import Incoming
from snapstream.serving.completions import Completions
from snapstream.serving.errors import ApiError
from snapstream.serving.generation import Job
from snapstream.serving.parts import Parts
from snapstream.serving.protocol import ContextRequest, budget_of
from snapstream.serving.routes import Deleted


class ContextState(BaseModel):
    """Description of a context."""

    id: str
    object: str = "context"
    name: str
    created: int
    tokens: int
    entries: int
    bytes: int
    chat: bool
    on_disk: bool

    @classmethod
    def of(cls, stored: Stored) -> ContextState:
        """Describe a stored context to clients."""
        return cls(
            id=stored.key,
            name=stored.about["name"],
            created=int(stored.about["created"]),
            tokens=stored.tokens,
            entries=stored.entries,
            bytes=stored.nbytes,
            chat=stored.about["opening"] is not None,
            on_disk=stored.on_disk,
        )


class ContextTokens(BaseModel):
    """The tokens of a context, and the text that each adds, which may be empty."""

    tokens: list[int]
    texts: list[str]


class Contexts(BaseModel):
    """All contexts of an API key."""

    object: str = "list"
    data: list[ContextState]


def router(parts: Parts, completions: Completions) -> APIRouter:
    """Create the routes of one server."""
    routes = APIRouter(tags=["Contexts"])
    store, detokenizing = parts.contexts, anyio.CapacityLimiter(1)

    def owner(request: Request) -> str:
        return str(request.scope["state"].get("owner", ""))

    @routes.post("/v1/contexts", response_model=ContextState)
    async def read(body: ContextRequest, request: Request) -> Response:
        """Prefill a text and compress it once; requests continue it by its id as context_id."""
        completions.check_model(body.model)
        store.check()
        params = SamplingParams(max_tokens=0, kv_budget=parts.llm.engine.context_budget(budget_of(body.kv_budget)))
        incoming = Incoming(request, parts.settings.request_timeout)

        async def work() -> Stored:
            prompt, opened = await completions.in_turn(
                lambda: parts.reader.context(body.text, chat=body.chat, system=body.system, pin=body.pin)
            )
            tokens, asked = prompt.tokens, replace(params, pin=prompt.pin)
            incoming.log["prompt_tokens"] = len(tokens)
            store.check_room(parts.llm.engine.kept_bytes(len(tokens), params.kv_budget))
            saved: list[CompressedSequence] = []
            job = Job(tokens, asked, None, saved.append, incoming.began, incoming.owner)
            batch = await parts.driver.submit([job])
            try:
                async for _, _, output in batch.changes():
                    if output.error is not None:
                        incoming.log["error"] = output.error
                        raise ApiError(500, f"the text could not be processed: {output.error}", code="request_failed")
            finally:
                batch.cancel()
            context = parts.llm.context_of(saved[0], opened, body.system)
            return await store.add(incoming.owner, body.name or "", context)

        stored = await incoming.answer(work)
        if stored is None:
            return Response(status_code=499)
        return Response(ContextState.of(stored).model_dump_json(), media_type="application/json")

    @routes.get("/v1/contexts")
    async def all_contexts(request: Request) -> Contexts:
        """The contexts of this API key."""
        return Contexts(data=[ContextState.of(stored) for stored in store.of(owner(request))])

    @routes.get("/v1/contexts/{name}")
    async def one_context(name: str, request: Request) -> ContextState:
        """One context, by its id."""
        return ContextState.of(store.find(owner(request), name))

    @routes.get("/v1/contexts/{name}/tokens", response_model=ContextTokens)
    async def tokens(name: str, request: Request) -> Response:
        """The tokens of a context, and the text that each adds."""
        stored = await store.take(owner(request), name)

        def write() -> bytes:
            assert stored.sequence is not None
            known = stored.sequence.tokens
            detokenizer = Detokenizer(parts.llm.tokenizer, frozenset(), skip_special=False)
            answer = ContextTokens(tokens=list(known), texts=[detokenizer.add(token) for token in known])
            return answer.model_dump_json().encode()

        try:
            # In threads other than those that write answers, because it may take long.
            return Response(await anyio.to_thread.run_sync(write, limiter=detokenizing), media_type="application/json")
        finally:
            store.store.release(stored)

    @routes.delete("/v1/contexts/{name}")
    async def forget(name: str, request: Request) -> Deleted:
        """Delete a context and free its cache; requests that already use it are not affected."""
        await store.delete(owner(request), name)
        return Deleted(id=name)

    return routes
