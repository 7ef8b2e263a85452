"""Reads and decompresses request bodies within limits of size and time."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from functools import partial

import anyio
import anyio.to_thread
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snapstream.serving.errors import ApiError, respond
from snapstream.serving.middleware import is_open

_UNWANTED = 1024
"""Maximum body of a request that needs none, in bytes; some clients send ``{}`` with every request."""
_MEMBERS = 100
"""Most members of gzip data."""
_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}
"""Supported encodings, with the ``wbits`` argument of zlib for each."""


class BodyMiddleware:
    """Reads each body completely before the application, and refuses bodies that are too long or arrive too slowly.

    Bodies of requests that need none are read and dropped. They must be short, because such requests need no API key.
    Bodies may be compressed with gzip or deflate; the limit also applies to the decompressed size.

    Args:
        app: The application.
        max_bytes: Maximum size of a body.
        seconds: Maximum time to receive a body.
    """

    def __init__(self, app: ASGIApp, max_bytes: int, seconds: float) -> None:
        self.app, self.max_bytes, self.seconds = app, max_bytes, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            wanted = scope["method"] == "POST" and not is_open(scope)
            limit = self.max_bytes if wanted else min(_UNWANTED, self.max_bytes)
            headers = Headers(scope=scope)
            inflate = _inflater(headers, limit) if wanted else None
            body = await self._read(headers, receive, limit)
            if body is not None:
                body = b"" if not wanted else body if inflate is None else await anyio.to_thread.run_sync(inflate, body)
        except ApiError as error:
            answer = respond(error, scope)
            answer.headers["Connection"] = "close"  # the rest of the body is not read
            await answer(scope, receive, send)
            return
        if body is None:
            scope["state"]["log"]["disconnected"] = True
            return
        handed_out = False

        async def receive_read() -> Message:
            nonlocal handed_out
            if handed_out:
                return await receive()
            handed_out = True
            return {"type": "http.request", "body": body, "more_body": False}

        await self.app(scope, receive_read, send)

    async def _read(self, headers: Headers, receive: Receive, limit: int) -> bytes | None:
        """Read the whole body; ``None`` if the client disconnects."""
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length[:20]) > limit:
            raise _too_long(limit)
        parts, size = [], 0
        with anyio.move_on_after(self.seconds):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    return None
                part = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise _too_long(limit)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
        raise ApiError(408, f"the body did not arrive within {self.seconds:g} s", code="body_timeout")


def _too_long(limit: int) -> ApiError:
    return ApiError(413, f"the body is longer than {limit} bytes", code="body_too_large")


def _inflater(headers: Headers, limit: int) -> Callable[[bytes], bytes] | None:
    """The function that decompresses a body with this ``Content-Encoding``; ``None`` if it is not compressed.

    Raises:
        ApiError: The encoding is not supported.
    """
    encodings = [name for name in headers.get("content-encoding", "").lower().replace(" ", "").split(",") if name]
    wanted = [name for name in encodings if name != "identity"]
    if not wanted:
        return None
    if len(wanted) > 1 or wanted[0] not in _WINDOWS:
        raise ApiError(
            415,
            f"the Content-Encoding {headers['content-encoding'][:40]!r} is not supported; send the body "
            f"uncompressed, or with one of {', '.join(_WINDOWS)}",
            code="unsupported_encoding",
        )
    return partial(_inflate, window=_WINDOWS[wanted[0]], limit=limit)


def _inflate(body: bytes, window: int, limit: int) -> bytes:
    """Decompress a body, but stop at the limit.

    Raises:
        ApiError: It is too long, or not compressed in this way.
    """
    parts, size = list[bytes](), 0
    try:
        while body:  # gzip data may consist of several members; each costs a copy of the rest
            if len(parts) == _MEMBERS:
                raise zlib.error(f"it has more than {_MEMBERS} members")
            stream = zlib.decompressobj(window)
            parts.append(stream.decompress(body, limit + 1 - size))
            size += len(parts[-1])
            if size > limit:
                raise _too_long(limit)
            if not stream.eof:
                raise zlib.error("it ends too soon")
            body = stream.unused_data
    except zlib.error as error:
        raise ApiError(400, f"the body is not compressed as its Content-Encoding says: {error}") from error
    return b"".join(parts)
