"""What the operator of a router sets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from snapstream.errors import ConfigurationError


@dataclass(frozen=True)
class RouterSettings:
    """Settings of a router.

    Attributes:
        prefill: URLs of instances that read prompts.
        decode: URLs of instances that decode.
        attempts: Instances that are tried for a request, before the first byte of an answer is sent.
        check_seconds: Between two looks at an instance's health.
        connect_seconds: That an instance may take to accept a connection, or to say that it is well.
    """

    prefill: tuple[str, ...]
    decode: tuple[str, ...]
    attempts: int = 3
    check_seconds: float = 2.0
    connect_seconds: float = 5.0

    def __post_init__(self) -> None:
        """Check them.

        Raises:
            ConfigurationError: Nobody decodes, or nobody would be asked.
        """
        if not self.decode:
            raise ConfigurationError("decode names no instance; give at least one URL")
        for name, value in (("attempts", self.attempts), ("check_seconds", self.check_seconds)):
            if value <= 0:
                raise ConfigurationError(f"{name} is {value}; it must be positive")


def parse_urls(texts: Sequence[str]) -> tuple[str, ...]:
    """URLs, each given alone or several by commas.

    Raises:
        ConfigurationError: One that is none.
    """
    urls = [url.strip().rstrip("/") for text in texts for url in text.split(",") if url.strip()]
    for url in urls:
        if not url.startswith(("http://", "https://")) or len(url.split("//", 1)[1]) == 0:
            raise ConfigurationError(f"{url!r} is no URL; give http://host:port")
    if len(set(urls)) < len(urls):
        raise ConfigurationError(f"an instance is named twice: {', '.join(urls)}")
    return tuple(urls)
