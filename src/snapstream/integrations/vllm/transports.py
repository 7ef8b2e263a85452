"""Transports of payloads between instances: a directory on one host, or TCP.

The instances trust each other, but not the clients. A client's request can only select among the configured sources and
among payloads with random names. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path

from typing_extensions import override

from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm.payload import PayloadError

_NAME = re.compile(r"[0-9a-f]{32}-[0-9]{1,4}-[0-9]{1,4}")
KEEP, LIMIT = 120.0, 8.0
"""Defaults: seconds for which a payload is kept, and maximum size of the payloads kept by one rank, in GiB."""
PATIENCE = 20.0
"""Timeout for the other side, in seconds."""


class Transport(ABC):
    """Stores and fetches payloads by name: 32 hexadecimal digits, the sending and the receiving rank, with hyphens."""

    @abstractmethod
    def announce(self, name: str) -> None:
        """Announce a payload that will be published soon; a fetch of it then waits."""

    @abstractmethod
    def publish(self, name: str, payload: bytes) -> None:
        """Keep a payload until it is fetched, or until it is too old."""

    @abstractmethod
    def fetch(self, source: str, rank: int, name: str, most: int) -> bytes:
        """Fetch a payload, which the other side then drops.

        Args:
            source: Source of the other side, as reported by it.
            rank: Rank that has published the payload.
            name: Name of the payload.
            most: Maximum size to accept, in bytes.

        Raises:
            PayloadError: The payload is not available, too large or damaged.
            OSError: The other side cannot be reached.
        """

    @abstractmethod
    def drop(self, name: str) -> None:
        """Drop a payload that was published here, if it still exists."""

    def sweep(self) -> None:  # noqa: B027 (optional)
        """Drop payloads that are too old; called periodically."""

    def close(self) -> None:  # noqa: B027
        """Release all resources."""


class DirectoryTransport(Transport):
    """Files in a directory that both sides can access, preferably in memory (``/dev/shm/...``).

    Files appear atomically. Every process that uses the directory removes old files, including those of processes that
    have ended.
    """

    def __init__(
        self, directory: Path, *, keep: float = KEEP, limit: float = LIMIT, patience: float = PATIENCE
    ) -> None:
        self.directory, self.keep, self.limit, self.patience = directory, keep, int(limit * 2**30), patience
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            (directory / f".{os.getpid()}").touch()
            (directory / f".{os.getpid()}").unlink()
        except OSError as error:
            raise ConfigurationError(f"the directory for KV transfer cannot be used: {error}") from error
        self._swept = 0.0
        self.sweep()

    @override
    def announce(self, name: str) -> None:
        # An empty hidden file, which publish() fills and renames.
        (self.directory / f".{_check_name(name)}").touch()

    @override
    def publish(self, name: str, payload: bytes) -> None:
        """Write a file; above the size limit, the oldest files are removed."""
        _check_name(name)
        fresh = self.directory / f".{name}"
        try:
            fresh.write_bytes(payload)
            fresh.replace(self.directory / name)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        self._make_room()

    @override
    def fetch(self, source: str, rank: int, name: str, most: int) -> bytes:
        path, fresh = self.directory / _check_name(name), self.directory / f".{name}"
        deadline = time.monotonic() + self.patience
        while fresh.exists() and not path.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        try:
            size = path.stat().st_size
            if size > most:
                raise PayloadError(f"it has {size} bytes, more than {most}")
            payload = path.read_bytes()
        except FileNotFoundError as error:
            raise PayloadError("it is not available (any more)") from error
        path.unlink(missing_ok=True)
        return payload

    @override
    def drop(self, name: str) -> None:
        for each in (f".{_check_name(name)}", name):
            (self.directory / each).unlink(missing_ok=True)

    @override
    def sweep(self) -> None:
        """Remove old files; does nothing if the last sweep was only seconds ago."""
        now = time.time()
        if now - self._swept < min(5.0, self.keep / 4):
            return
        self._swept = now
        for path, written, _ in self._files():
            if now - written > self.keep:
                path.unlink(missing_ok=True)

    def _make_room(self) -> None:
        files = self._files()
        used = sum(size for _, _, size in files)
        for path, _, size in sorted(files, key=lambda file: file[1]):
            if used <= self.limit:
                break
            path.unlink(missing_ok=True)
            used -= size

    def _files(self) -> list[tuple[Path, float, int]]:
        found = []
        for path in self.directory.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another process was faster
                if _NAME.fullmatch(path.name.removeprefix(".")):
                    state = path.stat()
                    found.append((path, state.st_mtime, state.st_size))
        return found


class PayloadStore:
    """Payloads in the memory of this process, with limits on their age and total size.

    Args:
        keep: Seconds for which a payload is kept.
        limit: Maximum size of all payloads, in GiB.
    """

    def __init__(self, *, keep: float, limit: float) -> None:
        self.keep, self.limit = keep, int(limit * 2**30)
        self._payloads: dict[str, tuple[float, bytes]] = {}  # oldest first
        self._announced: set[str] = set()
        self._lock = threading.Condition()

    def announce(self, name: str) -> None:
        """Announce a payload; :meth:`get` then waits for it."""
        with self._lock:
            self._announced.add(_check_name(name))

    def put(self, name: str, payload: bytes) -> None:
        """Keep a payload; above the size limit, the oldest ones are dropped."""
        with self._lock:
            self._announced.discard(name)
            self._payloads[_check_name(name)] = time.monotonic(), payload
            self._forget(time.monotonic())
            self._lock.notify_all()

    def get(self, name: str, patience: float = 0.0) -> bytes | None:
        """Return a payload, or ``None``; waits up to ``patience`` seconds for an announced one."""
        with self._lock:
            self._lock.wait_for(lambda: name not in self._announced, patience)
            self._forget(time.monotonic())
            found = self._payloads.get(name)
        return None if found is None else found[1]

    def drop(self, name: str) -> None:
        """Drop a payload, even if it was only announced."""
        with self._lock:
            self._announced.discard(name)
            self._payloads.pop(name, None)
            self._lock.notify_all()

    def sweep(self) -> None:
        """Drop payloads that are too old."""
        with self._lock:
            self._forget(time.monotonic())

    def __len__(self) -> int:
        return len(self._payloads)

    def _forget(self, now: float) -> None:
        used = sum(len(payload) for _, payload in self._payloads.values())
        for name, (put, payload) in list(self._payloads.items()):
            if now - put <= self.keep and used <= self.limit:
                break
            del self._payloads[name]
            used -= len(payload)


def _check_name(name: str) -> str:
    """Return ``name`` if it is a valid name of a payload.

    Raises:
        PayloadError: It is not.
    """
    if not _NAME.fullmatch(name):
        raise PayloadError(f"{name!r} is not the name of a payload")
    return name
