"""Tokens to text, one at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 8
"""Tokens that may be held back; four bytes make a character, and more than these will not become one."""
CONTEXT = 4
"""Tokens of the prompt that are enough of a context for the text of the first generated one."""


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Tokens that are no text."""
    return frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)


class Detokenizer:
    """Turns tokens into text one at a time, holding back bytes of a character that is not complete.

    Args:
        tokenizer: A fast tokenizer of transformers.
        special: Its :func:`special_tokens`.
        context: Tokens before the first one. Some decoders leave out the space that begins a text; after other tokens
            they do not.
        skip_special: Leave special tokens out of the text.
    """

    def __init__(
        self, tokenizer: Any, special: frozenset[int], context: Sequence[int] = (), *, skip_special: bool = True
    ) -> None:
        self._tokenizer, self._skip_special = tokenizer.backend_tokenizer, skip_special
        self._special = special if skip_special else frozenset()
        self._context, self._pending = list(context), list[int]()
        if self._decode(self._context).endswith(_INCOMPLETE):
            self._context = []

    @property
    def pending(self) -> bool:
        """Whether the last tokens have not become text yet."""
        return bool(self._pending)

    def add(self, token: int) -> str:
        """Text that ``token`` completes; may be empty."""
        if token in self._special:  # no text, and none will come of it
            return ""
        self._pending.append(token)
        text = self._pending_text()
        complete = bool(text) and not text.endswith(_INCOMPLETE)
        return self._emit(text) if complete or len(self._pending) > _LONGEST_CHARACTER else ""

    def flush(self) -> str:
        """Whatever is still held back, with replacement characters where a character is not complete."""
        return self._emit(self._pending_text()) if self._pending else ""

    def _pending_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _emit(self, text: str) -> str:
        self._context, self._pending = self._pending, []
        return text

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special))
