"""Sessions on disk: those that do not fit in memory, and all of them across a restart."""

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
"""Maximum number of sessions that wait to be written; if the disk is too slow, the oldest is lost."""


class SessionFiles:
    """Files of sessions, limited to a number of bytes; the least recently used one is deleted first.

    Files contain the text of conversations, and only their owner can read them. They contain no names of sessions or
    API keys, only a digest of both. Files are written in a thread; :meth:`take` may be called from any thread.

    Args:
        directory: Directory of the files; created if it does not exist.
        max_bytes: Maximum size of all files.
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
            raise ConfigurationError(f"the session directory {directory} cannot be created: {error}") from error
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigurationError(f"the session directory {directory} cannot be written to")
        self._unwritten: dict[Key, tuple[Session, float]] = {}
        self._writing: Key | None = None
        self._deleted = False  # whether the session that is being written was deleted
        self._closed = False
        self._lock = threading.Lock()
        self._writer = ThreadPoolExecutor(1, "session-files")
        for left_behind in directory.glob(f".*{_SUFFIX}.*"):  # by a process that was killed while writing
            left_behind.unlink(missing_ok=True)
        self.sweep()

    def put(self, key: Key, session: Session, idle: float = 0.0) -> None:
        """Queue a session, which was last used ``idle`` seconds ago, to be written."""
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
        """Load the session of a key, if it exists and belongs to this engine's model.

        Its file stays. If the next turn is interrupted or the server is killed, the session continues from it.
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
            logger.warning("a saved session cannot be continued: %s", error)
            if not isinstance(error.__cause__, OSError):  # otherwise the disk failed; the file may be intact
                path.unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:  # for example too little memory
            logger.warning("a saved session cannot be read now: %s", error)
        return None

    def delete(self, key: Key) -> bool:
        """Delete a session; returns whether it existed."""
        with self._lock:
            waiting = self._unwritten.pop(key, None)
            self._deleted = self._deleted or self._writing == key
        path = self._path(key)
        there = path.exists()
        path.unlink(missing_ok=True)
        return there or waiting is not None

    def sweep(self) -> None:
        """Delete expired files, and the oldest ones until the rest fits."""
        try:
            files = sorted((path.stat().st_mtime, path.stat().st_size, path) for path in self._paths())
            total = sum(size for _, size, _ in files)
            for used, size, path in files:
                if total > self.max_bytes or time.time() - used > self.seconds:
                    path.unlink(missing_ok=True)
                    total -= size
        except OSError as error:  # deleted by another process, or a disk failure; the next sweep tries again
            logger.warning("the session directory could not be swept: %s", error)

    def flush(self) -> None:
        """Wait until everything is written."""
        self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write all queued sessions, and end the thread."""
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
                    "a session of %d bytes is lost: the limit for files is %d", session.saved.nbytes, self.max_bytes
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
