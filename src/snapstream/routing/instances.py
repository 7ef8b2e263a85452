"""Instances of a server: which are healthy, and which is least loaded."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Instance:
    """One instance.

    Attributes:
        url: Its base URL.
        is_well: Result of the last health check; also ``False`` after a connection failed.
        busy: Number of this router's requests that it is serving.
        longest: Its ``max_model_len``, in tokens; 0 if unknown.
        life: How many times it has come up by its health checks; what it had in memory before that is lost.
        was_well: Result of the last health check.
    """

    url: str
    is_well: bool = False
    busy: int = 0
    longest: int = 0
    life: int = 0
    was_well: bool = False

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Count a request while it is being served."""
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1


class Pool:
    """Instances with the same role.

    Args:
        urls: Their base URLs.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.instances = [Instance(url) for url in urls]

    def choose(
        self, tried: Collection[Instance] = (), advantages: Mapping[Instance, float] | None = None
    ) -> Instance | None:
        """The least loaded healthy instance that was not tried yet; ties are broken at random.

        Args:
            tried: Instances to leave out.
            advantages: How many requests fewer than it has an instance counts as having.
        """
        less = advantages or {}
        found = [one for one in self.instances if one.is_well and one not in tried]
        return min(found, key=lambda one: (one.busy - less.get(one, 0.0), random.random()), default=None)

    def candidates(self, attempts: int, advantages: Mapping[Instance, float] | None = None) -> Iterator[Instance]:
        """Yield up to ``attempts`` different instances; each is chosen only after the previous one has failed."""
        tried: list[Instance] = []
        while len(tried) < attempts and (instance := self.choose(tried, advantages)) is not None:
            tried.append(instance)
            yield instance

    @property
    def well(self) -> int:
        """Number of healthy instances."""
        return sum(one.is_well for one in self.instances)

    async def check(self, client: httpx.AsyncClient, seconds: float) -> None:
        """Run the health checks of all instances."""
        await asyncio.gather(*(_check(client, one, seconds) for one in self.instances))


async def _check(client: httpx.AsyncClient, instance: Instance, seconds: float) -> None:
    try:
        answer = await client.get(f"{instance.url}/health", timeout=seconds)
        is_well = answer.status_code == 200
        if is_well and not instance.longest:
            cards = (await client.get(f"{instance.url}/v1/models", timeout=seconds)).json().get("data", [])
            instance.longest = int(cards[0].get("max_model_len") or 0) if cards else 0
    except (httpx.HTTPError, ValueError, TypeError, AttributeError, KeyError):
        is_well = False
    if is_well != instance.is_well:
        logger.log(
            logging.INFO if is_well else logging.WARNING, "%s is %s", instance.url, "healthy" if is_well else "down"
        )
    instance.life += is_well and not instance.was_well
    instance.is_well = instance.was_well = is_well
