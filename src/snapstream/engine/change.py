"""Guards every change to an engine: interrupted changes are detected and repaired."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snapstream.engine.engine import Engine

logger = logging.getLogger(__name__)


class Change:
    """Context manager around everything that changes requests, slots or the device.

    An exception inside leaves the engine marked as changing. The engine is then repaired at once if possible, and in
    any case before the next change. A generator-based context manager would be less code, but it may be closed at any
    later moment.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __enter__(self) -> None:
        self.engine._mend()
        self.engine._changing = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.engine._changing = False
            return
        self.engine._broken_by = kind.__name__
        try:
            self.engine._mend()
        except Exception as another:  # the caller needs to see the first exception
            logger.error("the engine could not be repaired after %s", kind.__name__, exc_info=another)
