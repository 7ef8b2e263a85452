"""How measurements are shown."""

from __future__ import annotations

import statistics


def show(values: list[float], digits: int = 2) -> str:
    """The median, with the least and the most."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"
