"""Requests to tokens: chat templates and tokenizers, in threads, within limits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from snapstream.engine import LLM, Context
from snapstream.errors import ContextLengthError, RequestError
from snapstream.serving.messages import Message
from snapstream.serving.templates import Templates

T = TypeVar("T")


LONG_TEXT = 2**16
"""Characters of a text that takes its time: a tenth of a second and more."""
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
        self._llm = llm
        self._layouts = Templates(llm, template_timeout)
        # Templates may take their time; nothing else waits for them.
        self._reading, self._templates, self._writing = (anyio.CapacityLimiter(threads) for _ in range(3))
        self._long = anyio.CapacityLimiter(1)
        self.token_text = functools.lru_cache(2**16)(self._token_text)

    async def text(self, prompt: str, *, offsets: bool = False) -> Prompt:
        """Read plain text.

        Raises:
            RequestError: It is no text.
        """
        encode = functools.partial(self._encode, prompt, True, offsets)
        return await anyio.to_thread.run_sync(encode, limiter=self._limiter(len(prompt), self._reading))

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
            plain = self._layouts.plain(messages, variables)
            return self._encode(self._layouts.render(variables)(plain), False, offsets)

        return await anyio.to_thread.run_sync(read, limiter=self._limiter(_characters(messages), self._templates))

    async def context(
        self, text: str | Sequence[int], *, chat: bool | None, system: str | None
    ) -> tuple[Sequence[int], str | None]:
        """Tokens of a text that is to be asked about, and how the conversation opens that they begin, if they do.

        Raises:
            RequestError: It cannot be read.
        """

        def read() -> tuple[Sequence[int], str | None]:
            return self._llm.context_tokens(text, chat=chat, system=system, render=self._layouts.render(None))

        return await anyio.to_thread.run_sync(read, limiter=self._limiter(len(text), self._templates))

    async def after(self, context: Context, prompt: str) -> Prompt:
        """Read a prompt that goes on after a text which was read as plain text.

        Raises:
            RequestError: It is no text, or the text begins a conversation.
        """
        if context.chat:
            raise RequestError("this context begins a conversation; ask it at /v1/chat/completions")
        read = functools.partial(self._llm.engine.texts.after, prompt)
        return Prompt(await anyio.to_thread.run_sync(read, limiter=self._limiter(len(prompt), self._reading)), prompt)

    async def messages_after(
        self, context: Context, messages: Sequence[Message], variables: Mapping[str, Any] | None
    ) -> Prompt:
        """Lay out and read a conversation that begins with a text.

        Raises:
            RequestError: It does not go on after this text, or the template fails or takes too long.
        """

        def read() -> Prompt:
            plain = self._layouts.plain(messages, variables)
            return Prompt(self._llm.context_prompt(context, plain, self._layouts.render(variables)))

        return await anyio.to_thread.run_sync(read, limiter=self._limiter(_characters(messages), self._templates))

    def tokens(self, tokens: Sequence[int]) -> Prompt:
        """Token ids, as they are.

        Raises:
            RequestError: So many do not fit. The engine checks the rest.
        """
        if len(tokens) >= self._llm.engine.max_model_len:
            raise ContextLengthError(self._llm.engine.max_model_len, f"{len(tokens)} tokens")
        return Prompt(tokens)

    async def write(self, function: Callable[[], T]) -> T:
        """Make an answer, which may be a long one, in a thread."""
        return await anyio.to_thread.run_sync(function, limiter=self._writing)

    def _encode(self, text: str, special: bool, offsets: bool) -> Prompt:
        encoded = self._llm.engine.texts.encode(text, special=special, offsets=offsets)
        return Prompt(encoded.tokens, text, encoded.offsets, self._llm.tokenizer.convert_ids_to_tokens)

    def _limiter(self, characters: int, usual: anyio.CapacityLimiter) -> anyio.CapacityLimiter:
        """Where to wait: long texts are read one at a time, and short ones do not wait for them."""
        return self._long if characters > LONG_TEXT else usual

    def _token_text(self, token: int) -> str:
        return str(self._llm.tokenizer.decode([token]))


def _characters(messages: Sequence[Message]) -> int:
    return sum(len(message.text) for message in messages)
