"""Parses numbers of tokens and entries, such as ``512`` or ``4k``, shares, such as ``1/4``, bytes, and times."""

from __future__ import annotations

from fractions import Fraction

from snapstream.errors import ConfigurationError

_SCALES = {"k": 2**10, "m": 2**20}
_BYTES = {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}


def parse_tokens(text: str | int, what: str) -> int:
    """Parse a number of tokens or entries, such as ``512`` or ``4k``; ``k`` is 1024, ``m`` is 1024 times that.

    Raises:
        ConfigurationError: It is not a positive number; the message begins with ``what``.
    """
    written = str(text).strip().lower().replace("_", "")
    scale = _SCALES.get(written[-1:], 1)
    digits = written[:-1] if scale > 1 else written
    if not (digits.isascii() and digits.isdecimal()) or int(digits) == 0:
        raise ConfigurationError(f"{what}: {text!r} is not a number of tokens; give 512, 4k, ...")
    return int(digits) * scale


def parse_share(text: str, what: str) -> Fraction:
    """Parse a share, such as ``1/4``, ``25%`` or ``0.25``.

    Raises:
        ConfigurationError: It is not a share between 0 and 1; the message begins with ``what``.
    """
    written = text.replace(" ", "")
    try:
        share = Fraction(written.removesuffix("%")) / (100 if written.endswith("%") else 1)
    except (ValueError, ZeroDivisionError):
        share = Fraction(0)
    if not 0 < share < 1:
        raise ConfigurationError(f"{what}: {text!r} is not a share between 0 and 1, such as 1/4, 25% or 0.25")
    return share


def parse_bytes(text: str, what: str) -> int:
    """Parse a number of bytes with a unit, such as ``2GiB``, ``500MB`` or ``0.5 GiB``.

    Raises:
        ConfigurationError: It is not one; the message begins with ``what``.
    """
    written = text.strip().lower()
    unit = next((unit for unit in _BYTES if written.endswith(unit)), "")
    try:
        size = float(written.removesuffix(unit)) * _BYTES[unit]
    except (KeyError, ValueError):
        size = -1.0
    if not 0 <= size < 2**60:
        raise ConfigurationError(f"{what}: {text!r} is not a size; give a number with a unit, such as 512MiB or 2GiB")
    return int(size)


def parse_seconds(text: str, what: str) -> float:
    """Parse a time, such as ``200ms``, ``1.5s`` or ``0.2`` (seconds).

    Raises:
        ConfigurationError: It is not a positive time; the message begins with ``what``.
    """
    written = text.strip().lower()
    scale = 1e-3 if written.endswith("ms") else 1.0
    try:
        seconds = float(written.removesuffix("ms").removesuffix("s")) * scale
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise ConfigurationError(f"{what}: {text!r} is not a time; give 200ms, 1.5s, ...")
    return seconds


def is_bytes(text: str) -> bool:
    """Whether a size is written in bytes rather than as a number of entries or a share."""
    return text.strip().lower().endswith(tuple(_BYTES))


def is_share(text: str) -> bool:
    """Whether a size is written as a share rather than a number."""
    return any(sign in text for sign in "/%.")
