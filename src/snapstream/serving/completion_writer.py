"""Writes answers of ``/v1/completions``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from typing_extensions import override

from snapstream.engine import RequestOutput
from snapstream.serving.answers import Choice, Completion, CompletionChunk, CompletionLogprobs
from snapstream.serving.prompts import Prompt
from snapstream.serving.tools.events import Event, Text
from snapstream.serving.writer import OpenAIWriter


class CompletionWriter(OpenAIWriter):
    """Writes texts, which may begin with their prompts."""

    prefix = "cmpl-"

    @override
    async def begin(self) -> None:
        number = self.call.number
        self._echoes = [""] * len(self.said)
        if getattr(self.call.body, "echo", False):
            # Token ids are decoded in a thread.
            texts = await self.parts.reader.write(lambda: [self._text_of(prompt) for prompt in self.call.prompts])
            self._echoes = [text for text in texts for _ in range(number)]

    @override
    def is_long(self, index: int) -> bool:
        return bool(self._echoes[index])

    @override
    def whole(self) -> Completion:
        choices = [
            Choice(
                index=index,
                text=self._echoes[index] + self.said[index].text,
                logprobs=self._new_logprobs(index, output),
                finish_reason=output.finish_reason,
                stop_reason=output.stopped_by,
                **self.cache(output),
            )
            for index, output in enumerate(self.ended())
        ]
        return Completion(
            **self.frame, object="text_completion", choices=choices, usage=self.call.usage(), **self.session()
        )

    @override
    def chunk(self, choices: list[Any], **more: Any) -> CompletionChunk:
        return CompletionChunk(**self.frame, object="text_completion", choices=choices, **more)

    @override
    def opening(self) -> Iterable[str]:
        for index, echo in enumerate(self._echoes):
            # An echo with log-probabilities waits for those of the prompt, which are known later.
            if echo and self.call.logprobs is None:
                yield self.send(Choice(index=index, text=echo, logprobs=None, finish_reason=None))
                self._echoes[index] = ""

    @override
    def pieces(self, index: int, events: list[Event], output: RequestOutput) -> Iterable[str]:
        text = self._echoes[index] + "".join(each.text for each in events if isinstance(each, Text))
        self._echoes[index] = ""
        if output.finished:
            choice = Choice(
                index=index,
                text=text,
                logprobs=self._new_logprobs(index, output),
                finish_reason=output.finish_reason,
                stop_reason=output.stopped_by,
                **self.cache(output),
            )
            yield self.send(choice, **self.session())
        elif text or self.call.logprobs is not None:
            logprobs = self._new_logprobs(index, output)
            yield self.send(Choice(index=index, text=text, logprobs=logprobs, finish_reason=None))

    def _new_logprobs(self, index: int, output: RequestOutput) -> CompletionLogprobs | None:
        return None if self.call.logprobs is None else self.logprobs[index].completion(output)

    def _text_of(self, prompt: Prompt) -> str:
        return prompt.text if prompt.text is not None else str(self.parts.llm.tokenizer.decode(list(prompt.tokens)))
