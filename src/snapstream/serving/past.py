"""What a request continues from: a turn of a session, a context, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from snapstream.cache import Stored
from snapstream.config.pins import Span
from snapstream.engine import CompressedSequence, Context
from snapstream.serving.answers import SessionUse
from snapstream.serving.errors import ApiError
from snapstream.serving.parts import Parts
from snapstream.serving.prompts import Prompt
from snapstream.serving.protocol import Generate
from snapstream.serving.turns import Turn


class Past:
    """The session or the context of one request; :meth:`release` must be called.

    Attributes:
        context: The context, if there is one.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._turn: Turn | None = None
        self._stored: Stored | None = None
        self.context: Context | None = None

    async def take(self, owner: str, body: Generate) -> None:
        """Acquire the session or the context that a request names, if any.

        Raises:
            ApiError: It is not available, or both are named.
        """
        if body.context_id is not None:
            if body.session_id is not None:
                message = "a session is a conversation, but a context never changes; give only one of them"
                raise ApiError(400, message, param="context_id")
            if isinstance(body.pins, list):
                message = "a context keeps what was pinned when it was created; leave pin out"
                raise ApiError(400, message, param="pin")
            self._stored = stored = await self._parts.contexts.take(owner, body.context_id)
            assert stored.sequence is not None
            self.context = Context.of(stored.sequence, stored.about)
        if body.session_id is not None:
            self._turn = await Turn.begin(self._parts.sessions, (owner, body.session_id))

    def new_tokens(self, prompt: Prompt) -> Sequence[int]:
        """The tokens of a prompt that must be prefilled, behind :attr:`sequence`."""
        return prompt.tokens if self._turn is None else self._turn.go_on(prompt)

    @property
    def sequence(self) -> CompressedSequence | None:
        """The compressed sequence that every prompt continues from; of a session, after :meth:`new_tokens`."""
        if self.context is not None:
            return self.context.sequence
        return None if self._turn is None else self._turn.past

    def pins(self, prompt: Prompt, new: Sequence[int]) -> Sequence[Span]:
        """The pinned spans of a prompt, whose last tokens are ``new``, in the conversation as it was stored."""
        if self.sequence is None or not prompt.pin:
            return prompt.pin
        known, before = self.sequence.tokens, len(prompt.tokens) - len(new)
        # Earlier turns may be stored as other tokens than their text is read as now: the same up to here.
        pairs = enumerate(zip(prompt.tokens[:before], known, strict=False))
        same = next((at for at, (one, other) in pairs if one != other), min(before, len(known)))
        spans = []
        for start, end in prompt.pin:
            old, later = (start, min(end, same)), (max(start, before), end)
            spans += [old] if old[0] < old[1] else []
            spans += [(later[0] - before + len(known), later[1] - before + len(known))] if later[0] < later[1] else []
        return spans

    @property
    def tokens(self) -> int:
        """Number of its tokens, which are not prefilled again."""
        return 0 if self.sequence is None else len(self.sequence.tokens)

    @property
    def keep(self) -> Callable[[CompressedSequence], None] | None:
        """What the cache at the end is given to."""
        return None if self._turn is None else self._turn.keep

    def report(self) -> SessionUse | None:
        """How the session was used, for the answer."""
        return None if self._turn is None else self._turn.report()

    def release(self) -> None:
        """End the turn, and give the context back."""
        if self._turn is not None:
            self._turn.end()
        if self._stored is not None:
            self._parts.contexts.store.release(self._stored)
            self._stored = None
