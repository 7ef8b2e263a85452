"""Formatting of measurements."""

from __future__ import annotations

import statistics


def show(values: list[float], digits: int = 2) -> str:
    """Format the median, with the minimum and maximum."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"
