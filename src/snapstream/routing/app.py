"""The router as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from snapstream import __version__
from snapstream.routing.relay import Refused, Relay, Reply, UpstreamError
from snapstream.routing.settings import RouterSettings
from snapstream.routing.stitch import event
from snapstream.serving.clients import DisconnectedError, until_disconnect

_ELSEWHERE = ("v1/models", "tokenize", "detokenize", "version")


def create_app(settings: RouterSettings, transport: httpx.AsyncBaseTransport | None = None) -> FastAPI:
    """Make the application.

    Args:
        settings: The operator's.
        transport: For tests: how instances are reached.
    """
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
    # An instance may think for as long as it wants; only to accept takes no time.
    timeout = httpx.Timeout(None, connect=settings.connect_seconds)
    client = httpx.AsyncClient(limits=limits, timeout=timeout, transport=transport, trust_env=False)
    relay = Relay(settings, client)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await relay.check()
        checking = asyncio.create_task(_check_on(relay, settings.check_seconds))
        try:
            yield
        finally:
            checking.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await checking
            await client.aclose()

    app = FastAPI(title="SnapStream router", version=__version__, lifespan=lifespan)

    async def generate(kind: str, request: Request) -> Response:
        try:
            body = await request.json()
        except ValueError:
            return _error(400, "the body is not JSON")
        if not isinstance(body, dict):
            return _error(400, "the body is no JSON object")
        try:
            reply = await until_disconnect(request.receive, lambda: relay.answer(kind, body, request.headers))
        except DisconnectedError:
            return _error(503, "the client has gone")
        except Refused as refusal:
            return Response(refusal.body, refusal.status, media_type="application/json")
        except UpstreamError as error:
            return _error(503, f"no instance could serve this: {error}", headers={"Retry-After": "2"})
        return StreamingResponse(_to_the_end(reply), reply.status, media_type=reply.media)

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        """OpenAI's completions."""
        return await generate("completions", request)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        """OpenAI's chat completions."""
        return await generate("chat/completions", request)

    @app.get("/health")
    async def health() -> Response:
        """Whether requests can be served; without prefill instances the others read prompts, more slowly."""
        state = {"prefill": relay.prefill.well, "decode": relay.decode.well}
        return JSONResponse(state, 200 if relay.decode.well else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        """For Prometheus."""
        return Response(relay.metrics.page(), media_type="text/plain; version=0.0.4")

    async def elsewhere(request: Request) -> Response:
        """What any decode instance can say."""
        instance = relay.decode.choose()
        if instance is None:
            return _error(503, "no decode instance is well", headers={"Retry-After": "2"})
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
    app.state.relay = relay
    return app


async def _check_on(relay: Relay, seconds: float) -> None:
    while True:
        await asyncio.sleep(seconds)
        await relay.check()


async def _to_the_end(reply: Reply) -> AsyncIterator[bytes]:
    """The parts of an answer; one that breaks off says so, where it can."""
    try:
        async for part in reply.parts:
            yield part
    except (httpx.HTTPError, UpstreamError) as error:
        if reply.media != "text/event-stream":
            raise
        said = {"error": {"message": f"the instance broke off: {error}", "type": "server_error", "code": 502}}
        yield event(said).encode()


def _error(status: int, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    kind = "invalid_request_error" if status < 500 else "unavailable_error"
    return JSONResponse({"error": {"message": message, "type": kind, "param": None, "code": status}}, status, headers)
