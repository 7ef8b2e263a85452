"""How a step's time is shared between prompts and decoding, so that running sequences do not wait too long."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

WEIGHT = 0.25
"""Weight of the last launch in the average time of a decode step."""
DECODING = 0.5
"""Largest share of the time that decoding takes, as long as a step of it fits."""


class Pace:
    """Keeps the time between two launches of a sequence below a bound, by what the last ones took.

    It counts on work that is done when a call returns, as on a CPU.

    Args:
        max_gap: The bound in seconds; ``None`` for none: a step is a chunk and a whole launch.
    """

    def __init__(self, max_gap: float | None) -> None:
        self.max_gap = max_gap
        self._step: float | None = None  # seconds, on average

    def steps(self, *, prompts: bool) -> int | None:
        """Most steps of the next launch, if it shares the time with prompts; ``None`` for as many as there are."""
        if self.max_gap is None or self._step is None or not prompts:
            return None
        return max(1, int(self.max_gap * DECODING / self._step))

    def seconds(self, most: int) -> float | None:
        """Time for prompts before the next launch of at most so many steps; ``None`` for a chunk."""
        if self.max_gap is None:
            return None
        steps = min(most, self.steps(prompts=True) or most)
        return max(0.0, self.max_gap - steps * (self._step or 0.0))

    @contextlib.contextmanager
    def measured(self) -> Iterator[list[int]]:
        """Measure a launch; its number of steps is to be put into the list."""
        counts: list[int] = []
        begin = time.perf_counter()
        yield counts
        if counts:
            took = (time.perf_counter() - begin) / max(1, counts[0])
            self._step = took if self._step is None else self._step + WEIGHT * (took - self._step)
