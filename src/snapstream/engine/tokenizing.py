"""Texts to tokens, without tokenizing a text to its end that is too long anyway.

A tokenizer takes several hundred bytes of memory per token, and seconds per ten megabytes. So what one text costs is
bounded by the longest sequence of the engine:

1. A text of so many bytes that even the longest tokens of the vocabulary could not cover them is refused at once.
2. Another one that may be too long is counted piece by piece, and refused as soon as the pieces are too many.
3. What is left is tokenized as a whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from snapstream.errors import ContextLengthError, RequestError

BYTES_PER_TOKEN = 450
"""Of the tokenizer's own memory, while a text is tokenized; measured with byte-level BPE."""
PIECE = 2
"""Characters of a piece, as a multiple of the longest sequence: most texts have four characters or more per token."""
_CUT = 64
"""Tokens that cutting a text in two may add."""
_LARGE = 2**20
"""Characters of a text after which memory is given back to the system."""
_LOSSLESS = {"Sequence", "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "ByteLevel", "Split", "Digits"}
_LOSSLESS |= {"Metaspace", "Regex", "String"}
"""Steps before tokenization, as the tokenizers library calls them, that drop nothing of a text."""
_NORMALIZED = 4
"""Most bytes that become one when characters are normalized."""


@dataclass(frozen=True)
class Encoded:
    """A text as tokens.

    Attributes:
        tokens: Token ids.
        offsets: The character that each begins at; empty if they were not asked for.
    """

    tokens: list[int]
    offsets: Sequence[int] = ()


def tokenizing_bytes(max_model_len: int) -> int:
    """Memory that one text takes at most while it is tokenized, if it has a token per character or fewer."""
    return PIECE * max_model_len * BYTES_PER_TOKEN


class PromptTokenizer:
    """Tokenizes prompts that may fit.

    Args:
        tokenizer: A fast tokenizer of transformers.
        max_model_len: Longest sequence; at least one token of it is generated.
    """

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self.tokenizer, self.max_model_len = tokenizer, max_model_len

    def encode(self, text: str, *, special: bool = True, offsets: bool = False) -> Encoded:
        """Tokenize a text.

        Args:
            text: The text.
            special: Add the tokens that begin a sequence, as the tokenizer has it.
            offsets: Say where each token begins.

        Raises:
            RequestError: It is not valid text.
            ContextLengthError: It is too long.
        """
        try:
            self._check_length(text)
            encoded = self.tokenizer(
                text,
                add_special_tokens=special,
                return_offsets_mapping=offsets,
                return_attention_mask=False,
                return_token_type_ids=False,
            )
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the prompt is not valid text: {error}") from error
        finally:
            if isinstance(text, str) and len(text) > _LARGE:
                give_memory_back()
        starts = [start for start, _ in encoded["offset_mapping"]] if offsets else ()
        return Encoded(list(encoded["input_ids"]), starts)

    def after(self, text: str) -> list[int]:
        """Tokenize a text that continues another one, without what tokenizers put before a beginning.

        Raises:
            RequestError: It is not valid text.
            ContextLengthError: It is too long.
        """
        if not text[:1].isalnum():  # or it would continue a word
            before = self.encode("a", special=False).tokens
            whole = self.encode(f"a{text}", special=False).tokens
            if whole[: len(before)] == before:
                return whole[len(before) :]
        return self.encode(text, special=False).tokens

    def _check_length(self, text: str) -> None:
        """Steps 1 and 2.

        Raises:
            ContextLengthError: It is too long.
        """
        size, piece = len(text), PIECE * self.max_model_len
        if size <= piece:
            return
        fit = self.max_model_len - 1
        if self._most_bytes is not None:
            nbytes = len(text.encode())
            least = -(-nbytes // self._most_bytes)
            if least > fit:
                raise ContextLengthError(self.max_model_len, f"{nbytes} bytes of text, at least {least} tokens")
        count = 0
        for cuts, start in enumerate(range(0, size, piece)):
            part = text[start : start + piece]
            count += len(self.tokenizer.backend_tokenizer.encode_batch_fast([part], add_special_tokens=False)[0])
            if count - cuts * _CUT > fit:
                known = "" if start + piece >= size else f" in its first {start + piece} of {size} characters"
                raise ContextLengthError(self.max_model_len, f"about {count} tokens{known}")

    @functools.cached_property
    def _most_bytes(self) -> int | None:
        """Most bytes of a text that one token can stand for; ``None`` if that has no limit.

        There is none if anything of a text is dropped before it is tokenized, or if unknown words become one token.
        """
        backend = self.tokenizer.backend_tokenizer
        steps = f"{backend.normalizer!r} {backend.pre_tokenizer!r}"
        known = {*re.findall(r"\b([A-Z]\w+)\(", steps)} <= _LOSSLESS and "Removed" not in steps
        is_bytes = "ByteLevel(" in repr(backend.pre_tokenizer) or bool(getattr(backend.model, "byte_fallback", False))
        strips = any(token.lstrip or token.rstrip for token in self.tokenizer.added_tokens_decoder.values())
        if type(backend.model).__name__ != "BPE" or not (known and is_bytes) or strips:
            return None
        longest = max(len(token.encode("utf-8", "replace")) for token in self.tokenizer.get_vocab())
        return longest * (_NORMALIZED if "NF" in repr(backend.normalizer) else 1)


def give_memory_back() -> None:
    """Let the C library return what it holds for later to the system, where it can."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
