"""Answers that end when the client goes: nothing is generated for a closed connection."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from snapstream.serving.clients import DisconnectedError, until_disconnect
from snapstream.serving.errors import as_api_error

Emit = Callable[[dict[str, Any] | str], Awaitable[None]]


class EventStream(Response):
    """Server-sent events that end when the client goes, also while there is nothing to send.

    Args:
        produce: Sends the events; what it raises is sent as a last one.
        cancel: Called in any case at the end.
        deadline: When it must have ended, as :func:`anyio.current_time` counts.
        request_id: For the error.
    """

    media_type = "text/event-stream"

    def __init__(
        self, produce: Callable[[Emit], Awaitable[None]], cancel: Callable[[], None], deadline: float, request_id: str
    ) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._produce, self._cancel, self._deadline, self._request_id = produce, cancel, deadline, request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""

        async def emit(event: dict[str, Any] | str) -> None:
            text = event if isinstance(event, str) else json.dumps(event, allow_nan=False)
            body = f"data: {text}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": True})

        async def work() -> None:
            try:
                with anyio.fail_after(max(self._deadline - anyio.current_time(), 0)):
                    await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
                    await self._produce(emit)
                    await emit("[DONE]")
            except Exception as error:
                # A client that does not read what is there cannot be told either.
                with anyio.move_on_after(1):
                    await emit(as_api_error(error).body(self._request_id))

        try:
            await until_disconnect(receive, work)
            # Only now: a finished response looks to the server like a client that has gone.
            with anyio.move_on_after(1):
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except DisconnectedError:
            scope["state"]["log"]["disconnected"] = True
        finally:
            self._cancel()
