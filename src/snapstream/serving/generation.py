"""Sequences as the event loop sees them: what was requested, and the output so far."""

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
        tokens: The prompt; with a ``past``, only the new tokens.
        params: Sampling parameters.
        past: The compressed cache of earlier turns.
        keep: Called with the compressed cache at the end, on the event loop; ``None`` if it is not needed.
        salt: Sequences with different ones share no cached prefixes: the digest of an API key.
        asked: When the request arrived, in :func:`time.monotonic` time; ``None`` for when it is submitted.
    """

    tokens: Sequence[int]
    params: SamplingParams
    past: CompressedSequence | None = None
    keep: Callable[[CompressedSequence], None] | None = None
    asked: float | None = None
    salt: str = ""


class Generation:
    """One sequence as the event loop sees it.

    Attributes:
        name: Its request id in the engine.
        job: What was requested.
        output: The newest output.
        created: When it was requested; all times are in :func:`time.monotonic` time.
        started: When its prefill started.
        first_token: When prefill had ended and its first token, if any was requested, was generated.
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
        """Merge an output into those that have not been taken yet."""
        self.output, self._news = output, True
        self._text.append(output.new_text)
        self._wake.set()

    def take(self) -> tuple[str, RequestOutput] | None:
        """Return the new text since the last call and the newest output; ``None`` if there is nothing new."""
        if not self._news or self.output is None:
            return None
        text, self._text, self._news = "".join(self._text), [], False
        return text, self.output
