"""What an engine does whatever the model: requests in, outputs out, one step after another.

It is a table of requests, a runner, and a scheduler that says what goes next.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence

from snapstream.cache import CacheSizes
from snapstream.engine.pace import Pace
from snapstream.engine.requests.output import RequestOutput, SlotUse
from snapstream.engine.requests.report import output_of
from snapstream.engine.requests.request import Phase, Request
from snapstream.engine.requests.scheduler import Scheduler
from snapstream.engine.requests.table import RequestTable
from snapstream.engine.requests.transaction import Transaction
from snapstream.engine.runner import Runner
from snapstream.errors import RequestError

INTERRUPTED = "the engine was interrupted"
"""How the error of a request begins that was running in an interrupted step; its own errors begin with their class."""


class EngineCore:
    """The requests of an engine and the runner that works for them.

    It belongs to one thread and does no locking.

    Attributes:
        runner: Runs the model.
        table: The requests.
        scheduler: What goes next.
    """

    def __init__(
        self, runner: Runner, *, slots: int, sizes: CacheSizes, spare: int, max_gap: float | None = None
    ) -> None:
        """Create a core without requests.

        Args:
            runner: Runs the model.
            slots: Number of slots.
            sizes: Sizes of caches.
            spare: Bytes for compressed prompts that wait for a slot.
            max_gap: See :class:`Pace`.
        """
        self.runner = runner
        self._pace = Pace(max_gap)
        self.table = RequestTable(slots, sizes, spare)
        self.scheduler = Scheduler(self.table, runner.lanes)
        self._sizes = sizes
        self._numbers = itertools.count()
        # Outputs that were not returned yet, and requests whose outputs are to be dropped.
        self._outbox: list[RequestOutput] = []
        self._unwanted: set[str] = set()
        # Whether first tokens were returned and the decode launch of that step was left to the next one.
        self._launch_is_due = False
        self._transaction = Transaction(self._restore)
        self._process = os.getpid()

    # -- requests -----------------------------------------------------------------------------------------------------

    def add(self, request: Request, *, first: bool = False) -> None:
        """Queue a request, at the end or at the head of the queue.

        Raises:
            RequestError: Its id is in use.
        """
        self.check_process()
        self._transaction.mend()
        if self._is_known(request.request_id):
            raise RequestError(f"request id {request.request_id!r} is in use")
        with self._transaction:
            self.table.add(request, first=first)

    def abort(self, request_id: str) -> bool:
        """Abort a request in any phase and free its slot at once. Unknown or finished requests are ignored.

        The next :meth:`step` returns its final output.

        Returns:
            Whether the request was found.
        """
        self._transaction.mend()
        request = self.table.requests.get(request_id)
        if request is not None:
            with self._transaction:
                self.table.end(request, "abort")
                self._hand_out([request])
        return request is not None

    def discard(self, request_ids: Sequence[str]) -> None:
        """Abort those of these requests that still run, and drop all their outputs."""
        self._unwanted.update(request_ids)
        # The garbage collector may close a stream in the middle of a step; the rest is then done at the step's end.
        if not self._transaction.is_open:
            self._discard_unwanted()

    def reset(self) -> None:
        """Drop all requests without outputs and free all slots; works whatever state an error has left behind."""
        self._transaction.is_open = True
        self._outbox.clear()
        self._unwanted.clear()
        self.table.keep_only([])
        self._transaction.mend()

    @property
    def busy(self) -> bool:
        """Whether :meth:`step` has work to do or outputs to return."""
        return self._transaction.is_open or bool(self.table.requests) or bool(self._outbox)

    def new_name(self) -> str:
        """Generate an id that no request has."""
        while self._is_known(name := f"request-{next(self._numbers)}"):
            pass
        return name

    @property
    def request_ids(self) -> list[str]:
        """Ids of requests that wait or run, or whose last output has not been returned."""
        return [*self.table.requests, *(output.request_id for output in self._outbox)]

    @property
    def reading(self) -> list[str]:
        """Ids of the requests whose prompt is being prefilled: in each lane one, or several with the same prompt."""
        return [request.request_id for request in self.table.readers]

    def prefill_progress(self, request_id: str) -> tuple[int, int]:
        """Prefill progress of a running request: tokens done, and tokens of the prompt.

        Prefill takes all tokens through one layer before the next, so the first number is the share of the work that is
        done, times the prompt's length.

        Raises:
            RequestError: No such request is running.
        """
        request = self.table.requests.get(request_id)
        if request is None:
            raise RequestError(f"no request {request_id!r} is running")
        length, job = len(request.prompt), self.table.job_of(request)
        if request.prefilled is not None:
            return length, length
        return (0 if job is None else int(job.share * length)), length

    def slots(self) -> list[SlotUse | None]:
        """The use of each slot, now or by its last request; ``None`` for a slot that was never used."""
        return self.table.uses()

    # -- steps --------------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Prefill at most ``prefill_chunk`` tokens' worth of a prompt, then run one decode launch.

        If the prefill yields the first token of a request that is not finished, the launch is left to the next step.
        The first token is then returned without waiting for the launch.

        A request that fails on its own, for example in its tokenizer, ends with ``finish_reason="error"``, and the
        others continue. After any other error, or an interrupt such as Ctrl-C, the host's state may not match the
        device's. All requests that were being prefilled or decoded then end with an error that says so; waiting
        requests are kept.

        Returns:
            The output so far of every request that got new tokens or ended.
        """
        self._run_step()
        outputs, self._outbox = self._outbox, []  # nothing is called here, where an interrupt could lose them
        return outputs

    def take_outputs(self) -> list[RequestOutput]:
        """Return the outputs that are ready, such as those that an interrupted :meth:`step` has left."""
        outputs, self._outbox = self._outbox, []
        return outputs

    def step_for(self, names: Sequence[str]) -> list[RequestOutput]:
        """Return outputs of some requests, running a step first if there are none. Outputs of other requests are kept.

        Raises:
            RequestError: All of these requests were dropped by :meth:`reset` or :meth:`discard`.
        """
        wanted = set(names)
        if not any(output.request_id in wanted for output in self._outbox):
            if not wanted.intersection(self.table.requests):
                raise RequestError("the engine has dropped this request: reset() or discard() was called meanwhile")
            self._run_step()
        mine = [output for output in self._outbox if output.request_id in wanted]
        self._outbox = [output for output in self._outbox if output.request_id not in wanted]
        return mine

    def _run_step(self) -> None:
        """Do the work of one step; outputs are queued for :meth:`step` and :meth:`step_for`."""
        self.check_process()
        with self._transaction:
            begun = [] if self._launch_is_due else [*self._begin_waiting(), *self._prefill()]
            self._hand_out(begun)
            self._launch_is_due = any(request.phase is Phase.DECODE for request in begun)
            if not self._launch_is_due:
                self._hand_out(self._decode())
        self._discard_unwanted()

    def _begin_waiting(self) -> list[Request]:
        """Give free slots to the next requests; returns those that have started to decode, or failed."""
        touched = []
        while (request := self.scheduler.next_request()) is not None:
            self.table.admit(request)
            if request.prefilled is None:
                touched += self._begin_prefill(request)
            else:  # prefilled with another request's prompt, or continued unchanged
                self._start(request)
                touched.append(request)
        return touched

    def _begin_prefill(self, request: Request) -> list[Request]:
        """Begin to prefill a request's prompt, for all that have the same; returns those that failed."""
        readers = [request, *self.table.admit_sharing(request)]
        with_slot = [reader for reader in readers if reader.slot is not None]
        lane = self.scheduler.lane_of(request)
        try:
            try:
                job = self.runner.begin(readers, lane)
            except Exception:  # for example, not enough memory for the requests without a slot
                if len(with_slot) == len(readers):
                    raise
                readers = with_slot
                job = self.runner.begin(readers, lane)
        except Exception as error:
            return self._fail_prefill(readers, error)
        self.table.begin(job, readers)
        return []

    def _prefill(self) -> list[Request]:
        """Go on with a prefill; returns the requests that have started to decode, or failed."""
        prefill = self.scheduler.next_prefill()
        if prefill is None:
            return []
        try:
            seconds = self._pace.seconds(self.runner.steps) if self.table.running else None
            results = self.runner.prefill(prefill.job, seconds)
        except Exception as error:
            self.table.end_prefill(prefill)
            return self._fail_prefill(prefill.readers, error)
        if results is None:
            return []
        self.table.end_prefill(prefill)
        touched = []
        for request, result in zip(prefill.readers, results, strict=True):
            if isinstance(result, Exception):
                self.table.fail(request, result)
            else:
                self.table.prefilled(request, result)
                if request.slot is None:  # waits for one
                    continue
                self._start(request)
            touched.append(request)
        return touched

    def _start(self, request: Request) -> None:
        """Draw the first token of a request whose prompt has been prefilled, now or earlier."""
        try:
            self.table.start(request, self.runner.start(request))
        except Exception as error:
            self.table.fail(request, error)

    def _decode(self) -> list[Request]:
        """Run a decode launch; returns the requests that it decoded."""
        batch = self.table.running
        if not batch:
            return []
        for request in batch:
            if request.until_renewal <= 0:
                self.table.place(request, self.runner.renew(request))
        with self._pace.measured() as counts:
            result = self.runner.decode(batch, self._pace.steps(prompts=bool(self.table.prefills)))
            # A step that verifies draft tokens takes its time however many are accepted.
            counts.append(1 if result.drafted is not None else max(map(len, result.tokens)))
        for at, request in enumerate(batch):
            tokens = result.tokens[at]
            if result.drafted is not None:
                self.table.count_drafts(request, result.drafted[at], min(result.drafted[at], len(tokens) - 1))
            try:
                self.table.append(request, tokens)
            except Exception as error:
                self.table.fail(request, error)
        return batch

    def _fail_prefill(self, readers: Sequence[Request], error: Exception) -> list[Request]:
        """Fail the requests that have a slot; the others keep waiting, and get their own prefill later."""
        failed = [request for request in readers if request.slot is not None]
        for request in failed:
            self.table.fail(request, error)
        return failed

    def _hand_out(self, touched: Sequence[Request]) -> None:
        """Queue the outputs of these requests, and let go of those that have ended."""
        for request in touched:
            self._outbox.append(self._output(request))
            if request.finish_reason is not None:
                self._finish(request)

    def _output(self, request: Request) -> RequestOutput:
        saved, new_text = None, ""
        try:
            new_text = request.text.take_new(finished=request.finish_reason is not None)
            if request.keep and request.finish_reason in ("stop", "length"):
                saved = self.runner.save(request)
        except Exception as error:
            self.table.fail(request, error)
        return output_of(request, new_text, saved, self._sizes)

    def _finish(self, request: Request) -> None:
        slot = self.table.finish(request)
        if slot is not None:
            self.runner.release(slot)

    # -- staying consistent -------------------------------------------------------------------------------------------

    def check_process(self) -> None:
        """Refuse to work in a forked process: worker threads are not copied by a fork, so work would hang.

        Raises:
            RequestError: This is a fork of the process that created the engine.
        """
        if os.getpid() != self._process:
            raise RequestError(
                f"this engine was created in process {self._process} and cannot be used in its fork, process "
                f"{os.getpid()}: create the engine after the fork, or use the start method 'spawn'"
            )

    def _restore(self, broken_by: str) -> None:
        """Restore what :class:`Transaction` promises; each part can be repeated."""
        told = {output.request_id for output in self._outbox if output.finished}
        waiting = self.table.untouched(told)
        kept = told | {request.request_id for request in waiting}
        for name, request in self.table.requests.items():
            if name not in kept:
                self.table.end(
                    request,
                    "error",
                    f"{INTERRUPTED} ({broken_by}) while this request was running; ask again",
                )
                self._outbox.append(self._output(request))
        self.table.keep_only(waiting)
        self.runner.clear()
        self._drop_unwanted()

    def _discard_unwanted(self) -> None:
        if self._unwanted:
            with self._transaction:
                self._drop_unwanted()

    def _drop_unwanted(self) -> None:
        while self._unwanted:  # more may be added while this runs
            name = next(iter(self._unwanted))
            request = self.table.requests.get(name)
            if request is not None:
                self.table.end(request, "abort")
                self._finish(request)
            self._outbox = [output for output in self._outbox if output.request_id != name]
            self._unwanted.discard(name)

    def _is_known(self, name: str) -> bool:
        return name in self.table.requests or any(output.request_id == name for output in self._outbox)
