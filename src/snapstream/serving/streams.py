"""Streamed answers: they end when the client disconnects, and say something now and then while a prompt is read."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from snapstream.serving.clients import DisconnectedError, until_disconnect
from snapstream.serving.errors import as_api_error

Emit = Callable[[dict[str, Any] | str], Awaitable[None]]


@asynccontextmanager
async def kept_alive(
    send: Callable[[bytes], Awaitable[None]], seconds: float, say: Callable[[], str]
) -> AsyncIterator[Callable[[bytes], Awaitable[None]]]:
    """Send a comment whenever nothing else was sent for a while; proxies cut connections that are silent.

    Args:
        send: Sends bytes of a stream of server-sent events.
        seconds: That may pass in silence; 0 for any time.
        say: The text of a comment, which clients ignore.

    Yields:
        What to send events with.
    """
    sending, sent = anyio.Lock(), anyio.current_time()

    async def send_one(data: bytes) -> None:
        nonlocal sent
        async with sending:  # a client that reads slowly makes one wait for the other
            await send(data)
            sent = anyio.current_time()

    async def comment() -> None:
        while True:
            await anyio.sleep(max(sent + seconds - anyio.current_time(), 0.001))
            if anyio.current_time() - sent >= seconds and not sending.locked():
                await send_one(f": {say()}\n\n".encode())

    async with anyio.create_task_group() as group:
        if seconds:
            group.start_soon(comment)
        yield send_one
        group.cancel_scope.cancel()


class EventStream(Response):
    """Server-sent events that end when the client goes, also while there is nothing to send.

    Args:
        produce: Sends the events; what it raises is sent as a last one.
        cancel: Called in any case at the end.
        deadline: When it must have ended, as :func:`anyio.current_time` counts.
        request_id: For the error.
        keep_alive: Seconds of silence after which a comment is sent; 0 for none.
        progress: The comment: what the request is waiting for.
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
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._produce, self._cancel, self._deadline, self._request_id = produce, cancel, deadline, request_id
        self._keep_alive, self._progress = keep_alive, progress

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""

        async def send_part(data: bytes) -> None:
            await send({"type": "http.response.body", "body": data, "more_body": True})

        async def work() -> None:
            failure: Exception | None = None
            with anyio.move_on_after(max(self._deadline - anyio.current_time(), 0)) as until:
                await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                async with kept_alive(send_part, self._keep_alive, self._progress) as send_event:
                    try:
                        await self._produce(lambda event: send_event(_as_event(event)))
                        await send_event(_as_event("[DONE]"))
                    except Exception as error:
                        failure = error
            if until.cancelled_caught:
                failure = TimeoutError()
            if failure is not None:
                # A client that does not read what is there cannot be told either.
                with anyio.move_on_after(1):
                    await send_part(_as_event(as_api_error(failure).body(self._request_id)))

        try:
            await until_disconnect(receive, work)
            # Only now: a finished response looks to the server like a client that has gone.
            with anyio.move_on_after(1):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except DisconnectedError:
            scope["state"]["log"]["disconnected"] = True
        finally:
            self._cancel()


def _as_event(event: dict[str, Any] | str) -> bytes:
    text = event if isinstance(event, str) else json.dumps(event, allow_nan=False)
    return f"data: {text}\n\n".encode()
