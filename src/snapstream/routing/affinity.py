"""Which instance has which prompts in its caches, so that a conversation goes on where its beginning has been read.

The router sees requests, not tokens. Two prompts have the same beginning if their requests do, written as JSON in the
order in which templates put its parts: tools, system message, messages. Each piece of it adds to a running digest.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from snapstream.routing.instances import Instance

PIECE = 1024
"""Characters of a request in one piece."""
MOST = 2**17
"""Beginnings that are remembered; the least recently used ones are forgotten first."""
_PARTS = ("model", "tools", "system", "instructions", "prompt", "messages", "input", "text")
_STATES = ("context_id", "previous_response_id")
"""Fields that name what only one instance has. A session is not among them: any instance can begin it anew."""


@dataclass(frozen=True)
class Marks:
    """What a request has in common with others.

    Attributes:
        beginnings: Digests of the beginnings of its prompt, shortest first.
        session: Digest of the session that it continues, if any.
        state: Digest of what only one instance has, if it needs such a thing.
    """

    beginnings: Sequence[bytes] = ()
    session: bytes | None = None
    state: bytes | None = None

    @classmethod
    def of(cls, body: Mapping[str, Any], headers: Mapping[str, str]) -> Marks:
        """Mark a request; each API key has its own caches."""
        owner = owner_of(headers)
        text = json.dumps([owner, *(body.get(part) for part in _PARTS)], sort_keys=True, ensure_ascii=False)
        session = body.get("session_id")
        state = next((str(body[name]) for name in _STATES if body.get(name) is not None), None)
        return cls(
            list(_digests(text)),
            None if session is None else _digest(owner, "session", str(session)),
            None if state is None else _digest(owner, "state", state),
        )


class Affinity:
    """Remembers where requests were sent.

    Args:
        weight: How many requests more than others an instance may have if it has read all of a prompt; 0 turns
            affinity off, except for what only one instance has.
        most: Beginnings to remember.
    """

    def __init__(self, weight: float, most: int = MOST) -> None:
        self.weight, self._most = weight, most
        self._holders: OrderedDict[bytes, dict[Instance, int]] = OrderedDict()

    def held(self, marks: Marks) -> dict[Instance, float]:
        """The share of a prompt, from its beginning on, that instances have read."""
        shares: dict[Instance, float] = {}
        for number, mark in enumerate(marks.beginnings, 1):
            holders = [one for one in self._of(mark) if one.is_well]
            if not holders:
                break
            shares.update(dict.fromkeys(holders, number / len(marks.beginnings)))
        return shares

    def advantages(self, marks: Marks, instances: Sequence[Instance]) -> dict[Instance, float]:
        """How many requests fewer than it has each instance counts as having, for the choice of one."""
        if marks.state is not None and (holders := self._of(marks.state)):
            return dict.fromkeys(holders, float("inf"))
        well = [one for one in instances if one.is_well]
        if marks.session is not None and well:  # the same instance for every router, also a new one
            session = marks.session
            return {max(well, key=lambda one: _digest(session.hex(), one.url)): float("inf")}
        return {one: self.weight * share for one, share in self.held(marks).items()}

    def remember(self, marks: Marks, instance: Instance) -> None:
        """Note that an instance has been sent a request."""
        # Of a prompt, its end is forgotten first: without its beginning, nothing of it is of use.
        for mark in (*([] if marks.state is None else [marks.state]), *reversed(marks.beginnings)):
            self._holders.setdefault(mark, {})[instance] = instance.life
            self._holders.move_to_end(mark)
        while len(self._holders) > self._most:
            self._holders.popitem(last=False)

    def remember_state(self, owner: str, name: str, instance: Instance) -> None:
        """Note that an instance has a context or a response of an API key."""
        self.remember(Marks(state=_digest(owner, "state", name)), instance)

    def forget(self, marks: Marks, instance: Instance) -> None:
        """Take back what was noted of a request that an instance did not serve."""
        for mark in marks.beginnings:
            self._holders.get(mark, {}).pop(instance, None)

    def _of(self, mark: bytes) -> list[Instance]:
        """Instances with something; one that has been down since has lost it."""
        found = self._holders.get(mark, {})
        return [instance for instance, life in found.items() if life == instance.life]


def owner_of(headers: Mapping[str, str]) -> str:
    """The API key of a request."""
    return headers.get("authorization") or headers.get("x-api-key") or ""


def _digests(text: str) -> Iterator[bytes]:
    running = hashlib.blake2b(digest_size=16)
    for at in range(PIECE, len(text) + 1, PIECE):
        running.update(text[at - PIECE : at].encode("utf-8", "surrogatepass"))
        yield running.digest()


def _digest(*parts: str) -> bytes:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()
