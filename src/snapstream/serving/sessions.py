"""Conversations that keep their compressed cache between turns: by name, for a while, and not more than so many."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from snapstream.engine import SavedSequence

Key = tuple[str, str]
"""Who it belongs to, and what they call it: nobody can reach another key's sessions."""


class SessionBusyError(Exception):
    """Another request of the same session is running."""


@dataclass(frozen=True)
class Session:
    """What is left of a conversation.

    Attributes:
        saved: Its compressed cache.
        text: What the cache was made from; ``None`` if the prompt came as token ids.
    """

    saved: SavedSequence
    text: str | None

    def rest_of(self, text: str | None, tokens: Sequence[int], offsets: Sequence[int]) -> Sequence[int] | str:
        """Tokens of a prompt that come after this conversation.

        Args:
            text: The whole prompt; ``None`` if it came as token ids.
            tokens: The same as tokens.
            offsets: The character each token begins at; empty without a text.

        Returns:
            Tokens, one or more; or, as text, why the prompt does not go on from here.
        """
        if text is not None and self.text is not None:
            return self._rest_of_text(text, tokens, offsets)
        if text is not None or self.text is not None:
            return "the earlier turn was text and this one token ids, or the other way round"
        known = len(self.saved.tokens)
        if list(tokens[:known]) != list(self.saved.tokens):
            return "the prompt does not begin with the earlier turns"
        return list(tokens[known:]) or "there is nothing new in the prompt"

    def _rest_of_text(self, text: str, tokens: Sequence[int], offsets: Sequence[int]) -> Sequence[int] | str:
        assert self.text is not None
        if not text.startswith(self.text):
            return "the prompt does not begin with the earlier turns as the chat template lays them out"
        border = len(self.text)
        first = next((index for index, start in enumerate(offsets) if start >= border), len(offsets))
        if first == len(offsets):
            return "there is nothing new in the prompt"
        # Some tokenizers leave the space before a word out of its offsets.
        if text[border : offsets[first]].strip():
            return "the new text goes on inside of a token of the earlier turns"
        return list(tokens[first:])


class SessionStore:
    """Keeps at most ``limit`` sessions; the one not used for the longest time goes first.

    Args:
        limit: Sessions; each holds at most one compressed cache.
        seconds: How long a session is kept after its last turn.
        clock: For tests.
    """

    def __init__(self, limit: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.seconds, self.clock = limit, seconds, clock
        self._kept: OrderedDict[Key, tuple[Session, float]] = OrderedDict()
        self._busy: set[Key] = set()

    def begin(self, key: Key) -> Session | None:
        """Start a turn; :meth:`end` must follow.

        Raises:
            SessionBusyError: A turn of this session is running.
        """
        if key in self._busy:
            raise SessionBusyError
        self.sweep()
        self._busy.add(key)
        kept = self._kept.get(key)
        return None if kept is None else kept[0]

    def end(self, key: Key, session: Session | None) -> None:
        """End a turn. Without a new ``session``, what there was before stays, and the turn can be tried again."""
        self._busy.discard(key)
        if session is not None:
            self._kept[key] = session, self.clock()
            self._kept.move_to_end(key)
        while len(self._kept) > self.limit:
            self._kept.popitem(last=False)

    def delete(self, key: Key) -> bool:
        """Forget a session; whether there was one."""
        return self._kept.pop(key, None) is not None

    def sweep(self) -> None:
        """Forget what has been kept for too long."""
        now = self.clock()
        for key in [key for key, (_, used) in self._kept.items() if now - used > self.seconds]:
            del self._kept[key]

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def bytes(self) -> int:
        """Memory of all caches that are kept."""
        return sum(session.saved.bytes for session, _ in self._kept.values())
