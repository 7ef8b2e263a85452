"""Texts that were read once and are asked many times: by id, up to a number of bytes, each stored once."""

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
    """A context and what clients are told of it.

    Attributes:
        id: Made by the server, not to be guessed.
        owner: Whose key has read it; nobody else sees it.
        name: What the owner calls it.
        created: When it was read, in seconds since 1970.
        tokens: Of the text.
        entries: Tokens that are left, per layer and KV head.
        nbytes: Memory that it takes.
        chat: See :class:`~snapstream.engine.context.Context`.
        context: Itself, if it is in memory.
        on_disk: Whether a file has it.
        users: Requests that go on from it now.
        used: When one last did, as the store's clock counts.
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
    """Keeps contexts in ``max_bytes`` of memory; the one not asked for the longest time goes first.

    With files every context is written when it is read, and going from memory is no loss. One that is being asked
    stays. All methods are called on the event loop.

    Args:
        max_bytes: Of all caches in memory; 0: no contexts are taken.
        files: Where they are kept besides; ``None``: nowhere.
        clock: For tests.
    """

    def __init__(
        self, max_bytes: int, files: ContextFiles | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.max_bytes, self.files, self.clock = max_bytes, files, clock
        self._known: dict[str, StoredContext] = {}
        for stored, idle in [] if files is None else files.find():
            stored.used = clock() - idle
            self._known[stored.id] = stored
        self._leaving: set[StoredContext] = set()  # deleted while they are being asked

    def check(self) -> None:
        """See whether contexts are taken at all.

        Raises:
            ApiError: They are not.
        """
        if not self.max_bytes:
            raise ApiError(400, "this server keeps no contexts; start it with --contexts GIB", param="context_id")

    def check_room(self, nbytes: int) -> None:
        """See whether a context of so many bytes could be kept now; nothing has to go for it yet.

        Raises:
            ApiError: It is larger than all that may be kept, or what is being asked leaves no room.
        """
        if nbytes > self.max_bytes:
            raise ApiError(
                400,
                f"this context takes {nbytes} bytes, and all together may take {self.max_bytes} (--contexts); read the "
                "text with a smaller kv_budget",
                param="kv_budget",
            )
        if self._in_use() + nbytes > self.max_bytes:
            raise ApiError(
                503,
                "contexts that are being asked take all memory that there is for them; try again later",
                code="contexts_full",
                headers={"Retry-After": "5"},
            )

    async def add(self, owner: str, name: str, context: Context) -> StoredContext:
        """Keep a context.

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
        stored.context, stored.users = context, 1  # it must not make room for others while it is written
        self._known[stored.id] = stored
        try:
            if self.files is not None:
                with anyio.CancelScope(shield=True):
                    gone = await anyio.to_thread.run_sync(self.files.write, stored, context, self._oldest())
                self._forget_files(gone)
            await anyio.lowlevel.checkpoint()  # who has asked for it may have gone meanwhile
        except BaseException:
            self._forget(stored)
            raise
        finally:
            self.release(stored)
            if stored.id not in self._known:  # deleted meanwhile
                await self._delete_file(stored)
        return stored

    def find(self, owner: str, name: str) -> StoredContext:
        """A context by its id.

        Raises:
            ApiError: There is none, or it is somebody else's.
        """
        stored = self._known.get(name)
        if stored is None or stored.owner != owner:
            raise ApiError(
                404,
                f"there is no context {name!r}: it was deleted, or had to make room; read the text again",
                param="context_id",
                code="context_not_found",
            )
        return stored

    def of(self, owner: str) -> list[StoredContext]:
        """All that somebody has, the newest last."""
        return sorted((one for one in self._known.values() if one.owner == owner), key=lambda one: one.created)

    async def take(self, owner: str, name: str) -> StoredContext:
        """A context that is in memory, and stays there until it is given to :meth:`release`.

        Raises:
            ApiError: There is none, its file is damaged, or what is being asked leaves no room for it.
        """
        self.check()
        stored = self.find(owner, name)
        stored.users += 1
        try:
            async with stored.fetching:  # several may want it at once
                if stored.context is None:
                    stored.context = await self._fetched(stored)
        except BaseException:
            self.release(stored)
            raise
        return stored

    def release(self, stored: StoredContext) -> None:
        """One request less goes on from a context."""
        stored.users -= 1
        stored.used = self.clock()
        if not stored.users:
            self._leaving.discard(stored)

    async def delete(self, owner: str, name: str) -> None:
        """Forget a context; requests that go on from it are not touched.

        Raises:
            ApiError: There is none.
        """
        stored = self.find(owner, name)
        self._forget(stored)
        await self._delete_file(stored)

    def close(self) -> None:
        """Note when each was asked last, for the next server."""
        if self.files is not None:
            self.files.touch({one.id: self.clock() - one.used for one in self._known.values() if one.on_disk})

    def __len__(self) -> int:
        return len(self._known)

    @property
    def bytes(self) -> int:
        """Memory of all caches that are held."""
        return sum(one.nbytes for one in {*self._known.values(), *self._leaving} if one.context is not None)

    async def _fetched(self, stored: StoredContext) -> Context:
        assert self.files is not None
        self._make_room(stored)
        try:
            return await anyio.to_thread.run_sync(self.files.read, stored)
        except CacheFileError as error:
            if isinstance(error.__cause__, OSError):  # that is the disk's trouble, not the file's
                message = f"the context {stored.id!r} cannot be read now: {error}"
                raise ApiError(503, message, param="context_id") from error
            self._forget(stored)
            await self._delete_file(stored)
            message = f"the context {stored.id!r} could not be read back: {error}; read the text again"
            raise ApiError(404, message, param="context_id", code="context_not_found") from error

    async def _delete_file(self, stored: StoredContext) -> None:
        if self.files is not None:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(self.files.delete, stored.id)

    def _in_use(self) -> int:
        """Memory of what is being asked, or fetched to be."""
        return sum(one.nbytes for one in {*self._known.values(), *self._leaving} if one.users)

    def _oldest(self) -> list[str]:
        """Ids, the one not asked for the longest time first."""
        return [one.id for one in sorted(self._known.values(), key=lambda one: (one.users > 0, one.used))]

    def _make_room(self, stored: StoredContext) -> None:
        """Take contexts out of memory until there is room for one more."""
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
        """These files had to make room for others."""
        for name in ids:
            stored = self._known.get(name)
            if stored is not None:
                stored.on_disk = False
                if stored.context is None and not stored.users:
                    self._forget(stored)
