"""Says how far a slow load has come."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
SLOW = 2.0
"""Seconds after which a line is printed, and from one line to the next."""


def with_progress(items: Iterable[Item], total: int) -> Iterator[Item]:
    """Yield items; if that takes long, print to stderr which share of them is done."""
    said = time.monotonic()
    for number, item in enumerate(items):
        if time.monotonic() - said > SLOW:
            print(f"reading weights: {100 * number // total} %", file=sys.stderr, flush=True)
            said = time.monotonic()
        yield item
