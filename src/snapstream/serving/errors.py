"""Errors in OpenAI's format: ``{"error": {"message", "type", "param", "code", "request_id"}}``."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Scope

from snapstream.errors import ContextLengthError, RequestError
from snapstream.serving.body import REFUSED
from snapstream.serving.driver import EngineError, QueueFullError, UnavailableError

logger = logging.getLogger(__name__)

TYPES: Mapping[int, str] = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "unavailable_error",
    504: "timeout_error",
}


_MEANINGS = {
    400: "The request cannot be served; the message says why.",
    401: "No valid API key.",
    404: "No such model, session, context or path.",
    408: "The body arrived too slowly.",
    409: "A turn of this session is still running.",
    413: "The body is too long.",
    415: "The body's Content-Encoding is not supported.",
    429: "The queue is full; Retry-After says when to try again.",
    500: "The request or the engine failed.",
    503: "The server is stopping, its engine has failed, or contexts in use take all the memory for contexts.",
    504: "The request took too long.",
}


_ANTHROPIC = {408: "timeout_error", 413: "request_too_large", 503: "overloaded_error", 504: "timeout_error"}
"""Types of errors that Anthropic's API calls otherwise."""
_PROMPTS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/contexts": "text",
    "/v1/responses": "input",
    "/v1/messages": "messages",
}
"""The field that contains the prompt, by path."""


class ErrorDetail(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None
    request_id: str | None = None


class ErrorBody(BaseModel):
    """The error response of every endpoint."""

    error: ErrorDetail


DOCUMENTED: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorBody, "description": meaning} for status, meaning in _MEANINGS.items()
}
"""All error statuses of the routes, for the OpenAPI document."""


class ApiError(Exception):
    """An error response.

    Args:
        status: HTTP status.
        message: What was given, what is allowed, and what to do.
        param: The field that is wrong.
        code: A short name for programs.
        headers: Additional headers.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = dict(headers or {})

    def body(self, request_id: str | None, *, anthropic: bool = False) -> dict[str, Any]:
        """The response body, in OpenAI's format or in Anthropic's."""
        message = _printable(self.message, 2000)
        kind = TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        detail = ErrorDetail(
            message=message,
            type=kind,
            param=self.param and _printable(self.param, 200),
            code=self.code,
            request_id=request_id,
        )
        body = ErrorBody(error=detail).model_dump()
        if not anthropic:
            return body
        body["error"]["type"] = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else kind)
        return {"type": "error"} | body | {"request_id": request_id}


def _printable(text: str, length: int) -> str:
    """Shorten and sanitize a message, which may quote long or invalid text from the client."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= length else f"{text[: length - 1]}…"


def as_api_error(error: Exception) -> ApiError:
    """Convert an exception to an error response; an unexpected one is logged and becomes a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        return ApiError(429, str(error), code="queue_full", headers={"Retry-After": str(error.seconds)})
    if isinstance(error, TimeoutError):
        return ApiError(504, "the request took longer than the server allows (request_timeout)", code="timeout")
    for kind, status, code, headers in (
        (ContextLengthError, 400, "context_length_exceeded", {}),
        (RequestError, 400, None, {}),
        (UnavailableError, 503, "unavailable", {"Retry-After": "5"}),
        (EngineError, 500, "engine_error", {}),
    ):
        if isinstance(error, kind):
            return ApiError(status, str(error), code=code, headers=headers)
    logger.error("unexpected error", exc_info=error)
    return ApiError(500, f"unexpected error: {type(error).__name__}")


def respond(error: Exception, scope: Scope) -> JSONResponse:
    """The response to an exception, in the format of the API that was called."""
    answer, request_id = as_api_error(error), scope.get("state", {}).get("request_id")
    anthropic = scope["path"].startswith("/v1/messages")
    return JSONResponse(answer.body(request_id, anthropic=anthropic), answer.status, headers=answer.headers)


def install(app: FastAPI) -> None:
    """Make the application answer all errors in this format, including those of the framework."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        kind = request.headers.get("content-type", "none")
        if "json" not in kind and request.method == "POST":
            problem = ApiError(400, f"the body must be JSON, sent as application/json; its Content-Type is {kind}")
            return respond(problem, request.scope)
        return respond(_first_problem(error), request.scope)

    @app.exception_handler(HTTPException)
    async def refused(request: Request, error: HTTPException) -> JSONResponse:
        answer = ApiError(error.status_code, str(error.detail), headers=error.headers)
        if error.status_code == 404:
            answer.message = f"there is no {request.url.path} here; see /openapi.json"
        return respond(answer, request.scope)

    async def failed(request: Request, error: Exception) -> JSONResponse:
        answer = as_api_error(error)
        if isinstance(error, ContextLengthError):
            answer.param = _PROMPTS.get(request.url.path)
        return respond(answer, request.scope)

    for kind in (ApiError, RequestError, QueueFullError, UnavailableError, EngineError, TimeoutError):
        app.add_exception_handler(kind, failed)


def _first_problem(error: RequestValidationError) -> ApiError:
    """The first problem in a body, with the place of its field; for a union, the problem of the closest alternative."""
    problems = error.errors()
    alike = [one for one in problems if one["loc"][:2] == problems[0]["loc"][:2]]
    problem = max(alike, key=lambda one: (len(one["loc"]), not one["type"].endswith("_type")))
    place = _place(problem["loc"])
    if problem["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {problem.get('ctx', {}).get('error', problem['msg'])}")
    if problem["type"] == REFUSED:
        field, reason = problem["ctx"]["field"], problem["ctx"]["reason"]
        return ApiError(400, f"{place}: {reason}" if place else reason, param=f"{place}.{field}" if place else field)
    return ApiError(400, f"{place or 'the body'}: {problem['msg'].removeprefix('Value error, ')}", param=place or None)


def _place(steps: Sequence[int | str]) -> str:
    """Format a place in a body, such as ``messages[1].content[0].text``, without the type names of unions."""
    place = ""
    for step in steps[1:]:  # the first one is always "body"
        if isinstance(step, int):
            place += f"[{step}]"
        elif step.isidentifier() and step not in _TYPES and not step[:1].isupper():
            place += f".{step}"
    return place.removeprefix(".")


_TYPES = frozenset(("str", "int", "float", "bool", "dict", "list", "none"))
"""Pydantic's names for union members, besides models and longer names."""
