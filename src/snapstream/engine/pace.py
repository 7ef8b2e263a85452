"""How the time of an engine's step is shared between prefill and decoding."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

WEIGHT = 0.25
"""Weight of the last launch in the average time of a decode step."""
DECODING = 0.5
"""Largest share of the time that decoding takes, as long as a step of it fits."""


class Pace:
    """Aims at a longest time between two launches, in which running sequences get their tokens.

    It predicts launches from those before, which must have been done when their calls returned, as on a CPU. A step
    takes longer where a single layer of a chunk does, or where the batch has just grown.

    Args:
        max_gap: The target in seconds; ``None`` for none: a step is a chunk through all layers, and a whole launch.
    """

    def __init__(self, max_gap: float | None) -> None:
        self.max_gap = max_gap
        self._step: float | None = None  # seconds, on average

    def steps(self, *, prompts: bool) -> int | None:
        """Most decode steps of the next launch; ``None`` for as many as the launch has."""
        if self.max_gap is None or self._step is None:
            return None
        return max(1, int(self.max_gap * (DECODING if prompts else 1.0) / self._step))

    def seconds(self, most: int) -> float | None:
        """Seconds for prefill before the next launch of at most so many steps; ``None`` for a whole chunk."""
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
