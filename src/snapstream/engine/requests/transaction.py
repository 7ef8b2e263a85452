"""Guards every change to an engine: interrupted changes are detected and undone as far as they can be."""

from __future__ import annotations

import logging
from collections.abc import Callable
from types import TracebackType

logger = logging.getLogger(__name__)


class Transaction:
    """Context manager around everything that changes requests, slots or the device.

    An exception inside leaves the host's state and the device's apart, so nothing that was running can be trusted. What
    is restored, at once if possible and in any case before the next change:

    ==========================  ===============================================
    what                        state afterwards
    ==========================  ===============================================
    waiting requests            as they were, in the same order
    being prefilled or decoded  ended with an error that says why, each once
    outputs that were ready     still to be returned
    slots                       free
    ==========================  ===============================================

    A generator-based context manager would be less code, but it may be closed at any later moment.

    Attributes:
        is_open: Whether a change is in progress, or was interrupted and nothing has been restored yet.
    """

    def __init__(self, restore: Callable[[str], None]) -> None:
        """Create it.

        Args:
            restore: Restores the state, given the name of the exception's class. It may be interrupted as well, and is
                then called again.
        """
        self.is_open = False
        self._restore, self._broken_by = restore, ""

    def mend(self) -> None:
        """Restore the state if the last change was interrupted."""
        if self.is_open:
            self._restore(self._broken_by or "unknown")
            self.is_open, self._broken_by = False, ""

    def __enter__(self) -> None:
        self.mend()
        self.is_open = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.is_open = False
            return
        self._broken_by = kind.__name__
        try:
            self.mend()
        except Exception as another:  # the caller needs to see the first exception
            logger.error("the engine could not be repaired after %s", kind.__name__, exc_info=another)
