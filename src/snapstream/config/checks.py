"""What settings are checked with."""

from __future__ import annotations

from typing import TypeGuard

from snapstream.errors import ConfigurationError


def is_integer(value: object) -> TypeGuard[int]:
    """Whether it is a whole number, and no boolean."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_count_or_none(value: object) -> bool:
    """Whether it is a whole number of 0 or more, or nothing."""
    return value is None or (is_integer(value) and value >= 0)


def is_number(value: object) -> bool:
    """Whether it is a number, and no boolean."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def require_integer(what: str, value: object) -> None:
    """Refuse anything but a whole number.

    Raises:
        ConfigurationError: It is none.
    """
    if not is_integer(value):
        raise ConfigurationError(f"{what} is {value!r}; it must be a whole number")
