"""Writes the answer to a request, whole or as a stream; each API has its own writer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from functools import partial
from typing import Any, ClassVar

from pydantic import BaseModel

from snapstream import __version__
from snapstream.engine import RequestOutput
from snapstream.serving.answers import LogprobWriter, dumps
from snapstream.serving.call import Call
from snapstream.serving.errors import ApiError
from snapstream.serving.prompts import Prompt
from snapstream.serving.streams import Emit, error_event, event
from snapstream.serving.tools.events import Event, Said


class Writer(ABC):
    """Writes the answers of a call that has started.

    Attributes:
        prefix: What ids of answers begin with.
        said: The answers so far.
    """

    prefix: ClassVar[str]

    def __init__(self, call: Call, request_id: str, created: int) -> None:
        """Create a writer.

        Args:
            call: The call.
            request_id: Id of the request.
            created: When it arrived, in seconds since 1970.
        """
        self.call, self.parts, number = call, call.parts, len(call.batch.generations)
        self.id, self.created = self.prefix + request_id, created
        self.said = [Said() for _ in range(number)]
        self._readers = [call.reader(self.prompt_of(index)) for index in range(number)]

    async def collect(self) -> bytes:
        """Wait for the complete answer, and return it as JSON."""
        await self.begin()
        async for index, text, output in self.call.batch.changes():
            self.take(index, text, output)
        return await self.parts.reader.write(lambda: dumps(self.whole()).encode())

    async def stream(self, emit: Emit) -> None:
        """Send the answer while it is generated."""
        await self.begin()
        for piece in self.opening():
            await emit(piece)
        async for index, text, output in self.call.batch.changes():
            make = partial(self._pieces, index, text, output)
            for piece in await self.parts.reader.write(make) if self.is_long(index) else make():
                await emit(piece)
        for piece in self.closing():
            await emit(piece)

    async def begin(self) -> None:  # noqa: B027
        """Prepare what answers begin with."""

    def is_long(self, index: int) -> bool:
        """Whether the next piece of an answer takes long to write."""
        return False

    @abstractmethod
    def whole(self) -> BaseModel:
        """The complete answer."""

    @abstractmethod
    def opening(self) -> Iterable[str]:
        """Events at the beginning of a stream."""

    @abstractmethod
    def pieces(self, index: int, events: list[Event], output: RequestOutput) -> Iterable[str]:
        """Events for what is new of an answer."""

    @abstractmethod
    def closing(self) -> Iterable[str]:
        """Events at the end of a stream."""

    @staticmethod
    def error_event(error: ApiError, request_id: str) -> str:
        """The event of an error that ends a stream."""
        return error_event(error, request_id)

    def take(self, index: int, text: str, output: RequestOutput) -> list[Event]:
        """Add new text to an answer; returns what it is.

        Raises:
            ApiError: The answer has failed.
        """
        if output.finish_reason == "error":
            raise ApiError(500, f"the request failed: {output.error}", code="request_failed")
        events = self._readers[index].feed(text, last=output.finished)
        for each in events:
            self.said[index].add(each)
        return events

    def prompt_of(self, index: int) -> Prompt:
        """The prompt of an answer."""
        return self.call.prompts[index // self.call.number]

    def finish_reason(self, index: int, output: RequestOutput) -> str | None:
        """Why an answer has ended: the engine's reason, or because tools are called."""
        return "tool_calls" if output.finish_reason == "stop" and self.said[index].calls else output.finish_reason

    def ended(self) -> list[RequestOutput]:
        """The last output of each answer."""
        return [generation.output for generation in self.call.batch.generations if generation.output is not None]

    def _pieces(self, index: int, text: str, output: RequestOutput) -> list[str]:
        return list(self.pieces(index, self.take(index, text, output), output))


class OpenAIWriter(Writer):
    """What the writers of OpenAI's two routes for completions share."""

    def __init__(self, call: Call, request_id: str, created: int) -> None:
        """Create a writer; see :class:`Writer`."""
        super().__init__(call, request_id, created)
        engine, text_of = self.parts.llm.engine, self.parts.reader.token_text
        self.frame: dict[str, Any] = {
            "id": self.id,
            "created": created,
            "model": self.parts.settings.model_name,
            "system_fingerprint": f"snapstream-{__version__}",
        }
        silent = frozenset() if call.shows_special else engine.special_tokens
        self.logprobs = [LogprobWriter(text_of, self.prompt_of(index), silent) for index in range(len(self.said))]
        options = call.body.stream_options
        self._with_usage = bool(options and options.include_usage)
        self._always = bool(options and options.continuous_usage_stats)

    @abstractmethod
    def chunk(self, choices: list[Any], **more: Any) -> BaseModel:
        """A chunk of the stream."""

    def closing(self) -> Iterable[str]:
        """Token counts, if requested, and the end."""
        if self._with_usage:
            yield event(dumps(self.chunk([], usage=self.call.usage())))
        yield event("[DONE]")

    def send(self, choice: BaseModel, **more: Any) -> str:
        """The event of a chunk with one choice."""
        counts = {"usage": self.call.usage()} if self._always else {"usage": None} if self._with_usage else {}
        return event(dumps(self.chunk([choice], **(counts | more))))

    def session(self) -> dict[str, Any]:
        """How the session was used."""
        used = self.call.past.report()
        return {} if used is None else {"session": used}

    def cache(self, output: RequestOutput) -> dict[str, Any]:
        """What was kept of the prompt, if requested."""
        return {"cache": output.cache} if self.call.body.kept_tokens else {}
