"""Contexts on a disk: all of them, so that a restart finds them again."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from snapstream.cache import CompressedSequence
from snapstream.engine import LLM, Context
from snapstream.errors import CacheFileError, ConfigurationError
from snapstream.serving.contexts import StoredContext

logger = logging.getLogger(__name__)

_SUFFIX = ".context.safetensors"


class ContextFiles:
    """Files of contexts, up to a number of bytes; the one not asked for the longest time goes first.

    A file holds the tokens of its text, and is readable by its owner alone. Of keys it has a digest. Files of other
    models are left alone.

    Args:
        directory: Made if it is not there.
        max_bytes: Of all files of this model.
        llm: Saves and loads caches.

    Raises:
        ConfigurationError: The directory cannot be written to.
    """

    def __init__(self, directory: Path, max_bytes: int, llm: LLM) -> None:
        self.directory, self.max_bytes, self.llm = directory, max_bytes, llm
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"the context directory {directory} cannot be made: {error}") from error
        if not os.access(directory, os.W_OK | os.X_OK):
            raise ConfigurationError(f"the context directory {directory} cannot be written to")
        for left_behind in directory.glob(f".*{_SUFFIX}.*"):  # of a process that was killed while it wrote
            left_behind.unlink(missing_ok=True)

    def find(self) -> list[StoredContext]:
        """Contexts of this model that are there, without reading them."""
        return list(self._find())

    def write(self, stored: StoredContext, context: Context) -> list[str]:
        """Write a context, and say so in ``stored``; returns the ids of those whose files had to make room."""
        said = {"id": stored.id, "owner": stored.owner, "name": stored.name, "created": stored.created}
        note = context.note(**said, nbytes=stored.nbytes)
        try:
            self.llm.engine.files.save(context.sequence, self._path(stored.id), note=note)
        except CacheFileError as error:
            logger.warning("a context is in memory only: %s", error)
            return []
        stored.on_disk = True
        return self._sweep(stored.id)

    def read(self, stored: StoredContext) -> Context:
        """A context as it was written.

        Raises:
            CacheFileError: It is not there any more, or damaged.
        """
        path = self._path(stored.id)
        context = self.llm.load_context(path)
        os.utime(path)
        return context

    def delete(self, name: str) -> None:
        """Delete a context's file, if it has one."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self.directory / f"{name}{_SUFFIX}"

    def _find(self) -> Iterator[StoredContext]:
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
                    entries=int(described["layout"]["count"]),
                    nbytes=int(note["nbytes"]),
                    chat=bool(note["chat"]),
                    on_disk=True,
                )
            except (CacheFileError, LookupError, TypeError, ValueError) as error:
                logger.warning("%s is not taken for a context: %s", path, error)
                continue
            if path == self._path(stored.id):
                yield stored

    def _sweep(self, newest: str) -> list[str]:
        """Delete the oldest files until the rest fits; returns whose they were."""
        gone: list[str] = []
        try:
            mine = {stored.id for stored in self._find()}
            files = [(path.stat().st_mtime, path.stat().st_size, name) for name in mine if (path := self._path(name))]
            total = sum(size for _, size, _ in files)
            for _, size, name in sorted(files):
                if total <= self.max_bytes:
                    break
                if name != newest or len(files) == len(gone) + 1:
                    self.delete(name)
                    gone.append(name)
                    total -= size
        except OSError as error:  # somebody else's deletion, or the disk's trouble; there will be a next time
            logger.warning("the context directory could not be swept: %s", error)
        return gone
