"""How long torch's threads wait awake for each other."""

from __future__ import annotations

import os
import sys

SPINS = "1000"
"""Turns of a waiting loop before a thread sleeps: some microseconds. GNU OpenMP takes as many by itself once it knows
that it has more threads than cores, but it does not know of other processes."""


def sleep_while_waiting() -> None:
    """Let torch's threads sleep soon when they wait for each other, where this is not too late or set otherwise.

    By default they stay awake for milliseconds. On a core that another process wants, too, a thread so uses up its time
    by waiting, and has none left when there is work: beside one busy process a prompt then takes six times as long,
    not twice. GNU OpenMP reads the setting when torch is loaded, so whoever loads torch first keeps its default.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
