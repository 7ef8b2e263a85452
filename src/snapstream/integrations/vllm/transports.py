"""How parcels get from one instance to another: through a directory of one host, or over TCP.

Both sides are trusted by the one who starts them, not by those who send requests: what a client says chooses among the
places that this instance was told of, and among names that are random. Nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from abc import ABC, abstractmethod
from pathlib import Path

from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm.parcel import ParcelError

_NAME = re.compile(r"[0-9a-f]{32}-[0-9]{1,4}-[0-9]{1,4}")
KEEP, LIMIT = 120.0, 8.0
"""Seconds for which a parcel is kept, and GiB of all that are kept by one rank, unless said otherwise."""
PATIENCE = 20.0
"""Seconds to wait for the other side to say something."""


class Transport(ABC):
    """Parcels by name: 32 hexadecimal digits, and the ranks that it is from and for, all with hyphens."""

    @abstractmethod
    def announce(self, name: str) -> None:
        """Say that a parcel is about to be published: whoever asks for it waits."""

    @abstractmethod
    def publish(self, name: str, parcel: bytes) -> None:
        """Keep a parcel until it is fetched, or for some time."""

    @abstractmethod
    def fetch(self, source: str, rank: int, name: str, most: int) -> bytes:
        """Fetch a parcel, which is then forgotten on the other side.

        Args:
            source: Where the other side is, as it says itself.
            rank: The one that has published it there.
            name: Of the parcel.
            most: More bytes are not accepted.

        Raises:
            ParcelError: It is not there, or too large, or damaged.
            OSError: The other side cannot be reached.
        """

    @abstractmethod
    def drop(self, name: str) -> None:
        """Forget a parcel that was published here, if it is still there."""

    def sweep(self) -> None:  # noqa: B027 (not all have something to do)
        """Forget what was kept for too long; called now and then."""

    def close(self) -> None:  # noqa: B027
        """Give up what is held."""


class DirectoryTransport(Transport):
    """Files in a directory that both sides see, best in memory (``/dev/shm/...``).

    A file appears with all of its bytes or not at all. Whoever uses the directory removes what is too old, also files
    of a process that is no more.
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
            raise ConfigurationError(f"the directory for caches on their way cannot be used: {error}") from error
        self._swept = 0.0
        self.sweep()

    def announce(self, name: str) -> None:
        """Make a file of another name, which will be renamed."""
        (self.directory / f".{_check_name(name)}").touch()

    def publish(self, name: str, parcel: bytes) -> None:
        """Write a file; if there are too many bytes, the oldest files go."""
        _check_name(name)
        fresh = self.directory / f".{name}"
        try:
            fresh.write_bytes(parcel)
            fresh.replace(self.directory / name)
        except OSError:
            fresh.unlink(missing_ok=True)
            raise
        self._make_room()

    def fetch(self, source: str, rank: int, name: str, most: int) -> bytes:
        """Read a file and remove it."""
        path, fresh = self.directory / _check_name(name), self.directory / f".{name}"
        deadline = time.monotonic() + self.patience
        while fresh.exists() and not path.exists() and time.monotonic() < deadline:
            time.sleep(0.005)
        try:
            size = path.stat().st_size
            if size > most:
                raise ParcelError(f"it has {size} bytes, more than {most}")
            parcel = path.read_bytes()
        except FileNotFoundError as error:
            raise ParcelError("it is not there (any more)") from error
        path.unlink(missing_ok=True)
        return parcel

    def drop(self, name: str) -> None:
        """Remove a file."""
        for each in (f".{_check_name(name)}", name):
            (self.directory / each).unlink(missing_ok=True)

    def sweep(self) -> None:
        """Remove old files, at most once in a while."""
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
            with contextlib.suppress(FileNotFoundError):  # somebody was faster
                if _NAME.fullmatch(path.name.removeprefix(".")):
                    state = path.stat()
                    found.append((path, state.st_mtime, state.st_size))
        return found


class Shelf:
    """Parcels in the memory of this process, each until it is taken, for some time, up to so many bytes."""

    def __init__(self, *, keep: float, limit: float) -> None:
        self.keep, self.limit = keep, int(limit * 2**30)
        self._parcels: dict[str, tuple[float, bytes]] = {}  # oldest first
        self._announced: set[str] = set()
        self._lock = threading.Condition()

    def announce(self, name: str) -> None:
        """A parcel will come: who asks for it waits."""
        with self._lock:
            self._announced.add(_check_name(name))

    def put(self, name: str, parcel: bytes) -> None:
        """Keep a parcel; if there are too many bytes, the oldest ones go."""
        with self._lock:
            self._announced.discard(name)
            self._parcels[_check_name(name)] = time.monotonic(), parcel
            self._forget(time.monotonic())
            self._lock.notify_all()

    def get(self, name: str, patience: float = 0.0) -> bytes | None:
        """Look at a parcel; wait for one that was announced."""
        with self._lock:
            self._lock.wait_for(lambda: name not in self._announced, patience)
            self._forget(time.monotonic())
            found = self._parcels.get(name)
        return None if found is None else found[1]

    def drop(self, name: str) -> None:
        """Forget a parcel, also one that was only announced."""
        with self._lock:
            self._announced.discard(name)
            self._parcels.pop(name, None)
            self._lock.notify_all()

    def sweep(self) -> None:
        """Forget what is too old."""
        with self._lock:
            self._forget(time.monotonic())

    def __len__(self) -> int:
        return len(self._parcels)

    def _forget(self, now: float) -> None:
        used = sum(len(parcel) for _, parcel in self._parcels.values())
        for name, (put, parcel) in list(self._parcels.items()):
            if now - put <= self.keep and used <= self.limit:
                break
            del self._parcels[name]
            used -= len(parcel)


def _check_name(name: str) -> str:
    """A name that can be nothing but that of a parcel."""
    if not _NAME.fullmatch(name):
        raise ParcelError(f"{name!r} is not the name of a parcel")
    return name
