"""Runs work for a client until it disconnects, or its time is up."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import anyio
from fastapi import Request
from starlette.types import Receive

T = TypeVar("T")


class DisconnectedError(Exception):
    """The client has disconnected."""


async def until_disconnect(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Run ``work`` and return its result, but cancel it if the client disconnects.

    Raises:
        DisconnectedError: The client has disconnected.
    """
    gone = done = False
    failure: Exception | None = None
    results: list[T] = []

    async with anyio.create_task_group() as group:

        async def watch() -> None:
            nonlocal gone
            while (await receive())["type"] != "http.disconnect":
                pass
            gone = not done
            group.cancel_scope.cancel()

        async def run() -> None:
            nonlocal done, failure
            try:
                results.append(await work())
            except Exception as error:
                failure = error
            done = True
            group.cancel_scope.cancel()

        group.start_soon(watch)
        group.start_soon(run)
    if failure is not None:
        raise failure
    if gone:
        raise DisconnectedError
    return results[0]


class Incoming:
    """What the server knows of a request besides its body.

    Attributes:
        request_id: Its id.
        owner: Digest of its API key; empty without keys.
        began: When it arrived, in :func:`time.monotonic` time.
        created: The same in seconds since 1970.
        deadline: When it must have been answered, in :func:`anyio.current_time` time.
        log: Fields of its line in the log.
    """

    def __init__(self, request: Request, seconds: float) -> None:
        """Read the state that middleware has left.

        Args:
            request: The request.
            seconds: How long it may take.
        """
        state = request.scope["state"]
        self.request_id: str = state["request_id"]
        self.owner: str = state.get("owner", "")
        self.began: float = state["began"]
        self.created = int(time.time())
        self.deadline = anyio.current_time() + seconds - (time.monotonic() - self.began)
        self.log: dict[str, Any] = state["log"]
        self._receive = request.receive

    async def answer(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Run ``work`` and return its result, or ``None`` if the client disconnects.

        Raises:
            TimeoutError: The deadline has passed.
        """
        try:
            with anyio.fail_after(max(self.deadline - anyio.current_time(), 0)):
                return await until_disconnect(self._receive, work)
        except DisconnectedError:
            self.log["disconnected"] = True
            return None
