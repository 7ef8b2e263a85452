"""The plugin's counters on vLLM's ``/metrics``.

The scheduler updates them in the engine core's process, and vLLM has no channel for them to the process that serves
``/metrics``. So each engine core writes its counters to a small file, and the server process reads the files on each
request. The directory is passed in an environment variable, as vLLM does for its own metrics of several API servers.
"""

from __future__ import annotations

import atexit
import os
import shutil
import struct
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

DIRECTORY = "SNAPSTREAM_METRICS_DIR"
COUNTERS = (
    ("snapstream_prompts_compressed", "Prompts that were compressed."),
    ("snapstream_tokens_dropped", "Prompt tokens dropped by compression."),
    ("snapstream_blocks_released", "KV blocks released to the pool by compression."),
)
_FORMAT = struct.Struct(f"<{len(COUNTERS)}q")


class CounterWriter:
    """The engine core's side: one file per data-parallel rank.

    Args:
        rank: Data-parallel rank.
    """

    def __init__(self, rank: int) -> None:
        directory = os.environ.get(DIRECTORY)
        self._path = Path(directory) / str(rank) if directory and Path(directory).is_dir() else None
        self._written: tuple[int, ...] | None = None

    def write(self, values: Sequence[int]) -> None:
        """Write the counters' values, if they have changed."""
        if self._path is None or tuple(values) == self._written:
            return
        self._written = tuple(values)
        try:
            # Replaced atomically: a reader sees either the old or the new values.
            fresh = self._path.with_name(f".{self._path.name}")
            fresh.write_bytes(_FORMAT.pack(*values))
            fresh.replace(self._path)
        except OSError:
            self._path = None  # failing counters must not stop an engine


class CounterReader:
    """A collector for prometheus_client that reads the files on each request of ``/metrics``."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def collect(self) -> Iterator[Any]:
        """The counters of all engines, with a label ``engine`` like vLLM's own metrics."""
        from prometheus_client.core import CounterMetricFamily

        families = [CounterMetricFamily(name, text, labels=["engine"]) for name, text in COUNTERS]
        for path in sorted(self.directory.glob("[0-9]*")):
            try:
                values = _FORMAT.unpack(path.read_bytes())
            except (OSError, struct.error):
                continue
            for family, value in zip(families, values, strict=True):
                family.add_metric([path.name], value)
        yield from families


def publish_counters() -> None:
    """In the process that serves ``/metrics``: create the directory that engines write to, and report from it."""
    from prometheus_client import REGISTRY

    directory = Path(tempfile.mkdtemp(prefix="snapstream-"))
    os.environ[DIRECTORY] = str(directory)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for collector in list(REGISTRY._collector_to_names):
        if isinstance(collector, CounterReader):  # from an earlier engine
            REGISTRY.unregister(collector)
    REGISTRY.register(CounterReader(directory))  # type: ignore[arg-type, unused-ignore]
