"""``full``: nothing is dropped while a sequence fits its cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snapstream.compression.policies.streaming import Streaming


@dataclass(frozen=True)
class Full(Streaming):
    """Keeps everything that fits; otherwise, sinks and recent tokens."""

    name: ClassVar[str] = "full"
