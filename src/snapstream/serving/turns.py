"""One turn of a session: continues from the session's cache, and leaves a cache for the next turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from snapstream.engine import CompressedSequence
from snapstream.serving.answers import SessionUse
from snapstream.serving.errors import ApiError
from snapstream.serving.prompts import Prompt
from snapstream.serving.sessions import Key, Session, SessionBusyError, SessionStore


class Turn:
    """A session in one request; :meth:`end` must be called.

    Attributes:
        past: The cache to continue from, if :meth:`go_on` has found that the prompt continues it.
    """

    def __init__(self, sessions: SessionStore, key: Key, session: Session | None) -> None:
        """Take over a turn that has begun; see :meth:`begin`."""
        self._sessions, self._key, self._session = sessions, key, session
        self._prompt: Prompt | None = None
        self._reason: str | None = None
        self._read = 0
        self._ended = self._kept = False
        self.past: CompressedSequence | None = None

    @classmethod
    async def begin(cls, sessions: SessionStore, key: Key) -> Turn:
        """Begin a turn.

        Args:
            sessions: The server's sessions.
            key: Owner and name of the session.

        Raises:
            ApiError: Sessions are disabled, or a turn of this session is running.
        """
        if not sessions.store.max_bytes:
            raise ApiError(400, "this server keeps no sessions; start it with --sessions SIZE", param="session_id")
        try:
            return cls(sessions, key, await sessions.begin(key))
        except SessionBusyError:
            message = f"a turn of the session {key[1]!r} is still running; wait until it ends"
            raise ApiError(409, message, param="session_id", code="session_busy") from None

    @property
    def reused(self) -> int:
        """Number of tokens of earlier turns that are not prefilled again."""
        return 0 if self.past is None else len(self.past.tokens)

    def go_on(self, prompt: Prompt) -> Sequence[int]:
        """Return the tokens of the prompt that must be prefilled: those after :attr:`past`, or all."""
        self._prompt = prompt
        tokens = prompt.tokens
        if self._session is None:
            self._reason = "there is no such session: it is new, has expired, or was evicted"
        else:
            rest = self._session.rest_of(prompt)
            if isinstance(rest, str):
                self._reason = rest
            else:
                self.past, tokens = self._session.saved, rest
        self._read = len(tokens)
        return tokens

    def keep(self, saved: CompressedSequence) -> None:
        """Store a cache for the next turn; has no effect if the turn has ended."""
        if not self._ended:
            assert self._prompt is not None
            text = self._prompt.text
            # A next turn has at least one new token, so it needs no logits.
            session = Session(replace(saved, logits=None), None if text is None else text + saved.answer)
            self._ended, self._kept = True, self._sessions.end(self._key, session)

    def end(self) -> None:
        """End the turn. Unless :meth:`keep` was called, the session does not change."""
        if not self._ended:
            self._ended, self._kept = True, self._sessions.end(self._key, None)

    def report(self) -> SessionUse:
        """How the session was used, for the answer."""
        return SessionUse(
            id=self._key[1],
            kept=self._kept,
            reused_tokens=self.reused,
            read_tokens=self._read,
            reason=self._reason,
        )
