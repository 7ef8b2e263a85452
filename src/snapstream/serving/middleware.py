"""Middleware for request ids, API keys, errors and the access log. It is plain ASGI, so it passes on disconnects."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from snapstream.serving.errors import ApiError, respond
from snapstream.serving.logs import log_fields
from snapstream.serving.metrics import ServerMetrics

logger = logging.getLogger("snapstream.access")

OPEN_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/openapi.json"})
"""Paths that need no API key, besides the files of the page. All others do, including paths that do not exist."""

SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}
PAGE_POLICY = "default-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_QUIET = frozenset({"/health", "/ready", "/metrics", "/v1/cache", "/v1/models"})


class AccessMiddleware:
    """Assigns request ids, sets security headers, and measures and logs requests.

    Args:
        app: The application.
        metrics: Counts the requests.
    """

    def __init__(self, app: ASGIApp, metrics: ServerMetrics) -> None:
        self.app, self.metrics = app, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        log: dict[str, Any] = {}
        began = time.monotonic()
        scope.setdefault("state", {}).update(request_id=request_id, log=log, began=began)
        status = 0

        async def send_named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                named = MutableHeaders(scope=message)
                named["X-Request-Id"] = request_id
                for name, value in SECURITY_HEADERS.items():
                    named[name] = value
                if scope["path"] == "/" or scope["path"].startswith("/page/"):
                    named["Content-Security-Policy"] = PAGE_POLICY
            await send(message)

        try:
            await self.app(scope, receive, send_named)
        finally:
            if log.get("disconnected"):
                status = 499
            self.metrics.answered(scope["method"], getattr(scope.get("route"), "path", "other"), status)
            quiet = scope["path"] in _QUIET and status < 500
            fields = {
                "request_id": request_id,
                "method": scope["method"],
                "path": scope["path"],
                "status": status,
                "duration_s": round(time.monotonic() - began, 4),
                **log,
            }
            log_fields(logger, logging.DEBUG if quiet else logging.INFO, "request", fields)


class HeadMiddleware:
    """Answers HEAD like GET, without the body; load balancers and ``wget --spider`` use it.

    Args:
        app: The application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return

        async def send_head(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        inner = {**scope, "method": "GET"}
        try:
            await self.app(inner, receive, send_head)
        finally:
            scope["route"] = inner.get("route")  # for the metrics around this


class ErrorMiddleware:
    """Answers unexpected errors inside the other middleware, so that these responses pass through it too.

    Args:
        app: The application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request."""
        began = False

        async def send_on(message: Message) -> None:
            nonlocal began
            began = True
            await send(message)

        try:
            await self.app(scope, receive, send_on)
        except Exception as error:
            if began or scope["type"] != "http":
                raise  # the response has started, so the connection can only be aborted
            await respond(error, scope)(scope, receive, send)


class KeyMiddleware:
    """Refuses requests without a valid key.

    Args:
        app: The application.
        api_keys: Allowed keys; if there are none, no key is needed.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self.app = app
        self.api_keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Process a request."""
        if scope["type"] != "http" or not self.api_keys or is_open(scope):
            await self.app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        scheme, _, key = headers.get("authorization", "").partition(" ")
        key = key if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        given = key.strip().encode("latin-1", "replace")
        # All keys are compared, each in constant time, so that timing reveals nothing about them.
        matches = [hmac.compare_digest(given, known) for known in self.api_keys]
        if any(matches):
            scope["state"]["log"]["key"] = f"key-{matches.index(True) + 1}"
            # A digest, because sessions may outlive the server and the order of its keys.
            scope["state"]["owner"] = hashlib.sha256(given).hexdigest()
            await self.app(scope, receive, send)
            return
        refusal = ApiError(
            401,
            "this server needs an API key: send it as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
        await respond(refusal, scope)(scope, receive, send)


def is_open(scope: Scope) -> bool:
    """Whether a request needs no API key."""
    path = scope["path"]
    return path in OPEN_PATHS or path.startswith("/page/") or scope["method"] == "OPTIONS"
