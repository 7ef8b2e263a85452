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
        self._writing: Key | None = None
        self._deleted = False  # what is being written
        self._closed = False
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "session-files")
        for left_behind in directory.glob(f".*{_SUFFIX}.*"):  # of a process that was killed while it wrote
            left_behind.unlink(missing_ok=True)
        self.sweep()

    def put(self, key: Key, session: Session, idle: float = 0.0) -> None:
        """Write a session, which was used ``idle`` seconds ago, as soon as the disk has time."""
        with self._lock:
            if self._closed:
                return
            self._unwritten.pop(key, None)
            self._unwritten[key] = session, time.time() - idle
            waiting = [one for one in self._unwritten if one != self._writing]
            if len(waiting) > _MOST_UNWRITTEN:
                del self._unwritten[waiting[0]]
                logger.warning("a session is lost: the disk of %s is too slow", self.directory)
            self._writer.submit(self._write, key)

    def take(self, key: Key) -> Session | None:
        """What was put under a key, if it is still there and of this engine's model; its file stays, as an older state.

        A turn that breaks off, or a server that is killed in it, goes on from there.
        """
        with self._lock:
            waiting = self._unwritten.get(key)
        if waiting is not None:
            return waiting[0]
        path = self._path(key)
        try:
            if time.time() - path.stat().st_mtime <= self.seconds:
                saved = self.engine.files.load(path)
                return Session(saved, json.loads(saved.note)["text"])
            path.unlink()
        except FileNotFoundError:
            pass
        except (CacheFileError, ValueError, LookupError, TypeError) as error:
            logger.warning("a saved session cannot be gone on with: %s", error)
            if not isinstance(error.__cause__, OSError):  # that is the disk's trouble, not the file's
                path.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:  # such as too little memory
            logger.warning("a saved session cannot be read now: %s", error)
        return None

    def delete(self, key: Key) -> bool:
        """Forget a session; whether there was one."""
        with self._lock:
            waiting = self._unwritten.pop(key, None)
            self._deleted = self._deleted or self._writing == key
        path = self._path(key)
        there = path.exists()
        path.unlink(missing_ok=True)
        return there or waiting is not None

    def sweep(self) -> None:
        """Delete what has been kept for too long, and the oldest until the rest fits."""
        try:
            files = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in self._paths())
            total = sum(size for _, size, _ in files)
            for used, size, path in files:
                if total > self.max_bytes or time.time() - used > self.seconds:
                    path.unlink(missing_ok=True)
                    total -= size
        except OSError as error:  # somebody else's deletion, or the disk's trouble; there will be a next time
            logger.warning("the session directory could not be swept: %s", error)

    def flush(self) -> None:
        """Wait until everything is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write what waits, and end the thread."""
        with self._lock:
            self._closed = True
        self._writer.shutdown(wait=True)

    def _paths(self) -> list[Path]:
        return list(self.directory.glob(f"*{_SUFFIX}"))

    def _path(self, key: Key) -> Path:
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        return self.directory / f"{digest}{_SUFFIX}"

    def _write(self, key: Key) -> None:
        with self._lock:
            waiting = self._unwritten.get(key)
            if waiting is None:  # deleted, or lost
                return
            self._writing, self._deleted = key, False
        session, used = waiting
        path = self._path(key)
        try:
            if session.saved.nbytes > self.max_bytes:
                logger.warning(
                    "a session of %d bytes is lost: the directory may have %d", session.saved.nbytes, self.max_bytes
                )
            else:
                self.engine.files.save(session.saved, path, note=json.dumps({"text": session.text}))
                os.utime(path, (used, used))
            self.sweep()
        except Exception as error:
            logger.warning("a session is lost: %s", error)
        finally:
            with self._lock:
                if self._unwritten.get(key) is waiting:
                    del self._unwritten[key]
                if self._deleted:
                    path.unlink(missing_ok=True)
                self._writing = None
