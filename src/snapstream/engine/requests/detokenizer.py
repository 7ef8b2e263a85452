"""Incremental detokenization."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 8
"""Most tokens that are held back. A character has at most four bytes, so more tokens than this never complete one."""
CONTEXT = 4
"""Prompt tokens that give enough context to decode the first generated token."""


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """The tokenizer's special tokens, which are not text."""
    return frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)


class Detokenizer:
    """Turns tokens into text incrementally, holding back the bytes of an incomplete character.

    Args:
        tokenizer: A fast tokenizer of transformers.
        special: Its :func:`special_tokens`.
        context: Tokens before the first one. Some decoders omit the leading space of a text, but keep it after other
            tokens.
        skip_special: Whether to leave special tokens out of the text.
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
        """Whether some tokens are held back and have not become text yet."""
        return bool(self._pending)

    def add(self, token: int) -> str:
        """Add a token; returns the text that it completes, possibly empty."""
        if token in self._special:  # never becomes text
            return ""
        self._pending.append(token)
        text = self._pending_text()
        complete = bool(text) and not text.endswith(_INCOMPLETE)
        return self._emit(text) if complete or len(self._pending) > _LONGEST_CHARACTER else ""

    def flush(self) -> str:
        """Return the text that is still held back, with replacement characters for incomplete characters."""
        return self._emit(self._pending_text()) if self._pending else ""

    def _pending_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _emit(self, text: str) -> str:
        self._context, self._pending = self._pending, []
        return text

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=self._skip_special))
