"""Sessions on a disk: what has no room in memory any more, and what a restart finds again."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from snapstream.engine.engine import Engine
from snapstream.errors import CacheFileError, ConfigurationError
from snapstream.serving.sessions import Key, Session

logger = logging.getLogger(__name__)

_SUFFIX = ".session.safetensors"
_MOST_UNWRITTEN = 4
"""Sessions that may wait to be written; a disk that is slower than that loses the oldest."""


class SessionFiles:
    """Files of sessions, up to a number of bytes; the one not used for the longest time goes first.

    Names of sessions and keys of clients are not written, only a digest of both. The text of a conversation is, and
    files are readable by their owner alone. Writing happens in a thread; :meth:`take` may be called from any.

    Args:
        directory: Made if it is not there.
        max_bytes: Of all files.
        seconds: How long a session is kept after its last turn.
        engine: Saves and loads caches.

    Raises:
        ConfigurationError: The directory cannot be written to.
    """

    def __init__(self, directory: Path, max_bytes: int, seconds: float, engine: Engine) -> None:
        self.directory, self.max_bytes, self.seconds, self.engine = directory, max_bytes, seconds, engine
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"the session directory {directory} cannot be made: {error}") from error
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigurationError(f"the session directory {directory} cannot be written to")
        self._unwritten: dict[Key, tuple[Session, float]] = {}
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "session-files")
        for left_behind in directory.glob(f".*{_SUFFIX}.*"):  # of a process that was killed while it wrote
            left_behind.unlink(missing_ok=True)
        self.sweep()

    def put(self, key: Key, session: Session, idle: float = 0.0) -> None:
        """Write a session, which was used ``idle`` seconds ago, as soon as the disk has time."""
        with self._lock:
            self._unwritten.pop(key, None)
            self._unwritten[key] = session, time.time() - idle
            while len(self._unwritten) > _MOST_UNWRITTEN:
                self._unwritten.pop(next(iter(self._unwritten)))
                logger.warning("a session is lost: the disk of %s is too slow", self.directory)
        self._writer.submit(self._write, key)

    def take(self, key: Key) -> Session | None:
        """What was put under a key, if it is still there and of this engine's model. Its file stays, as an older state.

        A turn that breaks off, or a server that is killed in it, goes on from there.
        """
        with self._lock:
            waiting = self._unwritten.pop(key, None)
        if waiting is not None:
            return waiting[0]
        path = self._path(key)
        try:
            if time.time() - path.stat().st_mtime > self.seconds:
                path.unlink()
                return None
            saved = self.engine.files.load(path)
            text = json.loads(saved.note)["text"]
        except FileNotFoundError:
            return None
        except (CacheFileError, OSError, ValueError, LookupError) as error:
            logger.warning("a saved session is dropped: %s", error)
            path.unlink(missing_ok=True)
            return None
        return Session(saved, text)

    def delete(self, key: Key) -> bool:
        """Forget a session; whether there was one."""
        with self._lock:
            waiting = self._unwritten.pop(key, None)
        path = self._path(key)
        there = path.exists()
        path.unlink(missing_ok=True)
        return there or waiting is not None

    def sweep(self) -> None:
        """Delete what has been kept for too long, and the oldest until the rest fits."""
        files = []
        for path in self.directory.glob(f"*{_SUFFIX}"):
            try:
                stat = path.stat()
            except FileNotFoundError:
                continue
            if time.time() - stat.st_mtime > self.seconds:
                path.unlink(missing_ok=True)
            else:
                files.append((stat.st_mtime, stat.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if total <= self.max_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size

    @property
    def bytes(self) -> int:
        """Size of all files."""
        total = 0
        for path in self.directory.glob(f"*{_SUFFIX}"):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
        return total

    def flush(self) -> None:
        """Wait until everything is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write what waits, and end the thread."""
        self._writer.shutdown(wait=True)

    def _path(self, key: Key) -> Path:
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        return self.directory / f"{digest}{_SUFFIX}"

    def _write(self, key: Key) -> None:
        with self._lock:
            waiting = self._unwritten.get(key)
        if waiting is None:  # taken again, or lost
            return
        session, used = waiting
        path = self._path(key)
        try:
            if session.saved.nbytes <= self.max_bytes:
                self.engine.files.save(session.saved, path, note=json.dumps({"text": session.text}))
                os.utime(path, (used, used))
            self.sweep()
        except (CacheFileError, OSError) as error:
            logger.warning("a session is lost: %s", error)
        with self._lock:
            if self._unwritten.get(key) is waiting:
                del self._unwritten[key]
