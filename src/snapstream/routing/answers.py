"""Joins the answers of two instances, the first token and the rest, in the format that the client asked for."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

LOST = "\ufffd"
"""Placeholder for an incomplete character; a first token that ends in one cannot be joined with the rest's text."""


@dataclass
class Answer:
    """An answer that is joined from two parts.

    Attributes:
        kind: ``completions`` or ``chat/completions``.
        model: Name of the model in the answer.
        first: Text of the first token.
        prompt_tokens: Number of prompt tokens.
        stops: Stop strings.
        keeps_stop: Whether the answer includes the stop string.
        streams: Whether the answer is streamed.
        wants_usage: Whether the last chunk reports the usage.
    """

    kind: str
    model: str
    first: str
    prompt_tokens: int
    stops: Sequence[str] = ()
    keeps_stop: bool = False
    streams: bool = False
    wants_usage: bool = False
    id: str = field(default_factory=lambda: secrets.token_hex(16))
    created: int = field(default_factory=lambda: int(time.time()))

    @classmethod
    def to(cls, kind: str, body: dict[str, Any], model: str, first: str, prompt_tokens: int) -> Answer:
        """Create the answer to a request, with the options in its body."""
        stops = body.get("stop") or []
        return cls(
            kind,
            model,
            first,
            prompt_tokens,
            [stops] if isinstance(stops, str) else list(stops),
            keeps_stop=bool(body.get("include_stop_str_in_output")),
            streams=bool(body.get("stream")),
            wants_usage=bool((body.get("stream_options") or {}).get("include_usage")),
        )

    @property
    def is_chat(self) -> bool:
        """Whether the request is a chat completion."""
        return self.kind == "chat/completions"

    def seam(self, rest: str) -> int | None:
        """Where the answer ``first + rest`` ends if a stop string spans the first token and the rest, else ``None``.

        The decode instance only finds stop strings that start after the first token.
        """
        whole, ends = self.first + rest, []
        for stop in self.stops:
            at = whole.find(stop)
            if 0 <= at < len(self.first) < at + len(stop):
                ends.append(at + len(stop) if self.keeps_stop else at)
        return min(ends, default=None)

    def whole(self, rest: str, finish: str | None, completion_tokens: int) -> dict[str, Any]:
        """The complete answer."""
        text = self.first + rest
        if (end := self.seam(rest)) is not None:
            text, finish = text[:end], "stop"
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        choice |= {"message": {"role": "assistant", "content": text}} if self.is_chat else {"text": text}
        return self._frame("chat.completion" if self.is_chat else "text_completion") | {
            "choices": [choice],
            "usage": self._usage(completion_tokens),
        }

    def chunk(self, text: str, finish: str | None = None, *, opens: bool = False) -> str:
        """One chunk of a streamed answer."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        if self.is_chat:
            choice["delta"] = ({"role": "assistant"} if opens else {}) | {"content": text}
        else:
            choice["text"] = text
        return event(self._stream_frame() | {"choices": [choice]})

    def ending(self, completion_tokens: int) -> str:
        """The last events of a streamed answer."""
        usage = event(self._stream_frame() | {"choices": [], "usage": self._usage(completion_tokens)})
        return (usage if self.wants_usage else "") + event("[DONE]")

    def _stream_frame(self) -> dict[str, Any]:
        return self._frame("chat.completion.chunk" if self.is_chat else "text_completion")

    def _frame(self, kind: str) -> dict[str, Any]:
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{prefix}-{self.id}", "object": kind, "created": self.created, "model": self.model}

    def _usage(self, completion_tokens: int) -> dict[str, int]:
        total = self.prompt_tokens + completion_tokens
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": total,
        }


class Joint:
    """The start of a stream: text is held back until no stop string can span the first token and the rest.

    Args:
        answer: The answer that is streamed.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.is_open = True
        self._rest = ""
        self._needed = max((len(stop) - 1 for stop in answer.stops), default=0)

    def add(self, text: str, *, ends: bool) -> Iterator[tuple[str, bool]]:
        """Add text; yields the text that may be sent, and whether the answer ends with it."""
        if not self.is_open:
            yield text, False
            return
        self._rest += text
        end = self.answer.seam(self._rest)
        if end is not None:
            self.is_open = False
            yield (self.answer.first + self._rest)[:end], True
        elif ends or len(self._rest) >= self._needed:
            self.is_open = False
            yield self.answer.first + self._rest, False


def event(data: dict[str, Any] | str) -> str:
    """Format a server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}\n\n"


def parse_event(line: str) -> dict[str, Any] | str | None:
    """Parse a line of an event stream: an object, ``[DONE]``, or ``None`` for anything else."""
    if not line.startswith("data:"):
        return None
    said = line[5:].strip()
    if said == "[DONE]":
        return said
    found = json.loads(said)
    return found if isinstance(found, dict) else None
