"""Streamed answers, which end when the client disconnects, and send comments while there is no output."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
from fastapi.responses import Response
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from snapstream.serving.clients import DisconnectedError, until_disconnect
from snapstream.serving.errors import ApiError, as_api_error

Emit = Callable[[str], Awaitable[None]]
"""Sends an event, as :func:`event` writes it."""


def event(data: str, name: str = "") -> str:
    """A server-sent event."""
    return f"event: {name}\ndata: {data}\n\n" if name else f"data: {data}\n\n"


def comment_for(agent: str, text: str) -> str:
    """A comment in a stream, which clients ignore.

    Benchmarks of vLLM and SGLang, which use aiohttp, lose the event after a comment. They get an empty line.
    """
    return "\n" if "aiohttp" in agent else f": {text}\n\n"


def error_event(error: ApiError, request_id: str) -> str:
    """The event of an error, in OpenAI's format."""
    return event(json.dumps(error.body(request_id), allow_nan=False))


@asynccontextmanager
async def kept_alive(
    send: Callable[[bytes], Awaitable[None]], seconds: float, comment: Callable[[], str]
) -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """Send a comment whenever nothing was sent for a while, because proxies cut silent connections.

    Args:
        send: Sends bytes of a stream of server-sent events.
        seconds: Seconds of silence before a comment is sent; 0 sends none.
        comment: Writes a comment.

    Yields:
        The function to send events with.
    """
    sending, sent = anyio.Lock(), anyio.current_time()

    async def send_one(data: bytes) -> None:
        nonlocal sent
        async with sending:  # events and comments wait for each other if the client reads slowly
            await send(data)
            sent = anyio.current_time()

    async def send_comments() -> None:
        while True:
            await anyio.sleep(max(sent + seconds - anyio.current_time(), 0.001))
            if anyio.current_time() - sent >= seconds and not sending.locked():
                await send_one(comment().encode())

    async with anyio.create_task_group() as group:
        if seconds:
            group.start_soon(send_comments)
        yield send_one
        group.cancel_scope.cancel()


class EventStream(Response):
    """A stream of server-sent events that ends when the client disconnects, even while there is nothing to send.

    Args:
        produce: Sends the events; its exception, if any, is sent as the last event.
        cancel: Called at the end in any case.
        deadline: When the stream must have ended, in :func:`anyio.current_time` time.
        request_id: Id of the request, for the error.
        keep_alive: Seconds of silence after which a comment is sent; 0 for none.
        progress: Returns the text of the comment, which describes the request's progress.
        write_error: Writes the event of an error.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        produce: Callable[[Emit], Awaitable[None]],
        cancel: Callable[[], None],
        deadline: float,
        request_id: str,
        *,
        keep_alive: float,
        progress: Callable[[], str],
        write_error: Callable[[ApiError, str], str] = error_event,
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._produce, self._cancel, self._deadline, self._request_id = produce, cancel, deadline, request_id
        self._keep_alive, self._progress, self._write_error = keep_alive, progress, write_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response."""
        agent = Headers(scope=scope).get("user-agent", "")

        def comment() -> str:
            return comment_for(agent, self._progress())

        async def send_part(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async def work() -> None:
            failure: Exception | None = None
            with anyio.move_on_after(max(self._deadline - anyio.current_time(), 0)) as until:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async with kept_alive(send_part, self._keep_alive, comment) as send_event:
                    try:
                        await self._produce(lambda text: send_event(text.encode()))
                    except Exception as error:
                        failure = error
            if until.cancelled_caught:
                failure = TimeoutError()
            if failure is not None:
                # A client that does not read does not receive the error either.
                with anyio.move_on_after(1):
                    await send_part(self._write_error(as_api_error(failure), self._request_id).encode())

        try:
            await until_disconnect(receive, work)
            # Only now: to the server, a finished response looks like a disconnected client.
            with anyio.move_on_after(1):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except DisconnectedError:
            scope["state"]["log"]["disconnected"] = True
        finally:
            self._cancel()
