"""The scheduler: first come, first served, into a fixed number of slots."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from snapstream.engine.request import Phase, Request


class Scheduler:
    """Requests wait in order, one prompt is prefilled at a time, and up to ``slots`` requests are decoded.

    A request gets its slot before prefill, because its prompt is compressed directly into the slot.
    """

    def __init__(self, slots: int) -> None:
        self.waiting: deque[Request] = deque()
        self.slots: list[Request | None] = [None] * slots

    def add(self, request: Request, *, first: bool = False) -> None:
        """Add a request at the end of the queue, or at its head."""
        if first:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    def next(self) -> Request | None:
        """The next request, if one is waiting and a slot is free."""
        return self.waiting[0] if self.waiting and None in self.slots else None

    def give_slot(self, request: Request) -> int:
        """Move a waiting request into a free slot; returns the slot's index."""
        slot = self.slots.index(None)
        self.waiting.remove(request)
        self.slots[slot] = request
        request.slot, request.phase = slot, Phase.PREFILL
        return slot

    def sharing(self, request: Request, has_room: Callable[[Request, Sequence[Request]], bool]) -> list[Request]:
        """Select the waiting requests that share the prefill ``request`` is about to start.

        Requests that are next in the queue take free slots. Others stay in the queue, and hold their compressed prompt
        until they get a slot.

        Args:
            request: The request, which has its slot.
            has_room: Whether there is memory for the compressed prompt of one more request, besides those of others.

        Returns:
            Requests that took a slot, then those that stay in the queue.
        """
        with_slot: list[Request] = []
        staying: list[Request] = []
        for other in list(self.waiting):
            if other.sequence is not None or not other.shares_prompt_with(request):
                continue
            if other is self.next():
                self.give_slot(other)
                with_slot.append(other)
            elif has_room(other, staying):
                staying.append(other)
        return [*with_slot, *staying]

    def finish(self, request: Request) -> int | None:
        """Remove a request in any phase; returns the slot it frees, if it had one."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        slot, request.slot = request.slot, None
        if slot is not None:
            self.slots[slot] = None
        request.phase = Phase.FINISHED
        return slot

    @property
    def running(self) -> list[Request]:
        """Requests that are being decoded."""
        return [request for request in self.slots if request is not None and request.phase is Phase.DECODE]

    @property
    def busy(self) -> bool:
        """Whether any request is waiting or running."""
        return bool(self.waiting) or any(request is not None for request in self.slots)
