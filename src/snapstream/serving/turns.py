"""One turn of a session: what it continues from, and what it leaves for the next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from snapstream.engine import CompressedSequence
from snapstream.serving.errors import ApiError
from snapstream.serving.prompts import Prompt
from snapstream.serving.sessions import Key, Session, SessionBusyError, SessionStore


class Turn:
    """A session's part in one request; :meth:`end` must be called.

    Attributes:
        past: The cache to continue from, once :meth:`go_on` has found that it fits.
    """

    def __init__(self, store: SessionStore, key: Key) -> None:
        """Begin the turn.

        Args:
            store: The server's sessions.
            key: Whose session, and which.

        Raises:
            ApiError: There are no sessions, or a turn of this one is running.
        """
        if not store.limit:
            raise ApiError(400, "this server keeps no sessions; start it with --sessions N", param="session_id")
        try:
            self._session = store.begin(key)
        except SessionBusyError:
            message = f"the session {key[1]!r} has a turn running; wait for its end"
            raise ApiError(409, message, param="session_id", code="session_busy") from None
        self._store, self._key = store, key
        self._prompt: Prompt | None = None
        self._reason: str | None = None
        self._read = 0
        self._ended = self._kept = False
        self.past: CompressedSequence | None = None

    @property
    def reused(self) -> int:
        """Tokens of earlier turns that are not read again."""
        return 0 if self.past is None else len(self.past.tokens)

    def go_on(self, prompt: Prompt) -> Sequence[int]:
        """Tokens of the prompt that have to be read; those after :attr:`past`, or all."""
        self._prompt = prompt
        tokens = prompt.tokens
        if self._session is None:
            self._reason = "there is no such session: it is new, or was not used for too long"
        else:
            rest = self._session.rest_of(prompt)
            if isinstance(rest, str):
                self._reason = rest
            else:
                self.past, tokens = self._session.saved, rest
        self._read = len(tokens)
        return tokens

    def keep(self, saved: CompressedSequence) -> None:
        """Leave a cache for the next turn; too late if the turn has ended."""
        if not self._ended:
            assert self._prompt is not None
            text = self._prompt.text
            session = Session(saved, None if text is None else text + saved.answer)
            self._ended, self._kept = True, self._store.end(self._key, session)

    def end(self) -> None:
        """Without :meth:`keep` before, the session stays as it was."""
        if not self._ended:
            self._ended, self._kept = True, self._store.end(self._key, None)

    def report(self) -> dict[str, Any]:
        """What became of the session, for the answer."""
        return {
            "id": self._key[1],
            "kept": self._kept,
            "reused_tokens": self.reused,
            "read_tokens": self._read,
            "reason": self._reason,
        }
