"""Requests for completions: checks them, and cancels their answers if the client disconnects."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import Response

from snapstream.engine import Context
from snapstream.serving.call import Call
from snapstream.serving.chat_writer import ChatWriter
from snapstream.serving.clients import Incoming
from snapstream.serving.completion_writer import CompletionWriter
from snapstream.serving.errors import ApiError
from snapstream.serving.parts import Parts
from snapstream.serving.past import Past
from snapstream.serving.prompts import Prompt
from snapstream.serving.protocol import ChatRequest, CompletionRequest, Generate
from snapstream.serving.streams import EventStream
from snapstream.serving.tools.base import Tools
from snapstream.serving.writer import Writer

T = TypeVar("T")
MakeWriter = Callable[[Call, str, int], Writer]
"""Makes the writer of an answer, given the call, the id of the request, and when it arrived."""

MAX_SCORES = 2**20
"""Maximum number of prompt log-probabilities per request; each takes about a hundred bytes until it is sent."""


class Completions:
    """Answers requests for completions and chat completions.

    Args:
        parts: The server's parts.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._reading = 0

    async def complete(self, body: CompletionRequest, request: Request) -> Response:
        """Answer ``/v1/completions``."""
        for name in ("session_id", "context_id"):
            if body.echo and body.logprobs is not None and getattr(body, name) is not None:
                message = f"echo with logprobs needs the whole prompt to be prefilled; leave out {name}"
                raise ApiError(400, message, param=name)
        one = is_one(body.prompt)
        given: list[Any] = [body.prompt] if one else list(body.prompt)
        scored = bool(body.echo) and body.logprobs is not None
        reader, offsets = self._parts.reader, body.session_id is not None or scored
        self._check_choices(body, len(given) * (body.n or 1))

        async def one_prompt(prompt: Any, context: Context | None) -> Prompt:
            if not isinstance(prompt, str):
                return reader.tokens(prompt, pin=body.pins)
            if context is not None:
                return await reader.after(context, prompt)
            return await reader.text(prompt, offsets=offsets, pin=body.pins)

        async def read(context: Context | None) -> list[Prompt]:
            prompts = [await one_prompt(prompt, context) for prompt in given]
            numbers = sum(len(prompt.tokens) for prompt in prompts) * (1 + (body.logprobs or 0)) * (body.n or 1)
            if scored and numbers > MAX_SCORES:
                message = f"echo with logprobs would report {numbers} numbers; at most {MAX_SCORES} in one request"
                raise ApiError(400, message, param="logprobs")
            return prompts

        longest = self._parts.llm.engine.max_model_len
        limit = 16 if body.max_tokens is None else longest if body.max_tokens < 0 else body.max_tokens
        return await self._answer(body, request, read, CompletionWriter, max_tokens=limit, logprobs=body.logprobs)

    async def chat(self, body: ChatRequest, request: Request, writer: MakeWriter = ChatWriter) -> Response:
        """Answer ``/v1/chat/completions``, or a conversation in another API's form.

        Args:
            body: The conversation.
            request: The request.
            writer: Writes the answer.
        """
        if body.top_logprobs is not None and not body.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs: true", param="top_logprobs")
        self._check_choices(body, body.n or 1)
        tools, shown = body.callable_tools(), [tool.for_template() for tool in body.shown_tools()]
        variables = self._parts.reader.variables(body)

        async def read(context: Context | None) -> list[Prompt]:
            reader, offsets = self._parts.reader, body.session_id is not None
            if context is not None:
                return [await reader.messages_after(context, body.messages, variables, shown)]
            return [await reader.messages(body.messages, variables, shown, offsets=offsets, pin=body.pins)]

        limit = body.max_completion_tokens or body.max_tokens or self._parts.llm.engine.max_model_len
        wanted = (body.top_logprobs or 0) if body.logprobs else None
        return await self._answer(body, request, read, writer, max_tokens=limit, logprobs=wanted, tools=tools)

    def _check_choices(self, body: Generate, number: int) -> None:
        most = self._parts.settings.max_choices
        if number > most:
            raise ApiError(400, f"{number} answers were requested (prompts times n); at most {most}", param="n")
        for name in ("session_id", "return_kept_tokens", "telemetry"):
            if number > 1 and getattr(body, name):
                raise ApiError(400, f"{name} needs a single prompt and a single answer; leave out n", param=name)

    def check_model(self, name: str | None) -> None:
        """Check that a model is the served one; ``None`` is accepted.

        Raises:
            ApiError: It is not.
        """
        served = self._parts.settings.model_name
        if name is not None and name != served:
            message = f"the model {name!r} is not served here; {served!r} is"
            raise ApiError(404, message, param="model", code="model_not_found")

    async def _answer(
        self,
        body: Generate,
        request: Request,
        read: Callable[[Context | None], Awaitable[list[Prompt]]],
        writer: MakeWriter,
        *,
        max_tokens: int,
        logprobs: int | None,
        tools: Tools | None = None,
    ) -> Response:
        self.check_model(body.model)
        incoming, past = Incoming(request, self._parts.settings.request_timeout), Past(self._parts)
        call = Call(self._parts, body, past, max_tokens=max_tokens, logprobs=logprobs, tools=tools)

        def close() -> None:
            past.release()
            call.close()
            incoming.log.update(call.for_log())

        async def work() -> Writer | bytes:
            await past.take(incoming.owner, body)
            prompts = await self.in_turn(lambda: read(past.context))
            await call.start(prompts, asked=incoming.began, salt=incoming.owner)
            writing = writer(call, incoming.request_id, incoming.created)
            return writing if body.stream else await writing.collect()

        try:
            answer = await incoming.answer(work)
        except BaseException:
            close()
            raise
        if isinstance(answer, Writer):
            return EventStream(
                answer.stream,
                close,
                incoming.deadline,
                incoming.request_id,
                keep_alive=self._parts.settings.keep_alive_seconds,
                progress=call.progress,
                write_error=answer.error_event,
            )
        close()
        return Response(status_code=499) if answer is None else Response(answer, media_type="application/json")

    async def in_turn(self, read: Callable[[], Awaitable[T]]) -> T:
        """Tokenize prompts, but not for more requests than the queue has room for, because each holds its body."""
        self._parts.driver.check_room(self._reading + 1)
        self._reading += 1
        try:
            return await read()
        finally:
            self._reading -= 1


def is_one(prompt: Any) -> bool:
    """Whether this is a single prompt rather than a list of prompts."""
    return isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
