"""Limits how long torch's threads spin when they wait for each other."""

from __future__ import annotations

import os
import sys

SPINS = "1000"
"""Iterations of the wait loop before a thread sleeps, which take some microseconds. GNU OpenMP uses the same number if
it has more threads than cores, but it does not know about other processes."""


def sleep_while_waiting() -> None:
    """Make torch's threads sleep soon when they wait for each other, unless torch is loaded or the user has set this.

    By default they spin for milliseconds. On a core that another process also needs, a spinning thread uses up its time
    slice and has none left when there is work. Next to one busy process, a prompt then takes six times as long instead
    of twice. GNU OpenMP reads the setting when torch is loaded, so the default remains if torch was imported before.
    """
    if "torch" not in sys.modules and "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
