"""Instances of vLLM: which are well, and which has least to do."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Instance:
    """One of them.

    Attributes:
        url: Where it is.
        is_well: What it said when it was last asked, or ``False`` since it has broken off.
        busy: Requests of this router that it has now.
        longest: Tokens of its longest sequence, as it says; 0: unknown.
    """

    url: str
    is_well: bool = False
    busy: int = 0
    longest: int = 0

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Around a request."""
        self.busy += 1
        try:
            yield
        finally:
            self.busy -= 1


class Pool:
    """Instances that do the same.

    Args:
        urls: Where they are.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self.instances = [Instance(url) for url in urls]

    def choose(self, tried: Collection[Instance] = ()) -> Instance | None:
        """The one that is well, was not tried, and has least to do; one of several alike at random."""
        found = [one for one in self.instances if one.is_well and one not in tried]
        return min(found, key=lambda one: (one.busy, random.random()), default=None)

    def candidates(self, attempts: int) -> Iterator[Instance]:
        """So many different ones, each chosen when the one before has failed."""
        tried: list[Instance] = []
        while len(tried) < attempts and (instance := self.choose(tried)) is not None:
            tried.append(instance)
            yield instance

    @property
    def well(self) -> int:
        """How many are."""
        return sum(one.is_well for one in self.instances)

    async def check(self, client: httpx.AsyncClient, seconds: float) -> None:
        """Ask all how they are."""
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
            logging.INFO if is_well else logging.WARNING, "%s is %s", instance.url, "well" if is_well else "down"
        )
    instance.is_well = is_well
