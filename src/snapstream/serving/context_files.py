"""Contexts on disk, which survive a restart of the server."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from snapstream.cache import CompressedSequence
from snapstream.engine import LLM, Context
from snapstream.errors import CacheFileError, ConfigurationError
from snapstream.serving.contexts import StoredContext

logger = logging.getLogger(__name__)

_SUFFIX = ".context.safetensors"


class ContextFiles:
    """Files of contexts, limited to a number of bytes.

    A file contains the tokens of its text and a digest of the API key, and only its owner can read it. Files of other
    models are never touched.

    Args:
        directory: Directory of the files; created if it does not exist.
        max_bytes: Maximum size of all files of this model.
        llm: Saves and loads caches.

    Raises:
        ConfigurationError: The directory cannot be written to.
    """

    def __init__(self, directory: Path, max_bytes: int, llm: LLM) -> None:
        self.directory, self.max_bytes, self.llm = directory, max_bytes, llm
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"the context directory {directory} cannot be created: {error}") from error
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigurationError(f"the context directory {directory} cannot be written to")
        for left_behind in directory.glob(f".*{_SUFFIX}.*"):  # by a process that was killed while writing
            left_behind.unlink(missing_ok=True)

    def find(self) -> list[tuple[StoredContext, float]]:
        """The stored contexts of this model, without loading them, and for how many seconds each was not used."""
        return list(self._find())

    def write(self, stored: StoredContext, context: Context, oldest: Sequence[str]) -> list[str]:
        """Write a context to a file, and mark it in ``stored``.

        If this fails, the context stays in memory only, and the log says why.

        Args:
            stored: The context's description.
            context: The context.
            oldest: Ids of all contexts, in the order in which their files are evicted.

        Returns:
            Ids of contexts whose files were evicted.
        """
        if stored.nbytes > self.max_bytes:
            logger.warning(
                "a context of %d bytes is in memory only: the limit for files is %d", stored.nbytes, self.max_bytes
            )
            return []
        said = {"id": stored.id, "owner": stored.owner, "name": stored.name, "created": stored.created}
        note = context.note(**said, nbytes=stored.nbytes)
        try:
            self.llm.engine.files.save(context.sequence, self._path(stored.id), note=note)
        except CacheFileError as error:
            logger.warning("a context is in memory only: %s", error)
            return []
        stored.on_disk = True
        return self._sweep([name for name in oldest if name != stored.id], stored.id)

    def read(self, stored: StoredContext) -> Context:
        """Load a context.

        Raises:
            CacheFileError: The file no longer exists, or is corrupt.
        """
        return self.llm.load_context(self._path(stored.id))

    def touch(self, idle: Mapping[str, float]) -> None:
        """Store for how many seconds each context was not used, by id."""
        for name, seconds in idle.items():
            with contextlib.suppress(OSError):
                os.utime(self._path(name), (time.time() - seconds,) * 2)

    def delete(self, name: str) -> None:
        """Delete a context's file, if it has one."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}{_SUFFIX}"

    def _find(self) -> Iterator[tuple[StoredContext, float]]:
        for path in sorted(self.directory.glob(f"*{_SUFFIX}")):
            try:
                described = CompressedSequence.describe(path)
                if described["model"] != self.llm.engine.files.model:
                    continue
                note = json.loads(described["note"])
                stored = StoredContext(
                    id=str(note["id"]),
                    owner=str(note["owner"]),
                    name=str(note["name"]),
                    created=float(note["created"]),
                    tokens=int(described["tokens"]),
                    entries=int(described["layouts"][0]["count"]),
                    nbytes=int(note["nbytes"]),
                    chat=note["opening"] is not None,
                    on_disk=True,
                )
                limit, engine = int(described["layouts"][0]["limit"]), self.llm.engine
                if (engine.spec.has_budget and limit > engine.budget.capacity) or stored.tokens >= engine.max_model_len:
                    raise ValueError(
                        f"it has up to {limit} entries and {stored.tokens} tokens, too many for this server"
                    )
                idle = time.time() - path.stat().st_mtime
            except (CacheFileError, LookupError, TypeError, ValueError, OSError) as error:
                logger.warning("%s is ignored as a context: %s", path, error)
                continue
            if path == self._path(stored.id):
                yield stored, idle

    def _sweep(self, oldest: Sequence[str], newest: str) -> list[str]:
        """Delete the oldest files until the rest fits; returns the ids of their contexts."""
        sizes, gone = {}, list[str]()
        for name in (*oldest, newest):
            with contextlib.suppress(OSError):  # it has no file
                sizes[name] = self._path(name).stat().st_size
        for name in oldest:
            if sum(sizes.values()) <= self.max_bytes:
                break
            if sizes.pop(name, None) is not None:
                self.delete(name)
                gone.append(name)
        return gone
