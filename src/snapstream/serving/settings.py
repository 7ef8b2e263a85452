"""What the operator of a server can set."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from snapstream.errors import ConfigurationError


@dataclass(frozen=True)
class Example:
    """A prompt that the page offers to try.

    Attributes:
        text: The long part.
        question: What to ask about it.
        note: What visitors should know about the model.
    """

    text: str
    question: str
    note: str = ""


@dataclass(frozen=True)
class ServerSettings:
    """Limits, keys and times of one server.

    Attributes:
        model_name: What clients call the model.
        api_keys: Any of them opens ``/v1``; none: no key is needed.
        cors_origins: Web origins that browsers may call from, besides the server's own page; ``*`` for all.
        max_body_bytes: Longest request body.
        max_queue: Sequences that may wait for a slot; more are answered 429.
        max_choices: Most sequences of one request: prompts times ``n``.
        request_timeout: Seconds a request may take in all, waiting included.
        body_timeout: Seconds a client may take to send its request.
        keep_alive_seconds: Seconds after which a stream that has nothing to send says how far its request has come; 0:
            never.
        flush_timeout: Seconds that what is left of an ended answer waits for a client that takes none of it.
        drain_timeout: Seconds that what is running may go on after a signal to stop.
        template_timeout: Seconds a chat template may take.
        stall_timeout: Seconds one step of the engine may take before ``/health`` says that it hangs.
        session_ttl: Seconds a session is kept after its last turn.
        session_dir: Where sessions go that have no room in memory, and all of them when the server stops; ``None``:
            they are forgotten.
        session_disk: Most bytes of this directory.
        context_dir: Where contexts are kept besides memory, so that they outlive the server; ``None``: nowhere.
        context_disk: Most bytes of this directory.
        example: For the page.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    max_body_bytes: int = 16 * 2**20
    max_queue: int = 256
    max_choices: int = 128
    request_timeout: float = 600.0
    body_timeout: float = 30.0
    keep_alive_seconds: float = 5.0
    flush_timeout: float = 30.0
    drain_timeout: float = 30.0
    template_timeout: float = 5.0
    stall_timeout: float = 300.0
    session_ttl: float = 600.0
    session_dir: Path | None = None
    session_disk: int = 4 * 2**30
    context_dir: Path | None = None
    context_disk: int = 4 * 2**30
    example: Example | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigurationError: A value that is not allowed.
        """
        if not self.model_name:
            raise ConfigurationError("server: the model needs a name")
        if any(not key or not key.isascii() or key != key.strip() for key in self.api_keys):
            raise ConfigurationError("server: an API key is empty, not ASCII, or has spaces around it")
        for name in ("max_body_bytes", "max_choices", "session_disk", "context_disk"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"server: {name} is {getattr(self, name)}; it must be 1 or more")
        if self.max_queue < 0:
            raise ConfigurationError(f"server: max_queue is {self.max_queue}; it must be 0 or more")
        for name in ("request", "body", "flush", "template", "stall"):
            if not 0 < getattr(self, f"{name}_timeout") < math.inf:
                raise ConfigurationError(
                    f"server: {name}_timeout is {getattr(self, f'{name}_timeout')}; it must be > 0"
                )
        if not 0 <= self.keep_alive_seconds < math.inf:
            raise ConfigurationError(f"server: keep_alive_seconds is {self.keep_alive_seconds}; it must be 0 or more")
        if not 0 < self.session_ttl < math.inf or not 0 <= self.drain_timeout < math.inf:
            raise ConfigurationError("server: session_ttl must be above 0, drain_timeout 0 or more, and both finite")
