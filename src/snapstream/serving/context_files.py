"""Contexts on a disk: all of them, so that a restart finds them again."""

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
    """Files of contexts, up to a number of bytes.

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

    def find(self) -> list[tuple[StoredContext, float]]:
        """Contexts of this model that are there, without reading them, and for how many seconds nobody has asked."""
        return list(self._find())

    def write(self, stored: StoredContext, context: Context, oldest: Sequence[str]) -> list[str]:
        """Write a context, and say so in ``stored``.

        Args:
            stored: What clients are told of it.
            context: Itself.
            oldest: Ids of all contexts, in the order in which their files make room for it.

        Returns:
            Ids of those that had to.
        """
        if stored.nbytes > self.max_bytes:
            logger.warning("a context of %d bytes is in memory only: files may have %d", stored.nbytes, self.max_bytes)
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
        """A context as it was written.

        Raises:
            CacheFileError: It is not there any more, or damaged.
        """
        return self.llm.load_context(self._path(stored.id))

    def touch(self, idle: Mapping[str, float]) -> None:
        """Note for how many seconds nobody has asked, by id."""
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
                    entries=int(described["layout"]["count"]),
                    nbytes=int(note["nbytes"]),
                    chat=note["opening"] is not None,
                    on_disk=True,
                )
                limit, engine = int(described["layout"]["limit"]), self.llm.engine
                if limit > engine.budget.capacity or stored.tokens >= engine.max_model_len:
                    raise ValueError(f"it has up to {limit} entries after {stored.tokens} tokens, too many here")
                idle = time.time() - path.stat().st_mtime
            except (CacheFileError, LookupError, TypeError, ValueError, OSError) as error:
                logger.warning("%s is not taken for a context: %s", path, error)
                continue
            if path == self._path(stored.id):
                yield stored, idle

    def _sweep(self, oldest: Sequence[str], newest: str) -> list[str]:
        """Delete the oldest files until the rest fits; returns whose they were."""
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
