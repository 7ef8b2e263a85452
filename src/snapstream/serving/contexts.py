"""Contexts: texts that are prefilled once and asked many times, limited in bytes."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager

import anyio
import anyio.lowlevel
import anyio.to_thread

from snapstream.cache import SequenceStore, Stored, StoreFullError
from snapstream.engine import Context
from snapstream.errors import CacheFileError
from snapstream.serving.errors import ApiError
from snapstream.serving.leases import take


class ContextStore:
    """The contexts of a server: a view of a store, which tells clients what is wrong.

    A context is a :class:`Stored` whose key is an unguessable id, and which says what :meth:`Context.about` does, its
    ``owner`` (digest of an API key), its ``name`` and when it was ``created``. With a directory, each one is written
    when it is created, so eviction from memory loses nothing. All methods must be called on the event loop.

    Args:
        store: Keeps their caches.
    """

    def __init__(self, store: SequenceStore) -> None:
        self.store = store

    def check(self) -> None:
        """Check that contexts are enabled.

        Raises:
            ApiError: They are not.
        """
        if not self.store.max_bytes:
            raise ApiError(400, "this server keeps no contexts; start it with --contexts SIZE", param="context_id")

    def check_room(self, nbytes: int) -> None:
        """Check that a context of this size could be stored now; nothing is evicted yet.

        Raises:
            ApiError: It is larger than the limit, or contexts in use leave no room for it.
        """
        with self._as_api_error():
            self.store.check_room(nbytes)

    async def add(self, owner: str, name: str, context: Context) -> Stored:
        """Store a context.

        Raises:
            ApiError: See :meth:`check_room`.
        """
        key = f"ctx-{secrets.token_hex(12)}"
        said = {"id": key, "owner": owner, "name": name, "created": time.time()}
        with self._as_api_error():  # it counts as in use, so it is not evicted while it is written
            stored = self.store.put(key, context.sequence, context.about() | said, users=1)
        try:
            if self.store.directory is not None:
                with anyio.CancelScope(shield=True):
                    await anyio.to_thread.run_sync(self.store.save, stored)
            await anyio.lowlevel.checkpoint()  # the client may have disconnected meanwhile
        except BaseException:
            await self._delete(key)
            raise
        finally:
            self.store.release(stored)
        return stored

    def find(self, owner: str, name: str) -> Stored:
        """Find a context by its id.

        Raises:
            ApiError: There is no such context, or it belongs to another key.
        """
        stored = self.store.get(name)
        if stored is None or stored not in self.of(owner):
            raise self._missing(name)
        return stored

    def of(self, owner: str) -> list[Stored]:
        """All contexts of an owner, newest last."""
        mine = [one for one in self.store.all() if one.about.get("owner") == owner and _is_context(one)]
        return sorted(mine, key=lambda one: float(one.about["created"]))

    async def take(self, owner: str, name: str) -> Stored:
        """Acquire a context, which is loaded into memory if needed and stays there until it is released.

        Raises:
            ApiError: There is no such context, its file is damaged, or contexts in use leave no room for it.
        """
        self.check()
        self.find(owner, name)
        with self._as_api_error(name):
            taken = await take(self.store, name)
        if taken is None:  # deleted meanwhile
            raise self._missing(name)
        return taken

    async def delete(self, owner: str, name: str) -> None:
        """Delete a context; requests that already use it are not affected.

        Raises:
            ApiError: There is no such context.
        """
        await self._delete(self.find(owner, name).key)

    def _missing(self, name: str) -> ApiError:
        message = f"there is no context {name!r}: it was deleted or evicted; create it again"
        return ApiError(404, message, param="context_id", code="context_not_found")

    async def _delete(self, key: str) -> None:
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self.store.delete, key)

    @contextmanager
    def _as_api_error(self, name: str = "") -> Iterator[None]:
        """Turn errors of the store into answers."""
        try:
            yield
        except StoreFullError as error:
            if error.is_too_large:
                message = (
                    f"this context takes {error.needed} bytes, but all contexts together may take "
                    f"{self.store.max_bytes} (--contexts); use a smaller kv_budget"
                )
                raise ApiError(400, message, param="kv_budget") from error
            message = "contexts in use take all the memory for contexts; try again later"
            raise ApiError(503, message, code="contexts_full", headers={"Retry-After": "5"}) from error
        except CacheFileError as error:
            if isinstance(error.__cause__, OSError):  # the disk failed; the file may be intact
                message = f"the context {name!r} cannot be read now: {error}"
                raise ApiError(503, message, param="context_id") from error
            message = f"the context {name!r} could not be loaded: {error}; create it again"
            raise ApiError(404, message, param="context_id", code="context_not_found") from error


def _is_context(stored: Stored) -> bool:
    """Whether a file that somebody has put there says what a context's does."""
    said = stored.about
    texts = all(isinstance(said.get(name), str) for name in ("name", "model"))
    others = all(isinstance(said.get(name, 0), str | None) for name in ("opening", "system"))
    return said.get("id") == stored.key and isinstance(said.get("created"), int | float) and texts and others
