"""The store of sequences outside of slots: what conversations, texts and beginnings of prompts leave behind.

It has two places, memory and a directory, and both are limited to a number of bytes. Sequences in use stay in memory;
the least recently used of the others are evicted first, to the directory if there is one.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from snapstream.cache.compressed import CompressedSequence
from snapstream.cache.directory import Found, SequenceDirectory
from snapstream.errors import CacheFileError

logger = logging.getLogger(__name__)

UNWRITTEN = 4
"""Evicted sequences that wait to be written may take one in so many bytes more (or be two); others are lost."""


class StoreFullError(Exception):
    """There is no room for a sequence, because it is too large or because of those in use.

    Attributes:
        needed: Bytes of the sequence.
        is_too_large: Whether it would not fit into an empty store either.
    """

    def __init__(self, needed: int, *, is_too_large: bool) -> None:
        super().__init__(f"no room for {needed} bytes")
        self.needed, self.is_too_large = needed, is_too_large


@dataclass(eq=False)
class Stored:
    """A sequence in a store.

    Attributes:
        key: Its key; a valid name of a file.
        about: What its owner says of it, as JSON in its file.
        tokens: Tokens of the sequence.
        entries: Entries per KV head of the layers with a budget.
        nbytes: Bytes it takes in memory.
        sequence: The sequence, if it is in memory.
        on_disk: Whether it is in a file.
        users: How many use it now.
        used: When it was last used, by the store's clock.
        loading: Held while it is read from the disk.
    """

    key: str
    about: dict[str, Any]
    tokens: int
    entries: int
    nbytes: int
    sequence: CompressedSequence | None = None
    on_disk: bool = False
    users: int = 0
    used: float = 0.0
    loading: threading.Lock = field(default_factory=threading.Lock, repr=False)


class SequenceStore:
    """Keeps sequences by key; may be used by any thread.

    Methods that may wait for the disk say so.

    Attributes:
        reserved: Returns bytes of memory that are taken, although nothing is stored there yet.
    """

    def __init__(
        self,
        max_bytes: int,
        directory: SequenceDirectory | None = None,
        *,
        seconds: float = math.inf,
        lists_files: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a store; reads the metadata of all files if they are listed.

        Args:
            max_bytes: Maximum size in memory of all sequences.
            directory: Where evicted sequences go; ``None`` to drop them.
            seconds: How long an unused sequence is kept.
            lists_files: Whether sequences on disk are known by all they say; if not, they are looked up by key.
            clock: Clock, for tests.
        """
        self.max_bytes, self.directory, self.seconds, self._clock = max_bytes, directory, seconds, clock
        self.reserved: Callable[[], int] = lambda: 0
        self._lists_files = lists_files
        self._known: dict[str, Stored] = {}
        # Those that take memory, deleted ones in use among them; the least recently used one is first.
        self._held: OrderedDict[Stored, None] = OrderedDict()
        # Evicted, but in memory until they are written; others that will be written; and the one that is being written.
        self._leaving: dict[Stored, None] = {}
        self._queue: dict[Stored, None] = {}
        self._in_hand: Stored | None = None
        self._lock = threading.RLock()
        self._writing = threading.Lock()
        self._writer: ThreadPoolExecutor | None = None
        if directory is not None:
            self._writer = ThreadPoolExecutor(1, "sequence-store")
            self._sweep_files()
            epoch = self._epoch()
            for found in directory.scan() if lists_files else ():
                self._known[found.key] = self._of_file(found, epoch)

    # -- what there is ------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Number of sequences that are known."""
        return len(self._known)

    @property
    def nbytes(self) -> int:
        """Bytes of all sequences in memory, without those that wait to be written."""
        with self._lock:
            return sum(each.nbytes for each in self._held)

    @property
    def loaded(self) -> int:
        """Number of sequences in memory."""
        return len(self._held)

    def get(self, key: str) -> Stored | None:
        """What is known under a key; this is no use of it."""
        with self._lock:
            stored = self._known.get(key)
            return None if stored is None or self._is_expired(stored) else stored

    def all(self) -> list[Stored]:
        """All sequences that are known, in no order."""
        with self._lock:
            return [each for each in self._known.values() if not self._is_expired(each)]

    def check_room(self, nbytes: int) -> None:
        """Check that a sequence of this size could be stored now; nothing is evicted yet.

        Raises:
            StoreFullError: It could not.
        """
        with self._lock:
            if nbytes > self.max_bytes:
                raise StoreFullError(nbytes, is_too_large=True)
            in_use = sum(each.nbytes for each in self._held if each.users)
            if in_use + self.reserved() + nbytes > self.max_bytes:
                raise StoreFullError(nbytes, is_too_large=False)

    def make_room(self, nbytes: int, *, instead_of: Stored | None = None) -> None:
        """Evict idle sequences from memory until there is room for so many bytes more.

        Args:
            nbytes: Size of a sequence.
            instead_of: One that it will replace.

        Raises:
            StoreFullError: There is no room; nothing was evicted.
        """
        with self._lock:
            self.check_room(nbytes)
            idle = [each for each in self._held if not each.users and each is not instead_of]
            leaves = instead_of is not None and not instead_of.users and instead_of in self._held
            total = self.nbytes + self.reserved() + nbytes - (instead_of.nbytes if instead_of and leaves else 0)
            for oldest in idle:
                if total <= self.max_bytes:
                    break
                total -= oldest.nbytes
                self._evict(oldest)

    # -- using them ---------------------------------------------------------------------------------------------------

    def put(self, key: str, sequence: CompressedSequence, about: dict[str, Any], *, users: int = 0) -> Stored:
        """Store a sequence in place of what is known under its key.

        Args:
            key: The key.
            sequence: The sequence.
            about: What is to be known of it; must be JSON.
            users: 1 if it is in use until :meth:`release`.

        Raises:
            StoreFullError: There is no room; what was stored stays.
        """
        with self._lock:
            before = self._known.get(key)
            self.make_room(sequence.nbytes, instead_of=before)
            if before is not None:
                self._remove(before)
            tokens, entries = len(sequence.tokens), sequence.entries
            stored = Stored(key, about, tokens, entries, sequence.nbytes, sequence, users=users, used=self._clock())
            self._known[key] = stored
            self._held[stored] = None
            return stored

    def take(self, key: str) -> Stored | None:
        """Use a sequence: it stays in memory until :meth:`release`. May wait for the disk.

        Returns:
            The sequence, loaded; ``None`` if it is not known.

        Raises:
            StoreFullError: It is on disk, and there is no room in memory.
            CacheFileError: Its file cannot be read. If it is damaged, it is deleted.
        """
        stored, counted = None, False
        try:
            while stored is None:
                if self._find(key) is None:
                    return None
                with self._lock:
                    stored = self.get(key)
                    if stored is None:
                        continue  # it has just been dropped, and can be found again
                    if stored not in self._held:
                        self.make_room(stored.nbytes)
                        self._leaving.pop(stored, None)
                        self._held[stored] = None
                    stored.users, counted = stored.users + 1, True  # at once, whatever interrupts
            with stored.loading:  # several may want it at the same time
                if stored.sequence is None:
                    stored.sequence = self._load(stored)
        except BaseException:
            if stored is not None and counted:
                self.release(stored, used=False)
            raise
        return stored

    def load(self, key: str) -> CompressedSequence | None:
        """Load a sequence, without keeping it from being evicted. May wait for the disk; for errors, see :meth:`take`.

        Returns:
            The sequence; ``None`` if it is not known.
        """
        stored = self._find(key)
        if stored is None:
            return None
        with stored.loading:
            sequence = stored.sequence
            if sequence is None:
                self.make_room(stored.nbytes)
                sequence = self._load(stored)
                with self._lock:
                    if self._known.get(key) is stored:
                        self._held[stored] = None
                        stored.sequence = sequence
        self.touch(stored)
        return sequence

    def release(self, stored: Stored, *, used: bool = True) -> None:
        """End the use of a sequence. Unless it was ``used``, it is as old as before."""
        with self._lock:
            stored.users -= 1
            if used:
                self.touch(stored)
            if not stored.users and (stored.sequence is None or self._known.get(stored.key) is not stored):
                self._held.pop(stored, None)

    def touch(self, stored: Stored) -> None:
        """Mark a sequence as just used."""
        with self._lock:
            stored.used = self._clock()
            if stored in self._held:
                self._held.move_to_end(stored)

    def delete(self, key: str) -> bool:
        """Delete a sequence; who uses it now may go on. Returns whether it existed."""
        with self._lock:
            stored = self._known.get(key)
            if stored is not None:
                self._remove(stored)
        on_disk = self.directory is not None and self.directory.delete(key)
        return stored is not None or on_disk

    def save(self, stored: Stored, epoch: float | None = None) -> None:
        """Write a sequence to the directory now, and delete files that no longer fit. Waits for the disk.

        If it cannot be written, it stays in memory only, and the log says why.

        Args:
            stored: The sequence.
            epoch: One reading of both clocks for several files, so that their order stays; ``None`` to read them now.
        """
        directory = self.directory
        if directory is None:
            return
        epoch = self._epoch() if epoch is None else epoch
        with self._writing:  # one after the other, so that an older sequence never takes the place of a newer one
            sequence = stored.sequence
            if sequence is None or stored.on_disk or self._known.get(stored.key) is not stored:
                return
            written = directory.write(stored.key, sequence, stored.about, stored.used + epoch)
            with self._lock:
                stored.on_disk = written
                if written and self._known.get(stored.key) is not stored:  # deleted or replaced meanwhile
                    directory.delete(stored.key)
        if written:
            self._sweep_files(stored.key)

    def save_later(self, stored: Stored) -> None:
        """Write a sequence to the directory, if there is one, in a thread."""
        with self._lock:
            if self._writer is not None and not stored.on_disk:
                self._queue[stored] = None
                self._writer.submit(self._write_next)

    def sweep(self) -> None:
        """Delete what has expired. May wait for the disk."""
        with self._lock:
            for stored in [each for each in self._known.values() if self._is_expired(each)]:
                self.delete(stored.key)
        self._sweep_files()

    def flush(self) -> None:
        """Wait until all that was evicted has been written."""
        if self._writer is not None:
            self._writer.submit(lambda: None).result()

    def close(self) -> None:
        """Write what is in memory to the directory, the most recently used first, and end. Waits for the disk."""
        directory, writer = self.directory, self._writer
        if directory is None or writer is None:
            return
        self._writer = None  # a store that was closed drops what it evicts
        writer.shutdown(wait=True)
        room, epoch = directory.max_bytes, self._epoch()
        for stored in sorted(self.all(), key=lambda each: each.used, reverse=True):
            if stored.on_disk:
                directory.touch(stored.key, stored.used + epoch)
            elif stored.nbytes <= room:
                try:
                    self.save(stored, epoch)
                except Exception:  # for example, too little memory; others may be smaller
                    logger.exception("a stored sequence is lost")
            room -= stored.nbytes

    # -- inside -------------------------------------------------------------------------------------------------------

    def _is_expired(self, stored: Stored) -> bool:
        return not stored.users and self._clock() - stored.used > self.seconds

    def _epoch(self) -> float:
        """Seconds from the epoch to the zero of the store's clock; files have the time of day."""
        return time.time() - self._clock()

    def _of_file(self, found: Found, epoch: float) -> Stored:
        used = found.used - epoch
        return Stored(found.key, found.about, found.tokens, found.entries, found.nbytes, on_disk=True, used=used)

    def _find(self, key: str) -> Stored | None:
        """What is known under a key, or is only on disk, perhaps left there by another process."""
        stored = self.get(key)
        found = None if stored is not None or self.directory is None else self.directory.find(key)
        if found is None:
            return stored
        with self._lock:
            stored = self.get(key)
            if stored is None:
                stored = self._known[key] = self._of_file(found, self._epoch())
            return stored

    def _load(self, stored: Stored) -> CompressedSequence:
        assert self.directory is not None
        try:
            sequence = self.directory.read(stored.key)
        except CacheFileError as error:
            if not isinstance(error.__cause__, OSError):  # otherwise the disk failed; the file may be intact
                self.delete(stored.key)
            raise
        # Another process may have written another one meanwhile.
        with self._lock, contextlib.suppress(ValueError, TypeError):
            stored.about = dict(json.loads(sequence.note))
            stored.about.pop("nbytes", None)
            stored.nbytes, stored.tokens, stored.entries = sequence.nbytes, len(sequence.tokens), sequence.entries
        return sequence

    def _evict(self, stored: Stored) -> None:
        del self._held[stored]
        if stored.on_disk:
            self._drop(stored)
        elif self._writer is None:
            self._remove(stored)
        else:
            self._leaving[stored] = None
            self.save_later(stored)
            self._lose_what_the_disk_is_too_slow_for()

    def _lose_what_the_disk_is_too_slow_for(self) -> None:
        leaving = [each for each in self._leaving if each is not self._in_hand]
        waiting = sum(each.nbytes for each in self._leaving)
        for oldest in leaving[:-1]:
            if waiting <= self.max_bytes // UNWRITTEN:
                return
            waiting -= oldest.nbytes
            self._remove(oldest)
            logger.warning("a stored sequence is lost: more were evicted than the disk could write")

    def _write_next(self) -> None:
        with self._lock:
            stored = next(iter(self._leaving), None) or next(iter(self._queue), None)
            self._in_hand = stored
        if stored is None:  # deleted, lost, or in use again
            return
        try:
            self.save(stored)
        except Exception:  # nobody would hear of it
            logger.exception("a stored sequence could not be written")
        with self._lock:
            self._in_hand = None
            self._queue.pop(stored, None)
            if stored in self._leaving:
                del self._leaving[stored]
                if stored.on_disk:
                    self._drop(stored)
                else:
                    self._remove(stored)

    def _drop(self, stored: Stored) -> None:
        """Free the memory of a sequence that is on disk."""
        stored.sequence = None
        if not self._lists_files and self._known.get(stored.key) is stored:
            del self._known[stored.key]

    def _remove(self, stored: Stored) -> None:
        """Forget a sequence; its file stays until another one takes its place."""
        if self._known.get(stored.key) is stored:
            del self._known[stored.key]
        self._leaving.pop(stored, None)
        self._queue.pop(stored, None)
        if not stored.users:
            self._held.pop(stored, None)

    def _sweep_files(self, newest: str | None = None) -> None:
        if self.directory is None:
            return
        with self._lock:
            epoch = self._epoch()  # those in use are as good as new
            used = {each.key: math.inf if each.users else each.used + epoch for each in self._known.values()}
        gone = self.directory.sweep(used, newest)
        with self._lock:
            for key in gone:
                stored = self._known.get(key)
                if stored is not None:
                    stored.on_disk = False
                    if stored.sequence is None and not stored.users:
                        self._remove(stored)
