"""Sessions: conversations that keep their compressed cache between turns, limited in bytes and time."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from snapstream.cache import SequenceStore, Stored, StoreFullError
from snapstream.engine import CompressedSequence
from snapstream.errors import CacheFileError
from snapstream.serving.leases import take
from snapstream.serving.prompts import Prompt

logger = logging.getLogger(__name__)

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
    """The sessions of a server: a view of a store, in which a session has one turn at a time.

    All methods must be called on the event loop.

    Args:
        store: Keeps their caches.
    """

    def __init__(self, store: SequenceStore) -> None:
        self.store = store
        self._running: dict[Key, Stored | None] = {}
        self._deleted: set[Key] = set()

    async def begin(self, key: Key) -> Session | None:
        """Start a turn; :meth:`end` must follow, unless this fails.

        Returns:
            The session; ``None`` if it does not exist or cannot be read.

        Raises:
            SessionBusyError: A turn of this session is running.
        """
        if key in self._running:
            raise SessionBusyError
        self._running[key] = None
        try:
            taken = await self._take(key)
        except BaseException:
            del self._running[key]
            if key in self._deleted:  # meanwhile
                self._deleted.discard(key)
                self.store.delete(_name(key))
            raise
        if taken is None or taken.sequence is None:
            return None
        self._running[key] = taken
        return Session(taken.sequence, taken.about.get("text"))

    def end(self, key: Key, session: Session | None) -> bool:
        """End a turn. Without a new ``session``, the previous one stays, so that the turn can be tried again.

        Returns:
            Whether a next turn can continue from the session.
        """
        before = self._running.pop(key)
        if before is not None:
            self.store.release(before, used=session is not None)
        if key in self._deleted:
            self._deleted.discard(key)
            self.store.delete(_name(key))
            return False
        if session is not None:
            try:
                self.store.put(_name(key), session.saved, {"text": session.text})
            except StoreFullError:
                return before is not None
        return session is not None or before is not None

    def delete(self, key: Key) -> bool:
        """Delete a session, at the end of its turn if one is running; returns whether it existed."""
        if key in self._running:
            self._deleted.add(key)
            return True
        return self.store.delete(_name(key))

    async def _take(self, key: Key) -> Stored | None:
        try:
            return await take(self.store, _name(key))
        except StoreFullError:
            logger.warning("a session cannot be read now: sessions in use take all the memory")
        except (CacheFileError, RuntimeError) as error:  # for example, too little memory
            logger.warning("a session cannot be continued: %s", error)
        return None


def _name(key: Key) -> str:
    """The key in the store, which tells neither the session's name nor its owner."""
    return hashlib.sha256(json.dumps(key).encode()).hexdigest()
