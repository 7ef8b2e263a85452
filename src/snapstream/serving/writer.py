"""Writes the answer to a request in OpenAI's format, complete or streamed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from pydantic import BaseModel

from snapstream import __version__
from snapstream.engine import RequestOutput
from snapstream.serving.answers import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatPart,
    Choice,
    Completion,
    CompletionChunk,
    CompletionLogprobs,
    LogprobWriter,
    dumps,
)
from snapstream.serving.call import Call
from snapstream.serving.errors import ApiError
from snapstream.serving.prompts import Prompt
from snapstream.serving.protocol import ChatRequest
from snapstream.serving.streams import Emit


class AnswerWriter:
    """Writes the answers of a call that has started.

    Args:
        call: The call.
        request_id: Id of the request.
        created: When it arrived, in seconds since 1970.
    """

    def __init__(self, call: Call, request_id: str, created: int) -> None:
        self._call, self._parts, self._body = call, call.parts, call.body
        self._is_chat = isinstance(call.body, ChatRequest)
        self._frame: dict[str, Any] = {
            "id": ("chatcmpl-" if self._is_chat else "cmpl-") + request_id,
            "created": created,
            "model": self._parts.settings.model_name,
            "system_fingerprint": f"snapstream-{__version__}",
        }
        engine = self._parts.llm.engine
        silent = engine.special_tokens if call.body.skip_special_tokens is not False else frozenset()
        text_of = self._parts.reader.token_text
        self._logprobs = [
            LogprobWriter(text_of, self._prompt_of(index), silent) for index in range(len(call.batch.generations))
        ]

    async def collect(self) -> bytes:
        """Wait for the complete answer, and return it as JSON."""
        texts = await self._echoes()
        async for index, text, output in self._call.batch.changes():
            texts[index] += text
            _check(output)
        return await self._parts.reader.write(lambda: dumps(self._whole(texts)).encode())

    async def stream(self, emit: Emit) -> None:
        """Send the answer while it is generated."""
        options = self._body.stream_options
        with_usage = bool(options and options.include_usage)
        always = bool(options and options.continuous_usage_stats)

        def chunk(choice: Choice | ChatPart, **more: Any) -> str:
            counts = {"usage": self._call.usage()} if always else {"usage": None} if with_usage else {}
            return dumps(self._chunk([choice], **(counts | more)))

        def with_text(index: int, text: str, output: RequestOutput) -> str:
            logprobs = self._new_logprobs(index, output)
            return chunk(self._part(index, text, logprobs=logprobs, finish_reason=None))

        def last(index: int, text: str, output: RequestOutput) -> str:
            said = None if self._is_chat else text  # the last chunk of a chat has no content
            return chunk(self._part(index, said, **self._rest(index, output)), **self._session())

        write, echoes = self._parts.reader.write, await self._echoes()
        for index in range(len(echoes)):
            if self._is_chat:
                first = ChatDelta(role="assistant", content="")
                await emit(chunk(ChatPart(index=index, delta=first, logprobs=None, finish_reason=None)))
            elif echoes[index] and self._call.logprobs is None:
                await emit(chunk(Choice(index=index, text=echoes[index], logprobs=None, finish_reason=None)))
                echoes[index] = ""
        async for index, new_text, output in self._call.batch.changes():
            _check(output)
            # An echo with log-probabilities waits for those of the prompt, which are known only now and may be many.
            is_long = bool(echoes[index])
            text, echoes[index] = echoes[index] + new_text, ""
            if not (text or output.finished or self._call.logprobs is not None):
                continue
            if not output.finished or (self._is_chat and text):
                event = partial(with_text, index, text, output)
                await emit(await write(event) if is_long else event())
            if output.finished:
                await emit(await write(partial(last, index, text, output)))
        if with_usage:
            await emit(dumps(self._chunk([], usage=self._call.usage())))

    def _part(self, index: int, text: str | None, **rest: Any) -> Choice | ChatPart:
        """A part of an answer; without text, it adds nothing to a chat."""
        if not self._is_chat:
            return Choice(index=index, text=text or "", **rest)
        return ChatPart(index=index, delta=ChatDelta() if text is None else ChatDelta(content=text), **rest)

    def _chunk(self, choices: list[Any], **more: Any) -> BaseModel:
        if self._is_chat:
            return ChatChunk(**self._frame, object="chat.completion.chunk", choices=choices, **more)
        return CompletionChunk(**self._frame, object="text_completion", choices=choices, **more)

    def _whole(self, texts: Sequence[str]) -> BaseModel:
        more = {"usage": self._call.usage()} | self._session()
        outputs = [generation.output for generation in self._call.batch.generations]
        rests = [self._rest(index, output) for index, output in enumerate(outputs) if output is not None]
        if self._is_chat:
            messages = (ChatAnswer(role="assistant", content=text) for text in texts)
            chats = [
                ChatChoice(index=index, message=message, **rest)
                for index, (message, rest) in enumerate(zip(messages, rests, strict=True))
            ]
            return ChatCompletion(**self._frame, object="chat.completion", choices=chats, **more)
        choices = [
            Choice(index=index, text=text, **rest) for index, (text, rest) in enumerate(zip(texts, rests, strict=True))
        ]
        return Completion(**self._frame, object="text_completion", choices=choices, **more)

    def _rest(self, index: int, output: RequestOutput) -> dict[str, Any]:
        """What an answer has besides its text."""
        rest = {"logprobs": self._new_logprobs(index, output), "finish_reason": output.finish_reason}
        return rest | ({"cache": output.cache} if self._body.kept_tokens else {})

    def _new_logprobs(self, index: int, output: RequestOutput) -> ChatLogprobs | CompletionLogprobs | None:
        if self._call.logprobs is None:
            return None
        writer = self._logprobs[index]
        return writer.chat(output) if self._is_chat else writer.completion(output)

    def _session(self) -> dict[str, Any]:
        used = self._call.past.report()
        return {} if used is None else {"session": used}

    def _prompt_of(self, index: int) -> Prompt:
        return self._call.prompts[index // self._call.number]

    async def _echoes(self) -> list[str]:
        """The text that each answer begins with: its prompt, if echoed. Token ids are decoded in a thread."""
        if not getattr(self._body, "echo", False):
            return [""] * len(self._call.batch.generations)
        texts = await self._parts.reader.write(lambda: [self._text_of(prompt) for prompt in self._call.prompts])
        return [text for text in texts for _ in range(self._call.number)]

    def _text_of(self, prompt: Prompt) -> str:
        return prompt.text if prompt.text is not None else str(self._parts.llm.tokenizer.decode(list(prompt.tokens)))


def _check(output: RequestOutput) -> None:
    if output.finish_reason == "error":
        raise ApiError(500, f"the request failed: {output.error}", code="request_failed")
