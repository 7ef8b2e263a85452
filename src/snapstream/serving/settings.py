"""Settings of a server."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from snapstream.errors import ConfigurationError


@dataclass(frozen=True)
class Example:
    """An example prompt that the page offers.

    Attributes:
        text: The text.
        question: A question about it.
        note: What users should know about the model.
    """

    text: str
    question: str
    note: str = ""


@dataclass(frozen=True)
class ServerSettings:
    """Names, keys, limits and timeouts of one server.

    Attributes:
        model_name: What clients call the model.
        api_keys: Valid API keys; if there are none, no key is needed.
        cors_origins: Origins whose pages may call the server, besides the server's own page; ``*`` for all.
        max_body_bytes: Maximum size of a request body.
        max_queue: Maximum number of sequences that wait for a slot; further requests get a 429.
        max_choices: Maximum number of sequences of one request: prompts times ``n``.
        request_timeout: Seconds a request may take, including time in the queue.
        body_timeout: Seconds a client may take to send its request.
        keep_alive_seconds: Seconds of silence after which a stream sends a comment about its progress; 0 turns this
            off.
        flush_timeout: Seconds after which the connection of a finished answer is aborted, if its client reads nothing.
        drain_timeout: Seconds that running requests have to finish after a signal to stop.
        template_timeout: Seconds a chat template may take.
        stall_timeout: Seconds an engine step may take before ``/health`` reports that it hangs.
        session_ttl: Seconds a session is kept after its last turn.
        session_dir: Directory for sessions that do not fit in memory, and for all sessions when the server stops;
            ``None`` to drop them.
        session_disk: Maximum size of this directory in bytes.
        context_dir: Directory for contexts, so that they outlive the server; ``None`` to keep them in memory only.
        context_disk: Maximum size of this model's files in this directory, in bytes.
        tool_parser: How the model writes calls of tools: ``auto``, by its chat template, or the name of a format.
        reasoning_parser: ``auto``: reasoning between tags that the chat template shows is not part of an answer's
            text; ``none``: it is.
        example: Example prompt of the page.
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
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    example: Example | None = None

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigurationError: A value is not allowed.
        """
        if not self.model_name:
            raise ConfigurationError("server: the model needs a name")
        if any(not key or not key.isascii() or key != key.strip() for key in self.api_keys):
            raise ConfigurationError("server: an API key is empty, not ASCII, or has spaces around it")
        for name in ("max_body_bytes", "max_choices", "session_disk", "context_disk"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"server: {name} is {getattr(self, name)}; it must be 1 or more")
        if self.reasoning_parser not in ("auto", "none"):
            raise ConfigurationError(f"server: reasoning_parser is {self.reasoning_parser!r}; it must be auto or none")
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
