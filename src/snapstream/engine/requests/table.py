"""All requests that have not ended: where each one is, its slot, and the memory that it holds."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from snapstream.cache import CacheSizes
from snapstream.engine.decode.renewal import Placement
from snapstream.engine.prefill.job import PrefillJob
from snapstream.engine.prefill.result import PrefillResult
from snapstream.engine.requests.output import FinishReason, SlotUse, Token
from snapstream.engine.requests.report import slot_use
from snapstream.engine.requests.request import Phase, Request

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Prefilling:
    """A prefill in progress.

    Attributes:
        job: The job.
        readers: The requests it is for, in the order of the job's targets.
    """

    job: PrefillJob
    readers: list[Request]


class RequestTable:
    """The requests of an engine. Nothing else changes a request.

    ::

        add            admit             start            finish
        ───> WAITING ────────> PREFILL ────────> DECODE ─────────> DONE

    A request has a slot from PREFILL on, because its prompt is compressed directly into the slot. It can end in any
    phase. Requests with the same prompt share its prefill: those that find no free slot keep waiting, hold their
    compressed prompt, and start from it when they get one.

    Attributes:
        requests: All of them, by id.
        waiting: Those that wait, in order.
        slots: Those that have a slot, by slot.
        prefills: The prefills in progress, by lane.
    """

    def __init__(self, slots: int, sizes: CacheSizes, spare: int) -> None:
        """Create an empty table.

        Args:
            slots: Number of slots.
            sizes: Sizes of caches.
            spare: Bytes for the compressed prompts of requests that wait.
        """
        self.requests: dict[str, Request] = {}
        self.waiting: deque[Request] = deque()
        self.slots: list[Request | None] = [None] * slots
        self.prefills: dict[int, Prefilling] = {}
        self.spare = spare
        self._sizes = sizes
        self._last_uses: list[SlotUse | None] = [None] * slots

    # -- what there is ------------------------------------------------------------------------------------------------

    @property
    def running(self) -> list[Request]:
        """Requests that are being decoded."""
        return [request for request in self.slots if request is not None and request.phase is Phase.DECODE]

    @property
    def readers(self) -> list[Request]:
        """Requests whose prompt is being prefilled."""
        return [request for prefill in self.prefills.values() for request in prefill.readers]

    @property
    def has_free_slot(self) -> bool:
        """Whether a slot is free."""
        return None in self.slots

    def job_of(self, request: Request) -> PrefillJob | None:
        """The job that prefills a request's prompt now."""
        return next((each.job for each in self.prefills.values() if request in each.readers), None)

    def uses(self) -> list[SlotUse | None]:
        """The use of each slot, now or by its last request; ``None`` for a slot that was never used."""
        uses = list(self._last_uses)
        for request in self.running:
            uses[request.own_slot] = slot_use(request, request.own_slot, self._sizes)
        return uses

    # -- transitions --------------------------------------------------------------------------------------------------

    def add(self, request: Request, *, first: bool = False) -> None:
        """Queue a request, at the end or at the head."""
        self.requests[request.request_id] = request
        if first:
            self.waiting.appendleft(request)
        else:
            self.waiting.append(request)

    def admit(self, request: Request) -> int:
        """Give a waiting request a free slot; returns the slot's index."""
        slot = self.slots.index(None)
        self.waiting.remove(request)
        self.slots[slot] = request
        request.slot, request.phase = slot, Phase.PREFILL
        return slot

    def admit_sharing(self, request: Request) -> list[Request]:
        """Select the requests that share the prefill of ``request``, which has just got its slot.

        Those that are next in the queue get free slots. Others keep waiting, as long as the spare memory has room for
        their compressed prompts.

        Returns:
            Requests that got a slot, then those that keep waiting.
        """
        admitted: list[Request] = []
        staying: list[Request] = []
        for other in list(self.waiting):
            if other.prefilled is not None or not other.shares_prompt_with(request):
                continue
            if other is self.waiting[0] and self.has_free_slot:
                self.admit(other)
                admitted.append(other)
            elif self._has_room_for([*staying, other]):
                staying.append(other)
        return [*admitted, *staying]

    def begin(self, job: PrefillJob, readers: Sequence[Request]) -> None:
        """Record a prefill that begins."""
        self.prefills[job.lane] = Prefilling(job, list(readers))

    def end_prefill(self, prefill: Prefilling) -> None:
        """Forget a prefill that has ended, or is abandoned."""
        self.prefills = {lane: each for lane, each in self.prefills.items() if each is not prefill}

    def prefilled(self, request: Request, result: PrefillResult) -> None:
        """Store the result of a request's prefill."""
        request.prefilled = result

    def start(self, request: Request, token: Token | None) -> None:
        """Begin to decode a request.

        Args:
            request: The request, whose compressed prompt is in its slot.
            token: Its first token; ``None`` if it asked for none.
        """
        result = request.prefilled
        assert result is not None
        request.placement = Placement.of_prompt(result.layouts[0], request.budget, result.positions)
        # Logits are kept for those who may go on from the prompt itself.
        logits = result.logits if token is None and request.keep else None
        request.prefilled = replace(result, sequence=None, positions=(), logits=logits)
        request.phase = Phase.DECODE
        if token is None:
            request.finish_reason = "length"
        else:
            self.append(request, [token])

    def append(self, request: Request, tokens: Sequence[Token]) -> None:
        """Add generated tokens; those after an end are dropped."""
        for token in tokens:
            if request.finish_reason is not None:
                break
            is_last = request.remaining <= 1
            grammar, is_complete = request.grammar, False
            if grammar is not None and not request.text.ends_at(token.token_id):
                grammar.accept(token.token_id)
                is_complete = grammar.finished
            if request.text.append(token.token_id, token.logprobs, last=is_last or is_complete) or is_complete:
                request.finish_reason = "stop"
            elif is_last:
                request.finish_reason = "length"

    def count_drafts(self, request: Request, drafted: int, accepted: int) -> None:
        """Count the draft tokens of one step."""
        request.drafted += drafted
        request.accepted += accepted

    def place(self, request: Request, placement: Placement) -> None:
        """Store a request's new placement."""
        request.placement = placement

    def end(self, request: Request, reason: FinishReason, error: str | None = None) -> None:
        """State why a request ends; it keeps its slot until :meth:`finish`."""
        request.finish_reason, request.error = reason, error

    def fail(self, request: Request, error: Exception) -> None:
        """End one request because of its own error; others are not affected."""
        logger.error("request %s failed", request.request_id, exc_info=error)
        self.end(request, "error", f"{type(error).__name__}: {error}")

    def finish(self, request: Request) -> int | None:
        """Remove a request in any phase; returns the slot it frees, if it had one."""
        if request.phase is Phase.WAITING:
            self.waiting.remove(request)
        for prefill in list(self.prefills.values()):
            if request in prefill.readers:
                at = prefill.readers.index(request)
                del prefill.readers[at], prefill.job.targets[at]
                if not prefill.readers:
                    self.end_prefill(prefill)
        slot, request.slot = request.slot, None
        if slot is not None:
            self._remember_use(request, slot)
            self.slots[slot] = None
        request.phase = Phase.DONE
        del self.requests[request.request_id]
        return slot

    # -- after an interrupt -------------------------------------------------------------------------------------------

    def untouched(self, told: Collection[str]) -> list[Request]:
        """Requests that wait and have not ended; ``told`` are the ids of those whose end has been reported."""
        waiting = (request for request in self.waiting if self.requests.get(request.request_id) is request)
        return [request for request in waiting if request.finish_reason is None and request.request_id not in told]

    def keep_only(self, waiting: Sequence[Request]) -> None:
        """Forget everything but these requests, whatever state an interrupt has left behind; frees all slots."""
        for slot, request in enumerate(self.slots):
            if request is not None:
                self._remember_use(request, slot)
        self.slots = [None] * len(self.slots)
        self.prefills = {}
        for request in waiting:
            request.slot, request.phase = None, Phase.WAITING
        self.waiting = deque(waiting)
        self.requests = {request.request_id: request for request in waiting}

    def _remember_use(self, request: Request, slot: int) -> None:
        if request.phase is Phase.DECODE:
            self._last_uses[slot] = replace(slot_use(request, slot, self._sizes), busy=False)

    def _has_room_for(self, requests: Sequence[Request]) -> bool:
        """Whether the spare memory has room for the compressed prompts of these requests, besides those it holds."""
        stored = (request.prefilled.sequence for request in self.waiting if request.prefilled is not None)
        held = sum(sequence.nbytes for sequence in stored if sequence is not None)
        coming = sum(self._sizes.of_prompt(len(request.prompt), request.budget.capacity) for request in requests)
        return held + coming <= self.spare
