"""Conversations of earlier responses, so that clients need not send them again; limited in bytes."""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

MOST_BYTES = 64 * 2**20
"""Memory for conversations; the least recently used ones are dropped. Their caches are the prefix cache's."""


class ResponseHistory:
    """The conversations that ended with each response; all methods run on the event loop.

    Args:
        max_bytes: Maximum size of all conversations.
    """

    def __init__(self, max_bytes: int = MOST_BYTES) -> None:
        self._max_bytes, self._size = max_bytes, 0
        self._known: OrderedDict[tuple[str, str], bytes] = OrderedDict()

    def put(self, owner: str, name: str, messages: Sequence[dict[str, Any]]) -> None:
        """Store a conversation under the id of its last response; one that is too large is not stored."""
        data = json.dumps(messages).encode()
        self.delete(owner, name)
        if len(data) > self._max_bytes:
            return
        self._size += len(data)
        self._known[owner, name] = data
        while self._size > self._max_bytes:
            _, dropped = self._known.popitem(last=False)
            self._size -= len(dropped)

    def get(self, owner: str, name: str) -> list[dict[str, Any]] | None:
        """The messages of a conversation; ``None`` if it is not known."""
        data = self._known.get((owner, name))
        if data is None:
            return None
        self._known.move_to_end((owner, name))
        found: list[dict[str, Any]] = json.loads(data)
        return found

    def delete(self, owner: str, name: str) -> bool:
        """Forget a conversation; returns whether it was known."""
        data = self._known.pop((owner, name), None)
        self._size -= len(data or b"")
        return data is not None
