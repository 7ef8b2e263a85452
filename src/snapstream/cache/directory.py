"""Sequences on disk, limited to a number of bytes: the second place of a store."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import stat
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from snapstream.cache.compressed import CompressedSequence
from snapstream.errors import CacheFileError, ConfigurationError

logger = logging.getLogger(__name__)


class SequenceFiles(Protocol):
    """Saves and loads sequences of one model; called from any thread."""

    @property
    def model(self) -> str:
        """Fingerprint of the model, as it is written in files."""

    def save(self, sequence: CompressedSequence, path: str | Path, *, note: str = "") -> None:
        """Write a file; raises :class:`CacheFileError` if that is not possible."""

    def load(self, path: str | Path) -> CompressedSequence:
        """Read a file; raises :class:`CacheFileError` if it cannot be used."""

    def check(self, path: str | Path, described: Mapping[str, Any]) -> None:
        """Raises :class:`CacheFileError` if a file of this model, by its metadata, has no place in this engine."""


@dataclass(frozen=True)
class Found:
    """A file of a directory.

    Attributes:
        key: Its key.
        about: What its note says.
        tokens: Tokens of its sequence.
        entries: Entries per KV head of the layers with a budget.
        nbytes: Bytes it takes in memory; of older files, their size.
        used: When it was last used, in seconds since the epoch.
    """

    key: str
    about: dict[str, Any]
    tokens: int
    entries: int
    nbytes: int
    used: float


class SequenceDirectory:
    """Files of sequences, one per key, in a directory; only their owner can read them.

    Files of other models in the same directory are left alone, unless they have expired.
    """

    def __init__(
        self, path: Path, files: SequenceFiles, *, kind: str, max_bytes: int, seconds: float = math.inf
    ) -> None:
        """Open the directory.

        Args:
            path: The directory; created if it does not exist.
            files: Saves and loads sequences.
            kind: What the sequences are, for file names and messages; such as ``session``.
            max_bytes: Maximum size of all files of this model.
            seconds: How long an unused file is kept.

        Raises:
            ConfigurationError: The directory cannot be written to.
        """
        self.path, self.max_bytes, self.seconds, self._files = path, max_bytes, seconds, files
        self._kind, self._suffix = kind, f".{kind}.safetensors"
        self._ours: dict[str, bool] = {}  # whether files that nobody here has written belong to this model
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"the {kind} directory {path} cannot be created: {error}") from error
        if not os.access(path, os.W_OK | os.X_OK):
            raise ConfigurationError(f"the {kind} directory {path} cannot be written to")
        self._remove_left_behind()

    def scan(self) -> Iterator[Found]:
        """All files of this model, without loading them; others are reported once, in the log."""
        for path in sorted(self.path.glob(f"*{self._suffix}")):
            found = self.find(path.name.removesuffix(self._suffix))
            if found is not None:
                yield found

    def find(self, key: str) -> Found | None:
        """Find the file of a key; ``None`` if it does not exist or cannot be used here."""
        path = self.path_of(key)
        try:
            state = path.stat()
            described = CompressedSequence.describe(path)
            if described["model"] != self._files.model:
                return None
            self._files.check(path, described)
            about = dict(json.loads(described["note"]))
            found = Found(
                key,
                about,
                int(described["tokens"]),
                int(described["layouts"][0]["count"]),
                int(about.pop("nbytes", state.st_size)),
                state.st_mtime,
            )
        except FileNotFoundError:
            return None
        except (CacheFileError, LookupError, TypeError, ValueError, OSError) as error:
            logger.warning("%s is ignored as a %s: %s", path, self._kind, error)
            return None
        return found if time.time() - found.used <= self.seconds else None

    def read(self, key: str) -> CompressedSequence:
        """Load a sequence; its file stays.

        Raises:
            CacheFileError: The file does not exist any more, or it is damaged.
        """
        return self._files.load(self.path_of(key))

    def write(self, key: str, sequence: CompressedSequence, about: Mapping[str, Any], used: float) -> bool:
        """Write a sequence; returns whether that worked, and logs why not.

        Args:
            key: Its key.
            sequence: The sequence.
            about: What its note says.
            used: When it was last used, in seconds since the epoch.
        """
        if sequence.nbytes > self.max_bytes:
            logger.warning(
                "a %s of %d bytes is not written: the limit for files is %d",
                self._kind,
                sequence.nbytes,
                self.max_bytes,
            )
            return False
        try:
            self._files.save(sequence, self.path_of(key), note=json.dumps({**about, "nbytes": sequence.nbytes}))
        except CacheFileError as error:
            logger.warning("a %s is not written: %s", self._kind, error)
            return False
        self.touch(key, used)
        return True

    def touch(self, key: str, used: float) -> None:
        """Store when a sequence was last used, in seconds since the epoch."""
        with contextlib.suppress(OSError):
            os.utime(self.path_of(key), (used, used))

    def delete(self, key: str) -> bool:
        """Delete a file; returns whether it existed. If the disk fails, the log says so."""
        try:
            self.path_of(key).unlink()
        except FileNotFoundError:
            return False
        except OSError as error:
            logger.warning("the file of a %s cannot be deleted now: %s", self._kind, error)
        return True

    def sweep(self, used: Mapping[str, float], newest: str | None = None) -> list[str]:
        """Delete expired files, and the least recently used ones until the rest fits.

        Args:
            used: When known sequences were last used, in seconds since the epoch, by key; for others, their files tell.
            newest: A file that stays in any case.

        Returns:
            Keys whose files were deleted.
        """
        files = []
        for path in self.path.glob(f"*{self._suffix}"):
            key = path.name.removesuffix(self._suffix)
            with contextlib.suppress(
                OSError
            ):  # deleted by another process, or the disk fails; the next one tries again
                state = path.stat()
                files.append((used.get(key, state.st_mtime), state.st_size, key))
        oldest = time.time() - self.seconds
        gone = [key for last, _, key in files if last < oldest and key != newest]
        mine = [one for one in files if one[2] not in gone and (one[2] in used or self._is_ours(one[2]))]
        mine.sort(reverse=True)
        total = sum(size for _, size, _ in mine)
        while total > self.max_bytes and mine and mine[-1][2] != newest:
            _, size, key = mine.pop()
            total -= size
            gone.append(key)
        for key in gone:
            self._ours.pop(key, None)
            self.delete(key)
        return gone

    def _remove_left_behind(self) -> None:
        """Delete what a process left that was killed while writing; safetensors has names that others may have, too."""
        for path in [*self.path.glob(f".*{self._suffix}.*"), *self.path.glob(".tmp??????")]:
            with contextlib.suppress(OSError):
                state = path.lstat()
                is_old = time.time() - state.st_mtime > 3600
                if stat.S_ISREG(state.st_mode) and (is_old or not path.name.startswith(".tmp")):
                    path.unlink()

    def path_of(self, key: str) -> Path:
        """The file of a key."""
        return self.path / f"{key}{self._suffix}"

    def _is_ours(self, key: str) -> bool:
        if key not in self._ours:
            try:
                model = CompressedSequence.describe(self.path_of(key))["model"]
            except (CacheFileError, LookupError):
                return False
            self._ours[key] = model == self._files.model
        return self._ours[key]
