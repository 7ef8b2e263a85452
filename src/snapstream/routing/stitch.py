"""One answer of two: the first token's, and the rest's, in the shape that was asked for."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

LOST = "\ufffd"
"""What is printed for a part of a character; then the first token's text cannot be put before the rest's."""


@dataclass
class Answer:
    """What becomes one answer.

    Attributes:
        kind: ``completions`` or ``chat/completions``.
        model: As the client calls it.
        first: Text of the first token.
        prompt_tokens: Tokens of the prompt.
        stops: Texts that end an answer.
        keeps_stop: Whether the text that ends it belongs to it.
        streams: Whether it goes out piece by piece.
        wants_usage: Whether its last piece says how much there was.
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
        """The answer to a request, as its body asks for it."""
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
        """Whether the client sees messages."""
        return self.kind == "chat/completions"

    def seam(self, rest: str) -> int | None:
        """Where a text of ``stops`` ends in ``first + rest`` that begins in the first token; ``None``: nowhere.

        The decode instance looks for them behind the first token alone.
        """
        whole, ends = self.first + rest, []
        for stop in self.stops:
            at = whole.find(stop)
            if 0 <= at < len(self.first) < at + len(stop):
                ends.append(at + len(stop) if self.keeps_stop else at)
        return min(ends, default=None)

    def whole(self, rest: str, finish: str | None, completion_tokens: int) -> dict[str, Any]:
        """The answer at once."""
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
        """A piece of a stream."""
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": finish}
        if self.is_chat:
            choice["delta"] = ({"role": "assistant"} if opens else {}) | {"content": text}
        else:
            choice["text"] = text
        return event(self._stream_frame() | {"choices": [choice]})

    def ending(self, completion_tokens: int) -> str:
        """The last pieces of a stream."""
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
    """The beginning of a stream: text is held back until no stop can reach from the first token into it any more.

    Args:
        answer: Whose.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.is_open = True
        self._rest = ""
        self._needed = max((len(stop) - 1 for stop in answer.stops), default=0)

    def add(self, text: str, *, ends: bool) -> Iterator[tuple[str, bool]]:
        """Take the next text; yields what may be sent, each with whether the answer ends with it."""
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
    """One server-sent event."""
    return f"data: {data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)}\n\n"


def parse_event(line: str) -> dict[str, Any] | str | None:
    """What a line of a stream says: an object, ``[DONE]``, or nothing."""
    if not line.startswith("data:"):
        return None
    said = line[5:].strip()
    if said == "[DONE]":
        return said
    found = json.loads(said)
    return found if isinstance(found, dict) else None
