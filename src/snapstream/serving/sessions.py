"""Sessions: conversations that keep their compressed cache between turns, limited in number and time."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio
import anyio.to_thread

from snapstream.engine import CompressedSequence
from snapstream.serving.prompts import Prompt

if TYPE_CHECKING:
    from snapstream.serving.session_files import SessionFiles

Key = tuple[str, str]
"""Owner and name of a session; one API key cannot reach the sessions of another."""


class SessionBusyError(Exception):
    """Another request of the same session is running."""


@dataclass(frozen=True)
class Session:
    """The compressed state of a conversation.

    Attributes:
        saved: Its compressed cache.
        text: The text that the cache was built from; ``None`` if the prompt was token ids.
    """

    saved: CompressedSequence
    text: str | None

    def rest_of(self, prompt: Prompt) -> Sequence[int] | str:
        """The tokens of a prompt after this conversation, at least one; or, as text, why it cannot continue it."""
        if prompt.text is not None and self.text is not None:
            return self._rest_of_text(prompt, prompt.text, self.text)
        if prompt.text is not None or self.text is not None:
            return "the earlier turn was text and this one is token ids, or vice versa"
        known = len(self.saved.tokens)
        if list(prompt.tokens[:known]) != list(self.saved.tokens):
            return "the prompt does not begin with the earlier turns"
        return list(prompt.tokens[known:]) or "there is nothing new in the prompt"

    @staticmethod
    def _rest_of_text(prompt: Prompt, text: str, known: str) -> Sequence[int] | str:
        if not text.startswith(known):
            return "the prompt does not begin with the earlier turns as the chat template lays them out"
        first = next((at for at, start in enumerate(prompt.offsets) if start >= len(known)), len(prompt.offsets))
        if first == len(prompt.offsets):
            return "there is nothing new in the prompt"
        # Some tokenizers exclude the space at the beginning of a token from its offsets. Any other text between the
        # boundary and the first new token belongs to a token that began before the boundary.
        between = text[len(known) : prompt.offsets[first]]
        if between and not (between == " " and prompt.begins_with_space(first)):
            return "the new text begins inside a token of the earlier turns"
        return list(prompt.tokens[first:])


class SessionStore:
    """Keeps at most ``limit`` sessions in memory, and evicts the least recently used one first.

    Sessions with a running turn count too, because their cache is needed until the turn has ended.

    Args:
        limit: Maximum number of sessions in memory; each has at most one compressed cache.
        seconds: How long a session is kept after its last turn.
        clock: Clock, for tests.
        files: Files for evicted sessions; ``None`` to drop them.
    """

    def __init__(
        self,
        limit: int,
        seconds: float,
        clock: Callable[[], float] = time.monotonic,
        files: SessionFiles | None = None,
    ) -> None:
        self.limit, self.seconds, self.clock, self.files = limit, seconds, clock, files
        self._kept: dict[Key, tuple[Session, float]] = {}
        self._running: dict[Key, tuple[Session, float] | None] = {}
        self._deleted: set[Key] = set()
        # Sessions that are being loaded from disk; a deletion removes them from this set.
        self._fetching: set[Key] = set()
        self._one_at_a_time = anyio.CapacityLimiter(1)

    async def fetch(self, key: Key) -> None:
        """Load a session from disk if it is there and not in memory; must be called before :meth:`begin`."""
        used = sum(one is not None for one in self._running.values())
        if self.files is None or key in self._kept or key in self._running or used >= self.limit:
            return
        self._fetching.add(key)
        try:
            found = await anyio.to_thread.run_sync(self.files.take, key, limiter=self._one_at_a_time)
            deleted = key not in self._fetching
        finally:
            self._fetching.discard(key)
        if found is not None and not deleted and key not in self._kept and key not in self._running:
            self._kept[key] = found, self.clock()
            self._make_room()

    def begin(self, key: Key) -> Session | None:
        """Start a turn; :meth:`end` must follow.

        Raises:
            SessionBusyError: A turn of this session is running.
        """
        if key in self._running:
            raise SessionBusyError
        self.sweep()
        taken = self._running[key] = self._kept.pop(key, None)
        return None if taken is None else taken[0]

    def end(self, key: Key, session: Session | None) -> bool:
        """End a turn. Without a new ``session``, the previous one stays, so that the turn can be tried again.

        Returns:
            Whether a next turn can continue from the session.
        """
        before = self._running.pop(key)
        after = before if session is None else (session, self.clock())
        deleted = key in self._deleted
        self._deleted.discard(key)
        if deleted and self.files is not None:
            self.files.delete(key)
        elif after is not None and not deleted:
            self._kept[key] = after
        self._make_room()
        return key in self._kept or (self.files is not None and after is not None and not deleted)

    def delete(self, key: Key) -> bool:
        """Delete a session, at the end of its turn if one is running; returns whether it existed."""
        if key in self._running:
            self._deleted.add(key)
            return True
        self._fetching.discard(key)
        on_disk = self.files is not None and self.files.delete(key)
        return self._kept.pop(key, None) is not None or on_disk

    def sweep(self) -> None:
        """Delete expired sessions."""
        now = self.clock()
        for key in [key for key, (_, used) in self._kept.items() if now - used > self.seconds]:
            del self._kept[key]
            if self.files is not None:
                self.files.delete(key)

    def close(self) -> None:
        """Write all sessions to disk, if there are files, for the next server."""
        if self.files is not None:
            running = {key: one for key, one in self._running.items() if one is not None}
            try:
                for key, (session, used) in {**running, **self._kept}.items():
                    self.files.put(key, session, self.clock() - used)
                    self.files.flush()
            finally:
                self.files.close()
        self._kept.clear()

    def _make_room(self) -> None:
        """Evict the least recently used sessions from memory until the rest fits."""
        while self._kept and len(self) > self.limit:
            oldest = min(self._kept, key=lambda one: self._kept[one][1])
            session, used = self._kept.pop(oldest)
            if self.files is not None:
                self.files.put(oldest, session, self.clock() - used)

    def _all(self) -> list[Session]:
        return [one[0] for one in (*self._kept.values(), *self._running.values()) if one is not None]

    def __len__(self) -> int:
        return len(self._all())

    @property
    def bytes(self) -> int:
        """Bytes of all caches in memory."""
        return sum(session.saved.nbytes for session in self._all())
