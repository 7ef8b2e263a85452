"""Pins: parts of a prompt that compression keeps, whatever the policy's votes say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from snapstream.config.checks import is_integer
from snapstream.errors import ConfigurationError

Span = tuple[int, int]
"""Consecutive tokens of a prompt: the first one, and one past the last."""

MOST_SPANS = 256
"""Maximum number of spans that one budget pins."""


def read_spans(given: Any) -> tuple[Span, ...]:
    """Check spans: pairs of numbers, or slices as text, such as ``"0:300"``.

    Args:
        given: The spans, or a single slice as text.

    Returns:
        The spans in the given order, each once.

    Raises:
        ConfigurationError: They are something else, or too many.
    """
    spans = [given] if isinstance(given, str) else given
    if not isinstance(spans, Iterable):
        raise ConfigurationError(f"pin is {given!r}; it must be a list of spans, such as [[0, 300]] or ['0:300']")
    read = tuple(dict.fromkeys(_read_span(span) for span in spans))
    if len(read) > MOST_SPANS:
        raise ConfigurationError(f"pin has {len(read)} spans; at most {MOST_SPANS} are allowed")
    return read


def _read_span(given: Any) -> Span:
    span: Any = given
    if isinstance(given, str):
        span = [
            int(part) if part.isascii() and part.isdigit() and len(part) < 10 else None for part in given.split(":")
        ]
    if not isinstance(span, Sequence) or len(span) != 2 or not all(map(is_integer, span)):
        raise ConfigurationError(f"pin has {given!r:.100}; a span is two token positions, such as [0, 300] or '0:300'")
    start, end = span
    if not 0 <= start < end:
        raise ConfigurationError(f"pin has {given!r}; a span starts at 0 or later and ends after its start")
    return start, end


def last_end(spans: Iterable[Span], length: int) -> int:
    """One past the last token of a prompt of ``length`` tokens that a span covers; 0 for none."""
    return max((min(end, length) for start, end in spans if start < length), default=0)
