"""The store of contexts, texts that are prefilled once and asked many times, limited to a number of bytes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import anyio
import anyio.lowlevel
import anyio.to_thread

from snapstream.engine import Context
from snapstream.errors import CacheFileError
from snapstream.serving.errors import ApiError

if TYPE_CHECKING:
    from snapstream.serving.context_files import ContextFiles


@dataclass(eq=False)
class StoredContext:
    """A context and its description.

    Attributes:
        id: Unguessable id, created by the server.
        owner: Digest of the API key that created it; other keys do not see it.
        name: The owner's name for it.
        created: When it was created, in seconds since 1970.
        tokens: Number of tokens of its text.
        entries: Number of cache entries per layer and KV head.
        nbytes: Bytes of its cache.
        chat: See :class:`~snapstream.engine.context.Context`.
        context: The context, if it is in memory.
        on_disk: Whether it is stored in a file.
        users: Number of requests that currently use it.
        used: When it was last used, by the store's clock.
        fetching: Held while it is loaded from its file.
    """

    id: str
    owner: str
    name: str
    created: float
    tokens: int
    entries: int
    nbytes: int
    chat: bool
    context: Context | None = None
    on_disk: bool = False
    users: int = 0
    used: float = 0.0
    fetching: anyio.Lock = field(default_factory=anyio.Lock)


class ContextStore:
    """Keeps contexts in ``max_bytes`` of memory, and evicts the least recently used one first.

    With files, every context is written when it is created, so eviction from memory loses nothing. Contexts in use are
    not evicted. All methods must be called on the event loop.

    Args:
        max_bytes: Maximum size of all caches in memory; 0 disables contexts.
        files: Files of the contexts; ``None`` to keep them in memory only.
        clock: Clock, for tests.
    """

    def __init__(
        self, max_bytes: int, files: ContextFiles | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_bytes, self.files, self.clock = max_bytes, files, clock
        self._known: dict[str, StoredContext] = {}
        for stored, idle in [] if files is None else files.find():
            stored.used = clock() - idle
            self._known[stored.id] = stored
        self._leaving: set[StoredContext] = set()  # deleted while in use

    def check(self) -> None:
        """Check that contexts are enabled.

        Raises:
            ApiError: They are not.
        """
        if not self.max_bytes:
            raise ApiError(400, "this server keeps no contexts; start it with --contexts GIB", param="context_id")

    def check_room(self, nbytes: int) -> None:
        """Check that a context of this size could be stored now; nothing is evicted yet.

        Raises:
            ApiError: It is larger than the limit, or contexts in use leave no room for it.
        """
        if nbytes > self.max_bytes:
            raise ApiError(
                400,
                f"this context takes {nbytes} bytes, but all contexts together may take {self.max_bytes} (--contexts); "
                "use a smaller kv_budget",
                param="kv_budget",
            )
        if self._in_use() + nbytes > self.max_bytes:
            raise ApiError(
                503,
                "contexts in use take all the memory for contexts; try again later",
                code="contexts_full",
                headers={"Retry-After": "5"},
            )

    async def add(self, owner: str, name: str, context: Context) -> StoredContext:
        """Store a context.

        Raises:
            ApiError: See :meth:`check_room`.
        """
        stored = StoredContext(
            id=f"ctx-{secrets.token_hex(12)}",
            owner=owner,
            name=name,
            created=time.time(),
            tokens=context.tokens,
            entries=context.entries,
            nbytes=context.nbytes,
            chat=context.chat,
            used=self.clock(),
        )
        self._make_room(stored)
        stored.context, stored.users = context, 1  # counts as in use, so it is not evicted while it is written
        self._known[stored.id] = stored
        try:
            if self.files is not None:
                with anyio.CancelScope(shield=True):
                    gone = await anyio.to_thread.run_sync(self.files.write, stored, context, self._oldest())
                self._forget_files(gone)
            await anyio.lowlevel.checkpoint()  # the client may have disconnected meanwhile
        except BaseException:
            self._forget(stored)
            raise
        finally:
            self.release(stored)
            if stored.id not in self._known:  # deleted meanwhile
                await self._delete_file(stored)
        return stored

    def find(self, owner: str, name: str) -> StoredContext:
        """Find a context by its id.

        Raises:
            ApiError: There is no such context, or it belongs to another key.
        """
        stored = self._known.get(name)
        if stored is None or stored.owner != owner:
            raise ApiError(
                404,
                f"there is no context {name!r}: it was deleted or evicted; create it again",
                param="context_id",
                code="context_not_found",
            )
        return stored

    def of(self, owner: str) -> list[StoredContext]:
        """All contexts of an owner, newest last."""
        return sorted((one for one in self._known.values() if one.owner == owner), key=lambda one: one.created)

    async def take(self, owner: str, name: str) -> StoredContext:
        """Acquire a context, which is loaded into memory if needed and stays there until :meth:`release`.

        Raises:
            ApiError: There is no such context, its file is corrupt, or contexts in use leave no room for it.
        """
        self.check()
        stored = self.find(owner, name)
        stored.users += 1
        try:
            async with stored.fetching:  # several requests may need it at the same time
                if stored.context is None:
                    stored.context = await self._fetched(stored)
        except BaseException:
            self.release(stored)
            raise
        return stored

    def release(self, stored: StoredContext) -> None:
        """Release a context that was acquired."""
        stored.users -= 1
        stored.used = self.clock()
        if not stored.users:
            self._leaving.discard(stored)

    async def delete(self, owner: str, name: str) -> None:
        """Delete a context; requests that already use it are not affected.

        Raises:
            ApiError: There is no such context.
        """
        stored = self.find(owner, name)
        self._forget(stored)
        await self._delete_file(stored)

    def close(self) -> None:
        """Store when each context was last used, for the next server."""
        if self.files is not None:
            self.files.touch({one.id: self.clock() - one.used for one in self._known.values() if one.on_disk})

    def __len__(self) -> int:
        return len(self._known)

    @property
    def bytes(self) -> int:
        """Bytes of all caches in memory."""
        return sum(one.nbytes for one in {*self._known.values(), *self._leaving} if one.context is not None)

    async def _fetched(self, stored: StoredContext) -> Context:
        assert self.files is not None
        self._make_room(stored)
        try:
            return await anyio.to_thread.run_sync(self.files.read, stored)
        except CacheFileError as error:
            if isinstance(error.__cause__, OSError):  # the disk failed; the file may be intact
                message = f"the context {stored.id!r} cannot be read now: {error}"
                raise ApiError(503, message, param="context_id") from error
            self._forget(stored)
            await self._delete_file(stored)
            message = f"the context {stored.id!r} could not be loaded: {error}; create it again"
            raise ApiError(404, message, param="context_id", code="context_not_found") from error

    async def _delete_file(self, stored: StoredContext) -> None:
        if self.files is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self.files.delete, stored.id)

    def _in_use(self) -> int:
        """Bytes of all contexts that are in use, or being loaded for use."""
        return sum(one.nbytes for one in {*self._known.values(), *self._leaving} if one.users)

    def _oldest(self) -> list[str]:
        """Ids of all contexts, least recently used first; those in use are last."""
        return [one.id for one in sorted(self._known.values(), key=lambda one: (one.users > 0, one.used))]

    def _make_room(self, stored: StoredContext) -> None:
        """Evict contexts from memory until there is room for one more."""
        self.check_room(0 if stored.users else stored.nbytes)
        total = self._in_use() + (0 if stored.users else stored.nbytes)
        idle = [one for one in self._known.values() if one.context is not None and not one.users]
        total += sum(one.nbytes for one in idle)
        for oldest in sorted(idle, key=lambda one: one.used):
            if total <= self.max_bytes:
                break
            total -= oldest.nbytes
            if oldest.on_disk:
                oldest.context = None
            else:
                self._forget(oldest)

    def _forget(self, stored: StoredContext) -> None:
        self._known.pop(stored.id, None)
        if stored.users:
            self._leaving.add(stored)

    def _forget_files(self, ids: list[str]) -> None:
        """Update the contexts whose files were evicted."""
        for name in ids:
            stored = self._known.get(name)
            if stored is not None:
                stored.on_disk = False
                if stored.context is None and not stored.users:
                    self._forget(stored)
