"""Taking sequences out of a store from the event loop."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import anyio.to_thread

from snapstream.cache import SequenceStore, Stored


async def take(store: SequenceStore, key: str) -> Stored | None:
    """Use a sequence until it is released; see :meth:`SequenceStore.take`. Waits for the disk in a thread.

    A task that is cancelled meanwhile leaves nothing in use.
    """
    known = store.get(key)
    if known is not None and known.sequence is not None:
        return store.take(key)
    if store.directory is None:
        return None
    with anyio.CancelScope(shield=True):
        taken = await anyio.to_thread.run_sync(store.take, key)
    try:
        await anyio.lowlevel.checkpoint()
    except BaseException:
        if taken is not None:
            store.release(taken, used=False)
        raise
    return taken
