"""Runs work for a client until it disconnects."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import anyio
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
