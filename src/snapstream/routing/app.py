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
from snapstream.routing.proxy import Proxy, Refused, Reply, UpstreamError
from snapstream.routing.settings import RouterSettings
from snapstream.serving.clients import DisconnectedError, until_disconnect
from snapstream.serving.middleware import HeadMiddleware

_EVENTS = "text/event-stream"
_ELSEWHERE = ("v1/models", "tokenize", "detokenize", "version")


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

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """OpenAI's completions."""
        return await _generate(proxy, "completions", request)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """OpenAI's chat completions."""
        return await _generate(proxy, "chat/completions", request)

    @app.get("/health")
    async def health() -> Response:
        """Whether requests can be served; without prefill instances, decode instances prefill prompts more slowly."""
        state = {"prefill": proxy.prefill.well, "decode": proxy.decode.well}
        return JSONResponse(state, 200 if proxy.decode.well else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """Metrics for Prometheus."""
        return Response(proxy.metrics.page(), media_type="text/plain; version=0.0.4")

    async def elsewhere(request: Request) -> Response:
        """Forward to any decode instance."""
        instance = proxy.decode.choose()
        if instance is None:
            return _error(503, "no decode instance is healthy", headers={"Retry-After": "2"})
        kept = {name: request.headers[name] for name in ("authorization", "content-type") if name in request.headers}
        try:
            answer = await client.request(
                request.method, f"{instance.url}{request.url.path}", content=await request.body(), headers=kept
            )
        except httpx.HTTPError as error:
            return _error(503, f"{instance.url} failed: {error}")
        return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

    for path in _ELSEWHERE:
        app.add_api_route(f"/{path}", elsewhere, methods=["GET", "POST"])
    app.state.proxy = proxy
    return app


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
    seconds = proxy.settings.keep_alive_seconds if body.get("stream") is True else 0
    try:
        await until_disconnect(request.receive, lambda: asyncio.wait({answer}, timeout=seconds or None))
        reply = answer.result() if answer.done() else None
    except BaseException as error:
        answer.cancel()
        return _failed(error)
    if reply is not None and reply.media != _EVENTS:
        return StreamingResponse(_to_the_end(reply), reply.status, media_type=reply.media)
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(_lasting(answer, seconds), headers=headers, media_type=_EVENTS)


async def _check_on(proxy: Proxy, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        await proxy.check()


async def _to_the_end(reply: Reply) -> AsyncIterator[bytes]:
    """The parts of an answer; one that is cut off says so, where it can."""
    try:
        async for part in reply.parts:
            yield part
    except (httpx.HTTPError, UpstreamError) as error:
        if reply.media != _EVENTS:
            raise
        yield _error_event(f"the instance failed mid-answer: {error}")


async def _lasting(answer: asyncio.Future[Reply], seconds: float) -> AsyncIterator[bytes]:
    """A stream as it comes, with a comment whenever nothing has come for a while; proxies cut silent connections."""
    parts: AsyncIterator[bytes] | None = None
    pending: asyncio.Future[Any] = answer
    whole = True
    try:
        while True:
            done, _ = await asyncio.wait({pending}, timeout=seconds or None)
            if not done:
                if whole:  # not in the middle of an event
                    yield b": waiting\n\n"
                continue
            if parts is None:
                parts = _to_the_end(pending.result())
            else:
                whole = pending.result().endswith(b"\n\n")
                yield pending.result()
            pending = asyncio.ensure_future(anext(parts))
    except StopAsyncIteration:
        pass
    except Refused as refusal:
        yield _error_event(refusal.body.decode(errors="replace"))
    except UpstreamError as error:
        yield _error_event(f"no instance could serve this: {error}")
    finally:
        pending.cancel()


def _error_event(message: str) -> bytes:
    return event({"error": {"message": message, "type": "server_error", "code": 502}}).encode()


def _failed(error: BaseException) -> Response:
    """The answer to a request that ended before anything was sent."""
    if isinstance(error, DisconnectedError):
        return _error(503, "the client has disconnected")
    if isinstance(error, Refused):
        return Response(error.body, error.status, media_type="application/json")
    if isinstance(error, UpstreamError):
        return _error(503, f"no instance could serve this: {error}", headers={"Retry-After": "2"})
    raise error


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "unavailable_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status, headers)
