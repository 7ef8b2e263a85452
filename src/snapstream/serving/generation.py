"""What is asked of the engine, and what has come of it so far, as the event loop sees it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from snapstream.config import SamplingParams
from snapstream.engine import CompressedSequence, RequestOutput


@dataclass(frozen=True)
class Job:
    """One sequence to generate.

    Attributes:
        tokens: The prompt; after a ``past``, what is new of it.
        params: How to sample.
        past: The turns before.
        keep: Takes the compressed cache at the end, on the event loop, for a next turn; ``None`` if it is not wanted.
        asked: When the client asked, as :func:`time.monotonic` counts; ``None``: when it is submitted.
    """

    tokens: Sequence[int]
    params: SamplingParams
    past: CompressedSequence | None = None
    keep: Callable[[CompressedSequence], None] | None = None
    asked: float | None = None


class Generation:
    """One sequence as the event loop sees it.

    Attributes:
        name: The engine's name for it.
        job: What was asked.
        output: The newest output.
        created: When it was asked for; all times are of :func:`time.monotonic`.
        started: When its prompt began to be read.
        first_token: When its prompt had been read and its first token was there, if one was asked for.
        ended: When it ended.
    """

    def __init__(self, name: str, job: Job, wake: asyncio.Event) -> None:
        self.name, self.job = name, job
        self.output: RequestOutput | None = None
        self.created = time.monotonic() if job.asked is None else job.asked
        self.started: float | None = None
        self.first_token: float | None = None
        self.ended: float | None = None
        self._wake = wake
        self._text: list[str] = []
        self._news = False

    def put(self, output: RequestOutput) -> None:
        """Merge an output into what has not been taken yet."""
        self.output, self._news = output, True
        self._text.append(output.new_text)
        self._wake.set()

    def take(self) -> tuple[str, RequestOutput] | None:
        """New text since the last call and the newest output, if there is one."""
        if not self._news or self.output is None:
            return None
        text, self._text, self._news = "".join(self._text), [], False
        return text, self.output
