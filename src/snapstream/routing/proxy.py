"""Forwards requests to the instances, and joins their answers into one."""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import httpx

from snapstream.routing.affinity import Affinity, Marks, owner_of
from snapstream.routing.answers import LOST, Answer, Joint, event, parse_event
from snapstream.routing.instances import Instance, Pool
from snapstream.routing.metrics import RouterMetrics
from snapstream.routing.requests import decode_request, prefill_request, reason_for_whole, wanted_tokens
from snapstream.routing.settings import RouterSettings

logger = logging.getLogger(__name__)

FORWARDED = ("authorization", "x-request-id", "x-api-key", "user-agent")
"""Headers of a client that instances get, too."""
_STATE = re.compile(rb'"id": ?"((?:ctx-|resp_)[^"]+)"')
"""The id of a context or a response, at the beginning of an answer."""


def another_may(status: int) -> bool:
    """Whether another instance may serve what one has answered with this status."""
    return status >= 500 or status == 429


class UpstreamError(Exception):
    """An instance failed in a way that another one may not."""


class Refused(Exception):  # noqa: N818 (an answer, not a failure)
    """An instance rejected a request that every instance would reject.

    Args:
        status: HTTP status.
        body: Body of the answer.
    """

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(status)
        self.status, self.body = status, body


@dataclass
class Reply:
    """An answer of the router.

    Attributes:
        status: HTTP status.
        media: Content type.
        parts: The body, in parts; the first part has already arrived.
    """

    status: int
    media: str
    parts: AsyncIterator[bytes]


class Proxy:
    """Serves requests through the instances.

    Args:
        settings: The operator's settings.
        client: HTTP client for all instances.
    """

    def __init__(self, settings: RouterSettings, client: httpx.AsyncClient) -> None:
        self.settings, self.client = settings, client
        self.prefill, self.decode = Pool(settings.prefill), Pool(settings.decode)
        self.affinity = Affinity(settings.affinity)
        self.metrics = RouterMetrics({"prefill": self.prefill, "decode": self.decode})

    async def check(self) -> None:
        """Run the health checks of all instances."""
        for pool in (self.prefill, self.decode):
            await pool.check(self.client, self.settings.connect_seconds)

    async def answer(self, kind: str, body: dict[str, Any], headers: Mapping[str, str]) -> Reply:
        """Serve a request.

        Args:
            kind: Its path after ``/v1/``: ``completions``, ``chat/completions``, ``responses``, ``messages`` or
                ``contexts``.
            body: The client's request.
            headers: The client's headers.

        Raises:
            Refused: The request is invalid.
            UpstreamError: No instance could serve it.
        """
        marks = Marks.of(body, headers)
        passed = {name: headers[name] for name in FORWARDED if name in headers}
        reason = reason_for_whole(kind, body)
        if reason is None and self.prefill.well == 0:
            reason = "no prefill instance"
        way = "split"
        try:
            reply = None if reason else await self._split(kind, body, passed, marks)
            if reply is None:
                way = "whole"
                self.metrics.whole.labels(reason or "the first token is part of a character").inc()
                reply = await self._whole(kind, body, passed, marks)
        except Refused:
            self.metrics.requests.labels(way, "refused").inc()
            raise
        except UpstreamError:
            self.metrics.requests.labels(way, "failed").inc()
            raise
        self.metrics.requests.labels(way, "answered").inc()
        return reply

    # -- whole requests -----------------------------------------------------------------------------------------------

    async def _whole(self, kind: str, body: dict[str, Any], headers: dict[str, str], marks: Marks) -> Reply:
        """Serve the whole request with one decode instance."""
        failure, missing = "no instance is healthy", list[Refused]()
        # What only one instance has may be anywhere after this router has been restarted.
        everyone = len(self.decode.instances)
        attempts = self.settings.attempts if marks.state is None else everyone
        for instance in self._candidates(self.decode, attempts, marks):
            try:
                stack, response = await self._ask(instance, kind, body, headers)
                media = response.headers.get("content-type", "application/json")
                reply = Reply(response.status_code, media, await _started(stack, response.aiter_bytes()))
            except Refused as refusal:
                if refusal.status != 404 or marks.state is None:
                    raise
                missing.append(refusal)
                failure = "not all instances could be asked for what this request continues"
            except (httpx.HTTPError, UpstreamError) as error:
                failure = self.failed("decode", instance, error)
            else:
                self.affinity.remember(marks, instance)
                if kind in ("contexts", "responses"):
                    note = functools.partial(self.affinity.remember_state, owner_of(headers), instance=instance)
                    reply.parts = _noting(reply.parts, note)
                return reply
        if len(missing) == everyone:
            raise missing[0]
        raise UpstreamError(failure)

    # -- split requests -----------------------------------------------------------------------------------------------

    async def _split(self, kind: str, body: dict[str, Any], headers: dict[str, str], marks: Marks) -> Reply | None:
        """Prefill with one instance and decode with another; ``None`` if the request must be served whole after all."""
        failure = "no decode instance is healthy"
        tried: list[Instance] = []
        while len(tried) < self.settings.attempts and self.decode.choose(tried) is not None:
            first = await self._read(kind, body, headers, marks)
            if first is None:
                return None
            choice = first["choices"][0]
            text = choice["message"]["content"] or "" if kind == "chat/completions" else choice["text"]
            if text.endswith(LOST):
                return None
            answer = Answer.to(kind, body, str(first.get("model")), text, first["usage"]["prompt_tokens"])
            transfer = first.get("kv_transfer_params")
            if choice["finish_reason"] != "length" or wanted_tokens(kind, body) == 1 or not transfer:
                return _complete(answer, choice["finish_reason"])
            # Chosen only now, because the load has changed during prefill.
            instance = self.decode.choose(tried)
            if instance is None:
                break
            tried.append(instance)
            tokens = (first.get("prompt_token_ids") or choice.get("prompt_token_ids")) + choice["token_ids"]
            second = decode_request(kind, body, tokens, transfer, instance.longest)
            try:
                return await self._go_on(instance, answer, second, headers)
            except Refused as refusal:  # the prompt was accepted before, so it is the cache; e.g. not allowed to fetch
                logger.error("%s refused a cache: %s", instance.url, refusal.body[:500].decode(errors="replace"))
                return None
            except (httpx.HTTPError, UpstreamError, ValueError, KeyError) as error:
                failure = self.failed("decode", instance, error)
        raise UpstreamError(failure)

    async def _read(
        self, kind: str, body: dict[str, Any], headers: dict[str, str], marks: Marks
    ) -> dict[str, Any] | None:
        """Have a prefill instance process the prompt; ``None`` if none can."""
        asked, begun = prefill_request(body), time.monotonic()
        for instance in self._candidates(self.prefill, self.settings.attempts, marks):
            try:
                stack, response = await self._ask(instance, kind, asked, headers)
                async with stack:
                    found: dict[str, Any] = json.loads(await response.aread())
                if not found["choices"][0].get("token_ids"):
                    raise UpstreamError("it does not return the generated token ids (return_token_ids)")
                self.metrics.prefill_seconds.observe(time.monotonic() - begun)
                return found
            except (httpx.HTTPError, UpstreamError, ValueError, KeyError) as error:
                self.failed("prefill", instance, error)
        return None

    async def _go_on(
        self, instance: Instance, answer: Answer, second: dict[str, Any], headers: dict[str, str]
    ) -> Reply:
        stack, response = await self._ask(instance, "completions", second, headers)
        if answer.streams:
            return Reply(200, "text/event-stream", await _started(stack, _joined(answer, response.aiter_lines())))
        async with stack:
            found = json.loads(await response.aread())
        choice = found["choices"][0]
        whole = answer.whole(choice["text"], choice["finish_reason"], 1 + found["usage"]["completion_tokens"])
        return Reply(200, "application/json", _once(json.dumps(whole).encode()))

    # -- shared -------------------------------------------------------------------------------------------------------

    def _candidates(self, pool: Pool, attempts: int, marks: Marks) -> Iterator[Instance]:
        """Instances of a pool for a prompt, the first one noted."""
        advantages = self.affinity.advantages(marks, pool.instances)
        held = {one: share for one, share in self.affinity.held(marks).items() if one in pool.instances}
        prompt = replace(marks, state=None)
        for number, instance in enumerate(pool.candidates(attempts, advantages)):
            if number == 0 and marks.state is None and marks.session is None:
                followed = "followed" if held.get(instance, 0.0) == max(held.values(), default=0.0) else "left"
                self.metrics.prompts.labels(followed if held else "new").inc()
            # Noted now, so that equal prompts that come meanwhile go there, too.
            self.affinity.remember(prompt, instance)
            yield instance
            if instance not in held:  # asked for another one: this one has not served the request
                self.affinity.forget(prompt, instance)

    async def _ask(
        self, instance: Instance, kind: str, body: dict[str, Any], headers: dict[str, str]
    ) -> tuple[contextlib.AsyncExitStack, httpx.Response]:
        """Send a request, and wait for the headers of the answer; closing the stack ends both.

        Raises:
            Refused: The request is invalid (4xx).
            UpstreamError: The instance could not serve it (5xx, 429).
        """
        async with contextlib.AsyncExitStack() as stack:
            stack.enter_context(instance.serving())
            asked = self.client.stream("POST", f"{instance.url}/v1/{kind}", json=body, headers=headers)
            response = await stack.enter_async_context(asked)
            if another_may(response.status_code):
                said = (await response.aread())[:500].decode(errors="replace")
                raise UpstreamError(f"{response.status_code}: {said}")
            if response.status_code >= 400:
                raise Refused(response.status_code, await response.aread())
            return stack.pop_all(), response

    def failed(self, does: str, instance: Instance, error: Exception) -> str:
        """Record a failure; after a connection error, the instance gets no requests until its next health check."""
        if isinstance(error, httpx.HTTPError):
            instance.is_well = False
        self.metrics.retries.labels(does).inc()
        text = f"{instance.url} failed: {error or type(error).__name__}"
        logger.warning("%s", text)
        return text


async def _started(stack: contextlib.AsyncExitStack, parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Wait for the first part and return all parts; until the first one arrives, another instance may be tried."""
    async with contextlib.AsyncExitStack() as failing:
        failing.push_async_exit(stack)
        first = await anext(parts, b"")
        failing.pop_all()

    async def rest() -> AsyncIterator[bytes]:
        async with stack:
            yield first
            async for part in parts:
                yield part

    return rest()


async def _noting(parts: AsyncIterator[bytes], note: Callable[[str], None]) -> AsyncIterator[bytes]:
    """Parts of an answer, whose id is noted when the first one passes."""
    is_first = True
    async for part in parts:
        if is_first and (found := _STATE.search(part)):
            note(found[1].decode(errors="replace"))
        is_first = False
        yield part


async def _once(body: bytes) -> AsyncIterator[bytes]:
    yield body


def _complete(answer: Answer, finish: str | None) -> Reply:
    """The answer of a request that ended with its first token."""
    if not answer.streams:
        return Reply(200, "application/json", _once(json.dumps(answer.whole("", finish, 1)).encode()))
    said = answer.chunk(answer.first, finish, opens=True) + answer.ending(1)
    return Reply(200, "text/event-stream", _once(said.encode()))


async def _joined(answer: Answer, lines: AsyncIterator[str]) -> AsyncIterator[bytes]:
    """The stream of the rest with the first token prepended, in the format that the client asked for.

    Raises:
        UpstreamError: The instance failed. Before the first part, another instance may be tried.
    """
    joint, opens, made, is_over = Joint(answer), True, 1, False
    async for line in lines:
        said = parse_event(line)
        if said is None or said == "[DONE]":
            continue
        assert isinstance(said, dict)
        if "error" in said:
            if opens:
                raise UpstreamError(json.dumps(said["error"]))
            yield event(said).encode()
            break
        if said.get("usage"):
            made = 1 + said["usage"]["completion_tokens"]
        for choice in said.get("choices", []):
            finish = choice.get("finish_reason")
            if finish == "error" and opens:
                raise UpstreamError("the request ended with an error")
            for text, is_over in joint.add(choice.get("text") or "", ends=finish is not None):
                yield answer.chunk(text, "stop" if is_over else finish, opens=opens).encode()
                opens = False
        if is_over:
            break
    if opens:
        raise UpstreamError("its stream ended early")
    yield answer.ending(made).encode()
