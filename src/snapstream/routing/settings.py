"""The router's settings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from snapstream.errors import ConfigurationError


@dataclass(frozen=True)
class RouterSettings:
    """Settings of a router.

    Attributes:
        prefill: URLs of prefill instances.
        decode: URLs of decode instances.
        attempts: Maximum number of instances to try for a request before the first byte of an answer is sent.
        check_seconds: Seconds between two health checks.
        connect_seconds: Timeout, in seconds, for connecting to an instance and for its health check.
        keep_alive_seconds: Seconds of silence after which a stream gets a comment; 0 for none.
        affinity: How many requests more than others an instance may have and still get a prompt that it has read all
            of, a share of that for a part of the prompt; 0 for none.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    attempts: int = 3
    check_seconds: float = 2.0
    connect_seconds: float = 5.0
    keep_alive_seconds: float = 5.0
    affinity: float = 8.0

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ConfigurationError: There is no decode instance, or a number is out of range.
        """
        if not self.decode:
            raise ConfigurationError("decode is empty; give the URL of at least one decode instance")
        for name, value in (("attempts", self.attempts), ("check_seconds", self.check_seconds)):
            if value <= 0:
                raise ConfigurationError(f"{name} is {value}; it must be positive")
        for name, value in (("keep_alive_seconds", self.keep_alive_seconds), ("affinity", self.affinity)):
            if not 0 <= value < math.inf:
                raise ConfigurationError(f"{name} is {value}; it must be 0 or more")


def parse_urls(texts: Sequence[str]) -> tuple[str, ...]:
    """Parse URLs; each text is one URL, or several separated by commas.

    Raises:
        ConfigurationError: A text is not a URL, or a URL is given twice.
    """
    urls = [url.strip().rstrip("/") for text in texts for url in text.split(",") if url.strip()]
    for url in urls:
        if not url.startswith(("http://", "https://")) or len(url.split("//", 1)[1]) == 0:
            raise ConfigurationError(f"{url!r} is not a URL; give http://host:port")
    if len(set(urls)) < len(urls):
        raise ConfigurationError(f"an instance is given twice: {', '.join(urls)}")
    return tuple(urls)
