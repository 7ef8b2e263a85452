"""Who runs next: first come, first served, into a fixed number of slots."""

from __future__ import annotations

from collections import deque

from snapstream.engine.request import Phase, Request


class Scheduler:
    """Requests wait in order, one at a time is prefilled, and up to ``slots`` are decoded.

    A prefill starts only when a slot is free for its result, so a compressed sequence never waits for a place.
    """

    def __init__(self, slots: int) -> None:
        self.waiting: deque[Request] = deque()
        self.prefilling: Request | None = None
        self.decoding: list[Request | None] = [None] * slots

    def add(self, request: Request, *, first: bool = False) -> None:
        """Put a request at the end of the queue, or at its head."""
        if first:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    def next_prefill(self) -> Request | None:
        """The request whose next prompt chunk is to run, if there is one and a slot for it."""
        if self.prefilling is None and self.waiting and None in self.decoding:
            self.prefilling = self.waiting.popleft()
            self.prefilling.phase = Phase.PREFILL
        return self.prefilling

    def start_decode(self, request: Request) -> int:
        """Move the prefilled request into a free slot; returns the slot."""
        slot = self.decoding.index(None)
        self.prefilling = None
        self.decoding[slot] = request
        request.slot, request.phase = slot, Phase.DECODE
        return slot

    def finish(self, request: Request) -> int | None:
        """Take a request out, wherever it is; returns the slot it frees, if it had one."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        elif request.phase is Phase.PREFILL:
            self.prefilling = None
        slot, request.slot = request.slot, None
        if slot is not None:
            self.decoding[slot] = None
        request.phase = Phase.FINISHED
        return slot

    @property
    def running(self) -> list[Request]:
        """Requests being decoded."""
        return [request for request in self.decoding if request is not None]

    @property
    def busy(self) -> bool:
        """Whether anything waits or runs."""
        return bool(self.waiting or self.prefilling or self.running)
