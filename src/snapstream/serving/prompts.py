"""Requests to tokens: chat templates and tokenizers, in threads, within limits."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from snapstream.engine import LLM, Context
from snapstream.engine.context import Render, tokens_after
from snapstream.errors import RequestError
from snapstream.serving.protocol import Message

T = TypeVar("T")


_SPACES = frozenset(" \N{LATIN CAPITAL LETTER G WITH DOT ABOVE}\N{LOWER ONE EIGHTH BLOCK}")
"""How tokenizers spell a space: as it is, in byte-level BPE, in SentencePiece."""


@dataclass(frozen=True)
class Prompt:
    """A prompt as the engine reads it.

    Attributes:
        tokens: Its tokens.
        text: Its text; ``None`` if it came as token ids.
        offsets: The character each token begins at; empty without a text, or if they were not asked for.
        words: The tokens' own spelling, as far as it is needed: tells whether one begins with a space.
    """

    tokens: Sequence[int]
    text: str | None = None
    offsets: Sequence[int] = ()
    words: Callable[[int], str] = str

    def begins_with_space(self, index: int) -> bool:
        """Whether a token has a space of its own before its word."""
        return self.words(self.tokens[index])[:1] in _SPACES


class PromptReader:
    """Reads prompts for an engine without holding up the event loop.

    Args:
        llm: The engine; only its tokenizer is used.
        template_timeout: Seconds a chat template may take.
        threads: Texts, conversations and answers at a time, each.
    """

    def __init__(self, llm: LLM, template_timeout: float, threads: int = 2) -> None:
        self._llm, self._timeout = llm, template_timeout
        # Templates may take their time; nothing else waits for them.
        self._reading, self._templates, self._writing = (anyio.CapacityLimiter(threads) for _ in range(3))
        self.token_text = functools.lru_cache(2**16)(self._token_text)

    async def text(self, prompt: str, *, offsets: bool = False) -> Prompt:
        """Read plain text.

        Raises:
            RequestError: It is no text.
        """
        encode = functools.partial(self._encode, prompt, True, offsets)
        return await anyio.to_thread.run_sync(encode, limiter=self._reading)

    async def messages(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None, *, offsets: bool = False
    ) -> Prompt:
        """Lay out and read a conversation.

        Args:
            messages: The conversation.
            variables: Of the chat template.
            offsets: Say where each token begins.

        Raises:
            RequestError: There is no chat template, it rejects the messages, or it takes too long.
        """

        def read() -> Prompt:
            plain = [message.for_template() for message in messages]
            return self._encode(self._render(variables)(plain), False, offsets)

        return await anyio.to_thread.run_sync(read, limiter=self._templates)

    async def context(
        self, text: str | Sequence[int], *, chat: bool | None, system: str | None
    ) -> tuple[Sequence[int], str | None]:
        """Tokens of a text that is to be asked about, and how the conversation opens that they begin, if they do.

        Raises:
            RequestError: It cannot be read.
        """

        def read() -> tuple[Sequence[int], str | None]:
            return self._llm.context_tokens(text, chat=chat, system=system, render=self._render(None))

        return await anyio.to_thread.run_sync(read, limiter=self._templates)

    async def after(self, context: Context, prompt: str) -> Prompt:
        """Read a prompt that goes on after a text which was read as plain text.

        Raises:
            RequestError: It is no text, or the text begins a conversation.
        """
        if context.chat:
            raise RequestError("this context begins a conversation; ask it at /v1/chat/completions")
        read = functools.partial(tokens_after, self._llm.tokenizer, prompt)
        return Prompt(await anyio.to_thread.run_sync(read, limiter=self._reading), prompt)

    async def messages_after(
        self, context: Context, messages: Sequence[Message], variables: Mapping[str, Any] | None
    ) -> Prompt:
        """Lay out and read a conversation that begins with a text.

        Raises:
            RequestError: It does not go on after this text, or the template fails or takes too long.
        """

        def read() -> Prompt:
            plain = [message.for_template() for message in messages]
            return Prompt(self._llm.context_prompt(context, plain, self._render(variables)))

        return await anyio.to_thread.run_sync(read, limiter=self._templates)

    def tokens(self, tokens: Sequence[int]) -> Prompt:
        """Token ids, as they are.

        Raises:
            RequestError: So many do not fit. The engine checks the rest.
        """
        if len(tokens) >= self._llm.engine.max_model_len:
            raise RequestError(f"the prompt has {len(tokens)} tokens; at most {self._llm.engine.max_model_len - 1} fit")
        return Prompt(tokens)

    async def write(self, function: Callable[[], T]) -> T:
        """Make an answer, which may be a long one, in a thread."""
        return await anyio.to_thread.run_sync(function, limiter=self._writing)

    def _render(self, variables: Mapping[str, Any] | None) -> Render:
        """Lays out conversations, within the time that a template may take."""
        return lambda messages: within(self._timeout, lambda: self._llm.chat_text(messages, variables))

    def _encode(self, text: str, special: bool, offsets: bool) -> Prompt:
        tokenizer = self._llm.tokenizer
        try:
            encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=offsets)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the prompt is not valid text: {error}") from error
        starts = [start for start, _ in encoded["offset_mapping"]] if offsets else []
        return Prompt(encoded["input_ids"], text, starts, tokenizer.convert_ids_to_tokens)

    def _token_text(self, token: int) -> str:
        return str(self._llm.tokenizer.decode([token]))


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
