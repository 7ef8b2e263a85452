"""The plugin's counters on vLLM's ``/metrics``.

They are counted by the scheduler, in the engine core's process, and vLLM sends nothing of ours back to the process
that answers ``/metrics``. So each engine core writes its counters to a small file, and the other side reads the files
when it is asked. The directory travels in the environment, as vLLM's own for several API servers does.
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
    ("snapstream_tokens_dropped", "Prompt tokens left out of compressed caches."),
    ("snapstream_blocks_released", "KV blocks given back to the pool by compression."),
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
        """Publish the counters' values, if they have changed."""
        if self._path is None or tuple(values) == self._written:
            return
        self._written = tuple(values)
        try:
            # Less than a page and replaced as a whole: a reader sees the old numbers or the new ones.
            fresh = self._path.with_name(f".{self._path.name}")
            fresh.write_bytes(_FORMAT.pack(*values))
            fresh.replace(self._path)
        except OSError:
            self._path = None  # counters are not worth an engine


class CounterReader:
    """A collector for prometheus_client: reads the files when ``/metrics`` is asked."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def collect(self) -> Iterator[Any]:
        """The counters of all engines, labelled ``engine`` as vLLM's own are."""
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
    """In the process that answers ``/metrics``: open a directory for the engines to come, and report from it."""
    from prometheus_client import REGISTRY

    directory = Path(tempfile.mkdtemp(prefix="snapstream-"))
    os.environ[DIRECTORY] = str(directory)
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    for collector in list(REGISTRY._collector_to_names):
        if isinstance(collector, CounterReader):  # of an engine before this one
            REGISTRY.unregister(collector)
    REGISTRY.register(CounterReader(directory))  # type: ignore[arg-type, unused-ignore]
