"""Requests to tokens: chat templates and tokenizers, in threads, within limits."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from snapstream.engine import LLM
from snapstream.errors import RequestError

T = TypeVar("T")


@dataclass(frozen=True)
class Prompt:
    """A prompt as the engine reads it.

    Attributes:
        tokens: Its tokens.
        text: Its text; ``None`` if it came as token ids.
        offsets: The character each token begins at; empty without a text.
    """

    tokens: Sequence[int]
    text: str | None
    offsets: Sequence[int]


class PromptReader:
    """Reads prompts for an engine without holding up the event loop.

    Args:
        llm: The engine; only its tokenizer is used.
        template_timeout: Seconds a chat template may take.
        threads: Prompts at a time.
    """

    def __init__(self, llm: LLM, template_timeout: float, threads: int = 2) -> None:
        self._llm, self._timeout = llm, template_timeout
        self._limiter = anyio.CapacityLimiter(threads)

    async def text(self, prompt: str) -> Prompt:
        """Read plain text.

        Raises:
            RequestError: It is no text.
        """
        return await anyio.to_thread.run_sync(self._encode, prompt, True, limiter=self._limiter)

    async def messages(self, messages: Sequence[dict[str, Any]]) -> Prompt:
        """Lay out and read a conversation.

        Raises:
            RequestError: There is no chat template, it rejects the messages, or it takes too long.
        """

        def read() -> Prompt:
            text = within(self._timeout, lambda: self._llm.chat_text(messages))
            return self._encode(text, False)

        return await anyio.to_thread.run_sync(read, limiter=self._limiter)

    def tokens(self, tokens: Sequence[int]) -> Prompt:
        """Token ids, as they are; the engine checks them."""
        return Prompt(tokens, None, ())

    def _encode(self, text: str, special: bool) -> Prompt:
        try:
            encoded = self._llm.tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the prompt is not valid text: {error}") from error
        return Prompt(encoded["input_ids"], text, [start for start, _ in encoded["offset_mapping"]])


class _TooLongError(BaseException):
    """Raised inside of what takes too long; not an Exception, so that a template cannot catch it."""


def within(seconds: float, function: Callable[[], T]) -> T:
    """Run Python code and stop it after a while, wherever it is; for code that may loop for ever.

    A thread cannot be killed, but it can be traced: the clock is read before every line that it runs.

    Raises:
        RequestError: It took too long.
    """
    end = time.monotonic() + seconds

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise _TooLongError
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        return function()
    except _TooLongError:
        raise RequestError(f"the chat template took longer than {seconds:g} s with these messages") from None
    finally:
        sys.settrace(before)
