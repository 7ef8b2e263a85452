"""Checks of setting values."""

from __future__ import annotations

from typing import TypeGuard

from snapstream.errors import ConfigurationError


def is_integer(value: object) -> TypeGuard[int]:
    """Whether a value is an integer; booleans are not."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_count_or_none(value: object) -> bool:
    """Whether a value is an integer of 0 or more, or ``None``."""
    return value is None or (is_integer(value) and value >= 0)


def is_number(value: object) -> bool:
    """Whether a value is a number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_count(what: str, value: object) -> None:
    """Check that a value is an integer of 0 or more.

    Raises:
        ConfigurationError: It is not; the message begins with ``what``.
    """
    require_integer(what, value)
    if value < 0:  # type: ignore[operator]
        raise ConfigurationError(f"{what} is {value}; it must be 0 or more")


def require_integer(what: str, value: object) -> None:
    """Check that a value is an integer.

    Raises:
        ConfigurationError: It is not; the message begins with ``what``.
    """
    if not is_integer(value):
        raise ConfigurationError(f"{what} is {value!r}; it must be a whole number")
