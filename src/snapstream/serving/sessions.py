"""Conversations that keep their compressed cache between turns: by name, for a while, and up to a number."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from snapstream.engine import CompressedSequence
from snapstream.serving.prompts import Prompt

Key = tuple[str, str]
"""Who it belongs to, and what they call it: one key cannot reach another's sessions."""


class SessionBusyError(Exception):
    """Another request of the same session is running."""


@dataclass(frozen=True)
class Session:
    """What is left of a conversation.

    Attributes:
        saved: Its compressed cache.
        text: What the cache was made from; ``None`` if the prompt came as token ids.
    """

    saved: CompressedSequence
    text: str | None

    def rest_of(self, prompt: Prompt) -> Sequence[int] | str:
        """Tokens of a prompt that come after this conversation; one or more. Or, as text, why it does not go on."""
        if prompt.text is not None and self.text is not None:
            return self._rest_of_text(prompt, prompt.text, self.text)
        if prompt.text is not None or self.text is not None:
            return "the earlier turn was text and this one token ids, or the other way round"
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
        # Some tokenizers leave the space that begins a token out of its offsets. Anything else between the border and
        # the first new token belongs to a token that began before the border.
        between = text[len(known) : prompt.offsets[first]]
        if between and not (between == " " and prompt.begins_with_space(first)):
            return "the new text goes on inside of a token of the earlier turns"
        return list(prompt.tokens[first:])


class SessionStore:
    """Keeps at most ``limit`` sessions; the one not used for the longest time goes first.

    A session that a turn continues from counts, too: its cache is needed until the turn has ended.

    Args:
        limit: Sessions; each holds at most one compressed cache.
        seconds: How long a session is kept after its last turn.
        clock: For tests.
    """

    def __init__(self, limit: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit, self.seconds, self.clock = limit, seconds, clock
        self._kept: dict[Key, tuple[Session, float]] = {}
        self._running: dict[Key, tuple[Session, float] | None] = {}
        self._deleted: set[Key] = set()

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
        """End a turn. Without a new ``session``, what there was before stays, and the turn can be tried again.

        Returns:
            Whether there is something to continue from.
        """
        before = self._running.pop(key)
        after = before if session is None else (session, self.clock())
        if after is not None and key not in self._deleted:
            self._kept[key] = after
        self._deleted.discard(key)
        while self._kept and len(self) > self.limit:
            del self._kept[min(self._kept, key=lambda one: self._kept[one][1])]
        return key in self._kept

    def delete(self, key: Key) -> bool:
        """Forget a session, at the end of its turn if one is running; whether there was one."""
        if key in self._running:
            self._deleted.add(key)
            return True
        return self._kept.pop(key, None) is not None

    def sweep(self) -> None:
        """Forget what has been kept for too long."""
        now = self.clock()
        for key in [key for key, (_, used) in self._kept.items() if now - used > self.seconds]:
            del self._kept[key]

    def _all(self) -> list[Session]:
        return [one[0] for one in (*self._kept.values(), *self._running.values()) if one is not None]

    def __len__(self) -> int:
        return len(self._all())

    @property
    def bytes(self) -> int:
        """Memory of all caches that are kept."""
        return sum(session.saved.nbytes for session in self._all())
