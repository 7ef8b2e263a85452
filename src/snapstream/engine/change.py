"""Around everything that changes an engine: what breaks off is noticed, and mended."""

from __future__ import annotations

import logging
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from snapstream.engine.engine import Engine

logger = logging.getLogger(__name__)


class Change:
    """Around everything that changes requests, slots or the device.

    What breaks off in between leaves the engine marked as changing. It is mended at once if that is possible, and in
    any case before the next change. A generator would be less code, but may be closed at any later moment.
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
        except Exception as another:  # the first one is what the caller has to know
            logger.error("the engine could not be mended after %s", kind.__name__, exc_info=another)
