"""Tokenizes prompts, but stops early if a text is too long.

A tokenizer takes several hundred bytes of memory per token, and seconds per ten megabytes. The cost of one text is
therefore bounded by the engine's maximum sequence length:

1. If a text has so many bytes that even the longest tokens of the vocabulary could not cover them, it is refused.
2. If a text may still be too long, its tokens are counted piece by piece. It is refused as soon as there are too many.
3. All other texts are tokenized as a whole.
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
"""Bytes of the tokenizer's own memory per token while a text is tokenized; measured with byte-level BPE."""
PIECE = 2
"""Length of a piece in characters, as a multiple of ``max_model_len``; most texts have at least four per token."""
_CUT = 64
"""Maximum number of tokens that cutting a text in two can add."""
_LARGE = 2**20
"""Texts longer than this many characters return unused memory to the system afterwards."""
_LOSSLESS = {"Sequence", "NFC", "NFD", "NFKC", "NFKD", "Prepend", "Replace", "ByteLevel", "Split", "Digits"}
_LOSSLESS |= {"Metaspace", "Regex", "String"}
"""Normalizers and pre-tokenizers of the tokenizers library that drop no part of a text."""
_NORMALIZED = 4
"""Maximum number of bytes that normalization turns into one."""


@dataclass(frozen=True)
class Encoded:
    """A tokenized text.

    Attributes:
        tokens: Token ids.
        offsets: Index of the character that each token begins at; empty if not requested.
    """

    tokens: list[int]
    offsets: Sequence[int] = ()


def tokenizing_bytes(max_model_len: int) -> int:
    """Maximum memory for tokenizing one text, if it has at most one token per character."""
    return PIECE * max_model_len * BYTES_PER_TOKEN


class PromptTokenizer:
    """Tokenizes prompts, and refuses those that cannot fit.

    Args:
        tokenizer: A fast tokenizer of transformers.
        max_model_len: Maximum sequence length, of which at least one token is generated.
    """

    def __init__(self, tokenizer: Any, max_model_len: int) -> None:
        self.tokenizer, self.max_model_len = tokenizer, max_model_len

    def encode(self, text: str, *, special: bool = True, offsets: bool = False) -> Encoded:
        """Tokenize a text.

        Args:
            text: The text.
            special: Whether to add the tokenizer's special tokens, such as the beginning of a sequence.
            offsets: Whether to return where each token begins.

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
        """Tokenize a text that continues another one, without what tokenizers put at the beginning of a text.

        Raises:
            RequestError: It is not valid text.
            ContextLengthError: It is too long.
        """
        if not text[:1].isalnum():  # otherwise it would extend the word "a"
            before = self.encode("a", special=False).tokens
            whole = self.encode(f"a{text}", special=False).tokens
            if whole[: len(before)] == before:
                return whole[len(before) :]
        return self.encode(text, special=False).tokens

    def _check_length(self, text: str) -> None:
        """Steps 1 and 2 of the module's docstring.

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
        """Maximum number of bytes of a text that one token can cover; ``None`` if there is no limit.

        There is no limit if parts of a text are dropped before tokenization, or if unknown words become one token.
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
    """Make the C library return unused memory to the system, if it supports this."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
