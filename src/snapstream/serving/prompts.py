"""Turns requests into tokens: applies chat templates and tokenizers, in threads and within limits."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import anyio
import anyio.to_thread

from snapstream.config import StructuredOutputs
from snapstream.config.pins import Span
from snapstream.engine import LLM, Context
from snapstream.errors import ContextLengthError, RequestError
from snapstream.serving.messages import Message
from snapstream.serving.pins import PinFinder, Pinned, Pins, in_context, in_plain_text, pinned_tokens
from snapstream.serving.protocol import ChatRequest
from snapstream.serving.templates import Describe, Templates

T = TypeVar("T")


LONG_TEXT = 2**16
"""Length in characters above which tokenizing a text takes noticeable time, a tenth of a second or more."""
_SPACES = frozenset(" \N{LATIN CAPITAL LETTER G WITH DOT ABOVE}\N{LOWER ONE EIGHTH BLOCK}")
"""Characters for a space in tokens: the space itself, that of byte-level BPE, and that of SentencePiece."""


@dataclass(frozen=True)
class Prompt:
    """A tokenized prompt.

    Attributes:
        tokens: Its tokens.
        text: Its text; ``None`` if it was given as token ids.
        offsets: Index of the character that each token begins at; empty without a text, or if not requested.
        words: Returns a token as it is written in the vocabulary, to tell whether it begins with a space.
        pin: Spans of tokens that are pinned.
    """

    tokens: Sequence[int]
    text: str | None = None
    offsets: Sequence[int] = ()
    words: Callable[[int], str] = str
    pin: Sequence[Span] = ()

    def begins_with_space(self, index: int) -> bool:
        """Whether a token includes the space before its word."""
        return self.words(self.tokens[index])[:1] in _SPACES


class PromptReader:
    """Tokenizes prompts for an engine without blocking the event loop.

    Args:
        llm: The engine; only its tokenizer and chat template are used.
        template_timeout: Maximum time of a chat template in seconds.
        describe: Describes tools, for chat templates that do not.
        threads: Number of texts, of conversations and of answers that are processed concurrently.
    """

    def __init__(self, llm: LLM, template_timeout: float, describe: Describe, threads: int = 2) -> None:
        self._llm, self._describe = llm, describe
        self._layouts, self._pins = Templates(llm, template_timeout), PinFinder()
        # Templates may take long, so they have their own limiter, and nothing else waits for them.
        self._reading, self._templates, self._writing = (anyio.CapacityLimiter(threads) for _ in range(3))
        self._long, self._compiling = anyio.CapacityLimiter(1), anyio.CapacityLimiter(1)
        self.token_text = functools.lru_cache(2**16)(self._token_text)

    async def text(self, prompt: str, *, offsets: bool = False, pin: Pins | None = None) -> Prompt:
        """Tokenize plain text.

        Raises:
            ApiError: What should be pinned is not there.
            RequestError: It is not valid text, or it is too long.
        """

        def encode() -> Prompt:
            return self._encode(prompt, True, offsets, in_plain_text(pin, prompt))

        return await anyio.to_thread.run_sync(encode, limiter=self._limiter(len(prompt), self._reading))

    async def messages(
        self,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] = (),
        *,
        offsets: bool = False,
        pin: Pins | None = None,
    ) -> Prompt:
        """Apply the chat template to a conversation, and tokenize the result.

        Args:
            messages: The conversation.
            variables: Variables of the chat template.
            tools: Tools that the model may call, in OpenAI's form.
            offsets: Whether to return where each token begins.
            pin: What is pinned; by default, the system message and the tools.

        Raises:
            ApiError: What should be pinned is not there.
            RequestError: There is no chat template, it rejects the messages, or it takes too long.
        """

        def read() -> Prompt:
            chat = self._layouts.apply(messages, variables, tools, self._describe)
            pinned = self._pins.in_chat(pin, chat, self._layouts.render_for_pins(variables), variables)
            return self._encode(chat.text, False, offsets, pinned)

        characters = _characters(messages) + sum(len(str(tool)) for tool in tools)
        return await anyio.to_thread.run_sync(read, limiter=self._limiter(characters, self._templates))

    async def context(
        self, text: str | Sequence[int], *, chat: bool | None, system: str | None, pin: Pins | None = None
    ) -> tuple[Prompt, str | None]:
        """Tokenize the text of a context; see :meth:`snapstream.engine.llm.LLM.context_tokens`.

        Args:
            text: The text.
            chat: Whether it begins a conversation.
            system: The system message of this conversation.
            pin: What is pinned; by default, the system message.

        Raises:
            ApiError: What should be pinned is not there.
            RequestError: It cannot be used as a context.
        """

        def read() -> tuple[Prompt, str | None]:
            tokens, opened = self._llm.context_tokens(text, chat=chat, system=system, render=self._layouts.render(None))
            whole = (opened or "") + text.rstrip() if isinstance(text, str) else None
            pinned = in_context(pin, whole, 0 if opened is None or system is None else len(opened))
            if whole is None or all(each.by_token for each in pinned):
                return Prompt(tokens, whole, pin=pinned_tokens(pinned, (), len(tokens))), opened
            return self._encode(whole, opened is None, False, pinned), opened

        return await anyio.to_thread.run_sync(read, limiter=self._limiter(len(text), self._templates))

    async def after(self, context: Context, prompt: str) -> Prompt:
        """Tokenize a prompt that continues a context of plain text.

        Raises:
            RequestError: The prompt is not valid text, or the context begins a conversation.
        """
        if context.chat:
            raise RequestError("this context begins a conversation; use /v1/chat/completions")
        read = functools.partial(self._llm.engine.texts.after, prompt)
        return Prompt(await anyio.to_thread.run_sync(read, limiter=self._limiter(len(prompt), self._reading)), prompt)

    async def messages_after(
        self,
        context: Context,
        messages: Sequence[Message],
        variables: Mapping[str, Any] | None,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> Prompt:
        """Apply the chat template to a conversation that continues a context, and tokenize the result.

        Raises:
            RequestError: The messages cannot continue this context, or the template fails or takes too long.
        """

        def read() -> Prompt:
            if tools:
                raise RequestError("tools are part of the prompt before a context; name them in the context's text")
            plain = self._layouts.apply(messages, variables).messages
            return Prompt(self._llm.context_prompt(context, plain, self._layouts.render(variables)))

        return await anyio.to_thread.run_sync(read, limiter=self._limiter(_characters(messages), self._templates))

    def variables(self, body: ChatRequest) -> Mapping[str, Any]:
        """Variables of the chat template that a request sets; its fields about thinking, if the template knows them."""
        source, given = self._llm.template_source, dict(body.chat_template_kwargs or {})
        thinks = body.enable_thinking
        if thinks is None and body.reasoning_effort == "none":
            thinks = False
        for name, value in (("reasoning_effort", body.reasoning_effort), ("enable_thinking", thinks)):
            if value is not None and name in source:
                given.setdefault(name, value)
        return given

    async def compiled(self, wanted: Callable[[], StructuredOutputs]) -> StructuredOutputs:
        """Compile the grammar of a shape, so that the engine finds it.

        Args:
            wanted: Returns the shape, for which the vocabulary may be needed; that takes a while the first time.

        Raises:
            RequestError: The shape cannot be used.
        """

        def compile_it() -> StructuredOutputs:
            shape = wanted()
            self._llm.engine.grammars.compile(shape)
            return shape

        return await anyio.to_thread.run_sync(compile_it, limiter=self._compiling)

    def ending(self, prompt: Prompt) -> str:
        """The end of a prompt's text."""
        if prompt.text is not None:
            return prompt.text[-64:]
        return str(self._llm.tokenizer.decode(list(prompt.tokens[-16:])))

    def tokens(self, tokens: Sequence[int], *, pin: Pins | None = None) -> Prompt:
        """Take token ids unchanged.

        Raises:
            ApiError: What should be pinned is not there.
            ContextLengthError: There are too many. The engine checks everything else.
        """
        if len(tokens) >= self._llm.engine.max_model_len:
            raise ContextLengthError(self._llm.engine.max_model_len, f"{len(tokens)} tokens")
        return Prompt(tokens, pin=pinned_tokens(in_plain_text(pin, None), (), len(tokens)))

    async def write(self, function: Callable[[], T]) -> T:
        """Build an answer in a thread, as it may be long."""
        return await anyio.to_thread.run_sync(function, limiter=self._writing)

    def _encode(self, text: str, special: bool, offsets: bool, pinned: Sequence[Pinned]) -> Prompt:
        encoded = self._llm.engine.texts.encode(text, special=special, offsets=offsets or bool(pinned))
        spans = pinned_tokens(pinned, encoded.offsets, len(encoded.tokens))
        starts = encoded.offsets if offsets else ()
        return Prompt(encoded.tokens, text, starts, self._llm.tokenizer.convert_ids_to_tokens, spans)

    def _limiter(self, characters: int, usual: anyio.CapacityLimiter) -> anyio.CapacityLimiter:
        """Choose a limiter: long texts are tokenized one at a time, and short ones do not wait for them."""
        return self._long if characters > LONG_TEXT else usual

    def _token_text(self, token: int) -> str:
        return str(self._llm.tokenizer.decode([token]))


def _characters(messages: Sequence[Message]) -> int:
    return sum(len(message.text) for message in messages)
