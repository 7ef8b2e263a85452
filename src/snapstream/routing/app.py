"""The router as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from snapstream import __version__
from snapstream.routing.answers import event
from snapstream.routing.instances import Instance
from snapstream.routing.proxy import FORWARDED, Proxy, Refused, Reply, UpstreamError, another_may
from snapstream.routing.settings import RouterSettings
from snapstream.serving.clients import DisconnectedError, until_disconnect
from snapstream.serving.middleware import HeadMiddleware
from snapstream.serving.streams import comment_for

_EVENTS = "text/event-stream"
_GENERATE = ("completions", "chat/completions", "responses", "messages", "contexts")
"""Paths of requests that make an instance process a prompt, after ``/v1/``."""
_ANYWHERE = ("v1/models", "v1/models/{name:path}", "v1/messages/count_tokens", "tokenize", "detokenize", "version")
"""Paths that every instance answers alike."""
_SOMEWHERE = ("v1/contexts/{name:path}", "v1/sessions/{name:path}", "v1/responses/{name:path}")
"""Paths of what only one instance has."""


def create_app(settings: RouterSettings, transport: httpx.AsyncBaseTransport | None = None) -> FastAPI:
    """Create the application.

    Args:
        settings: The operator's settings.
        transport: Transport to the instances, for tests.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    # An instance may take as long as it needs to answer; only connecting has a time limit.
    timeout = httpx.Timeout(None, connect=settings.connect_seconds)
    client = httpx.AsyncClient(limits=limits, timeout=timeout, transport=transport, trust_env=False)
    proxy = Proxy(settings, client)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await proxy.check()
        checking = asyncio.create_task(_check_on(proxy, settings.check_seconds))
        try:
            yield
        finally:
            checking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await checking
            await client.aclose()

    app = FastAPI(title="SnapStream router", version=__version__, lifespan=lifespan)
    app.add_middleware(HeadMiddleware)

    @app.get("/health")
    async def health() -> Response:
        """Whether requests can be served; without prefill instances, decode instances prefill prompts more slowly."""
        state = {"prefill": proxy.prefill.well, "decode": proxy.decode.well}
        return JSONResponse(state, 200 if proxy.decode.well else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(proxy.metrics.page(), media_type="text/plain; version=0.0.4")

    async def generate(request: Request) -> Response:
        """Answer a prompt, with one instance or two."""
        return await _generate(proxy, request.url.path.removeprefix("/v1/"), request)

    async def anywhere(request: Request) -> Response:
        """Forward to any decode instance."""
        return await _forward(proxy, request)

    async def somewhere(request: Request) -> Response:
        """Forward to decode instances until one has what is asked for; delete it from all of them."""
        return await _search(proxy, request)

    @app.get("/v1/contexts")
    async def contexts(request: Request) -> Response:
        """The contexts of all decode instances."""
        return await _forward_to_all(proxy, request)

    for path in _GENERATE:
        app.add_api_route(f"/v1/{path}", generate, methods=["POST"])
    for path in _ANYWHERE:
        app.add_api_route(f"/{path}", anywhere, methods=["GET", "POST"])
    for path in _SOMEWHERE:
        app.add_api_route(f"/{path}", somewhere, methods=["GET", "DELETE"])
    app.state.proxy = proxy
    return app


async def _send(proxy: Proxy, instance: Instance, request: Request) -> httpx.Response:
    """Forward a request as it is."""
    headers = {name: request.headers[name] for name in (*FORWARDED, "content-type") if name in request.headers}
    base, query = httpx.URL(instance.url), request.scope["query_string"]
    path = base.raw_path.rstrip(b"/") + (request.scope.get("raw_path") or request.url.path.encode())
    url = base.copy_with(raw_path=path + (b"?" + query if query else b""))
    return await proxy.client.request(request.method, url, content=await request.body(), headers=headers)


async def _try(proxy: Proxy, instance: Instance, request: Request) -> httpx.Response | str:
    """Forward a request; the answer, or why another instance is to be asked."""
    try:
        answer = await _send(proxy, instance, request)
    except httpx.HTTPError as error:
        return proxy.failed("decode", instance, error)
    return f"{instance.url} answered {answer.status_code}" if another_may(answer.status_code) else answer


async def _forward(proxy: Proxy, request: Request) -> Response:
    """Forward a request to any instance that can answer it."""
    failure = "no instance is healthy"
    for instance in proxy.decode.candidates(proxy.settings.attempts):
        answer = await _try(proxy, instance, request)
        if not isinstance(answer, str):
            return _passed(answer)
        failure = answer
    return _unavailable(failure)


async def _search(proxy: Proxy, request: Request) -> Response:
    """Forward a request to instances until one has what it names, or, to delete that, to all of them.

    That there is no such thing is only known if all instances have said so.
    """
    found, missing, failure = None, list[httpx.Response](), "not all instances could be asked"
    for instance in proxy.decode.candidates(len(proxy.decode.instances)):
        answer = await _try(proxy, instance, request)
        if isinstance(answer, str):
            failure = answer
        elif answer.status_code == 404:
            missing.append(answer)
        else:
            found = answer
            if request.method != "DELETE":
                break
    if found is None and len(missing) == len(proxy.decode.instances):
        found = missing[0]
    return _unavailable(failure) if found is None else _passed(found)


def _passed(answer: httpx.Response) -> Response:
    return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))


async def _forward_to_all(proxy: Proxy, request: Request) -> Response:
    """Forward a request for a list to all healthy instances, and join the lists."""
    instances = [one for one in proxy.decode.instances if one.is_well]
    if not instances:
        return _unavailable("no instance is healthy")
    try:
        answers = await asyncio.gather(*(_send(proxy, one, request) for one in instances))
        for answer in answers:
            if answer.status_code != 200:
                return _passed(answer)
        return JSONResponse(answers[0].json() | {"data": [one for answer in answers for one in answer.json()["data"]]})
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        return _error(503, f"an instance failed: {error or type(error).__name__}")


async def _generate(proxy: Proxy, kind: str, request: Request) -> Response:
    """Answer a request for completions."""
    try:
        body = await request.json()
    except ValueError:
        return _error(400, "the body is not JSON")
    if not isinstance(body, dict):
        return _error(400, "the body is not a JSON object")
    answer = asyncio.ensure_future(proxy.answer(kind, body, request.headers))
    # A stream that takes its time begins before its first token; an error before that has a status of its own.
    # (Of other APIs, instances keep streams alive themselves.)
    is_openai = kind in ("completions", "chat/completions")
    seconds = proxy.settings.keep_alive_seconds if body.get("stream") is True and is_openai else 0
    try:
        await until_disconnect(request.receive, lambda: asyncio.wait({answer}, timeout=seconds or None))
        reply = answer.result() if answer.done() else None
    except BaseException as error:
        answer.cancel()
        return _failed(error)
    if reply is not None and reply.media != _EVENTS:
        return StreamingResponse(_to_the_end(reply, kind), reply.status, media_type=reply.media)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    comment = comment_for(request.headers.get("user-agent", ""), "waiting").encode()
    return StreamingResponse(_lasting(answer, seconds, kind, comment), headers=headers, media_type=_EVENTS)


async def _check_on(proxy: Proxy, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        await proxy.check()


async def _to_the_end(reply: Reply, kind: str) -> AsyncIterator[bytes]:
    """The parts of an answer; one that is cut off says so, where it can."""
    try:
        async for part in reply.parts:
            yield part
    except (httpx.HTTPError, UpstreamError) as error:
        if reply.media != _EVENTS:
            raise
        yield _error_event(f"the instance failed mid-answer: {error}", kind)


async def _lasting(answer: asyncio.Future[Reply], seconds: float, kind: str, comment: bytes) -> AsyncIterator[bytes]:
    """A stream as it comes, with a comment whenever nothing has come for a while; proxies cut silent connections."""
    parts: AsyncIterator[bytes] | None = None
    pending: asyncio.Future[Any] = answer
    whole = True
    try:
        while True:
            done, _ = await asyncio.wait({pending}, timeout=seconds or None)
            if not done:
                if whole:  # not in the middle of an event
                    yield comment
                continue
            if parts is None:
                parts = _to_the_end(pending.result(), kind)
            else:
                whole = pending.result().endswith(b"\n\n") or (whole and pending.result() == b"\n")
                yield pending.result()
            pending = asyncio.ensure_future(anext(parts))
    except StopAsyncIteration:
        pass
    except Refused as refusal:
        yield _error_event(refusal.body.decode(errors="replace"), kind)
    except UpstreamError as error:
        yield _error_event(f"no instance could serve this: {error}", kind)
    finally:
        pending.cancel()


def _error_event(message: str, kind: str) -> bytes:
    """An error within a stream, as each API has it."""
    if kind == "messages":
        said = event({"type": "error", "error": {"type": "api_error", "message": message}})
    elif kind == "responses":
        said = event({"type": "error", "code": "server_error", "message": message, "param": None})
    else:
        return event({"error": {"message": message, "type": "server_error", "code": 502}}).encode()
    return f"event: error\n{said}".encode()


def _failed(error: BaseException) -> Response:
    """The answer to a request that ended before anything was sent."""
    if isinstance(error, DisconnectedError):
        return _error(503, "the client has disconnected")
    if isinstance(error, Refused):
        return Response(error.body, error.status, media_type="application/json")
    if isinstance(error, UpstreamError):
        return _unavailable(f"no instance could serve this: {error}")
    raise error


def _unavailable(message: str) -> JSONResponse:
    return _error(503, message, headers={"Retry-After": "2"})


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "unavailable_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status, headers)
