"""The engine: requests in, tokens out; one prefill chunk and one decode launch at a time."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from snapstream.cache import CompressedSequence
from snapstream.compression import lay_out
from snapstream.config import CacheBudget, EngineConfig, SamplingParams
from snapstream.engine.admission import Admission, Prompt
from snapstream.engine.change import Change
from snapstream.engine.drafters import make_drafter
from snapstream.engine.executor import Executor
from snapstream.engine.files import SequenceFiles
from snapstream.engine.memory import EnginePlan, available_memory, plan_engine
from snapstream.engine.output import RequestOutput, SlotUse
from snapstream.engine.report import output_of, slot_use
from snapstream.engine.request import Request
from snapstream.engine.scheduler import Scheduler
from snapstream.engine.settings import load_sampling_defaults, load_tokenizer, set_up
from snapstream.errors import ConfigurationError, RequestError
from snapstream.kernels import cpu as cpu_kernels
from snapstream.models import load_model, resolve_checkpoint

logger = logging.getLogger(__name__)


class Engine:
    """The slots and what runs in them; a server drives :meth:`add_request`, :meth:`step` and :meth:`abort`.

    It belongs to one thread; nothing here locks. :meth:`tokenize` alone may be called from others.
    """

    def __init__(
        self,
        model: str,
        *,
        budget: CacheBudget | int | None = None,
        config: EngineConfig | None = None,
        report_plan: Callable[[EnginePlan], None] | None = None,
        **settings: Any,
    ) -> None:
        """Plan memory, load the model and, on CUDA, build kernels and capture decode steps.

        Args:
            model: Directory of a Hugging Face checkpoint, or a hub id.
            budget: Cache of one sequence, a :class:`CacheBudget` or its number of entries; ``None`` is a full cache of
                ``max_model_len`` entries.
            config: Engine settings.
            report_plan: Called with the memory plan before anything is loaded; by default its summary is printed to
                stderr.
            **settings: Fields of :class:`EngineConfig`, instead of ``config``: ``max_model_len``, ``slots``,
                ``prefill_chunk``, ``dtype``, ``device``, ...

        Raises:
            ConfigurationError: Settings that cannot work together.
            CheckpointError: A checkpoint that is missing, corrupt or unsupported.
            MemoryPlanError: It does not fit; says which setting would.
        """
        if config is not None and settings:
            raise ConfigurationError(f"give config or single settings, not both ({', '.join(sorted(settings))})")
        if config is None:
            unknown = sorted(set(settings) - set(EngineConfig.__dataclass_fields__))
            if unknown:
                allowed = ", ".join(sorted(EngineConfig.__dataclass_fields__))
                raise ConfigurationError(f"unknown engine setting {', '.join(unknown)}; allowed: {allowed}")
            config = EngineConfig(**settings)
        setup = set_up(model, budget, config)
        spec = setup.spec
        self.model, self.config, self.spec, self.device, self.dtype = model, config, spec, setup.device, setup.dtype
        self.max_model_len, self.budget = setup.max_model_len, setup.budget
        plan = plan_engine(setup, available_memory(self.device, config.memory_fraction))
        self.plan = plan.ours
        (report_plan or _print_plan)(plan)
        plan.check()
        checkpoint = resolve_checkpoint(model)  # of a hub id, weights are fetched only now
        self.files = SequenceFiles(setup, checkpoint)
        self.tokenizer = load_tokenizer(str(checkpoint))
        self._admission = Admission(self.tokenizer, spec, self.budget, config, max_model_len=self.max_model_len)
        self.sampling_defaults = load_sampling_defaults(str(checkpoint))
        if self.device.type == "cpu":
            cpu_kernels.available()  # products of the model look for them
        loaded = load_model(checkpoint, spec, self.dtype, self.device)
        drafter = make_drafter(setup, self.tokenizer)
        self.executor = Executor(setup, loaded, drafter, padded=self.plan.padded_len)
        # What prompts that were read for several requests at once may take until these have a slot: what is left over.
        self._spare = self.plan.slots if plan.available is None else max(0, plan.available - self.plan.total)
        self.scheduler = Scheduler(config.slots)
        self._requests: dict[str, Request] = {}
        self._last_uses: list[SlotUse | None] = [None] * config.slots
        self._numbers = itertools.count()
        # Outputs that were not taken yet, and requests whose outputs will not be.
        self._undelivered: list[RequestOutput] = []
        self._unwanted: set[str] = set()
        # Whether first tokens were handed out before the decode launch of the same step.
        self._launch_is_due = False
        # Whether something is being changed, or was when an error or an interrupt broke it off; see _mend().
        self._changing = False
        self._broken_by = ""
        self._process = os.getpid()

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        past: CompressedSequence | None = None,
        keep: bool = False,
        first: bool = False,
    ) -> str:
        """Queue a request.

        Args:
            prompt: Text, or token ids; only what is new if there is a ``past``.
            params: How to sample; greedy by default.
            request_id: A name of the caller's, not in use; made up if not given.
            past: The turns before, as the ``saved`` of an earlier output, or from a file (:attr:`files`). The prompt is
                read over this compressed cache, and both are compressed again at its end. With a prompt of no tokens,
                what was read with ``max_tokens=0`` is decoded as it is.
            keep: Give the compressed cache out with the last output, for a next turn or a file.
            first: Put it at the head of the queue.

        Returns:
            The request's name.

        Raises:
            RequestError: Says what cannot be served; no other request is affected.
        """
        self._check_process()
        self._mend()
        name = self.new_name() if request_id is None else request_id
        if self._is_known(name):
            raise RequestError(f"request id {name!r} is in use")
        request = self._admission.admit(name, prompt, params, past=past, keep=keep)
        with Change(self):
            self._requests[name] = request
            self.scheduler.add(request, first=first)
        return name

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is and free its slot at once; unknown or finished ones are ignored.

        The next :meth:`step` returns its final output.

        Returns:
            Whether it was there.
        """
        self._mend()
        request = self._requests.get(request_id)
        if request is not None:
            with Change(self):
                request.finish_reason = "abort"
                self._undelivered.append(self._output(request))
                self._finish(request)
        return request is not None

    def discard(self, request_ids: Sequence[str]) -> None:
        """Abort what still runs of these requests, and return no more output of them."""
        self._unwanted.update(request_ids)
        # The garbage collector closes streams anywhere, also in the middle of a step: then its end does the rest.
        if not self._changing:
            self._discard_unwanted()

    def reset(self) -> None:
        """End all requests, without outputs, and free all slots, whatever state an error has left things in."""
        self._changing = True
        self._requests.clear()
        self._undelivered.clear()
        self._unwanted.clear()
        self._forget_running()

    @property
    def special_tokens(self) -> frozenset[int]:
        """Tokens that are no text."""
        return self._admission.special_tokens

    @property
    def busy(self) -> bool:
        """Whether :meth:`step` has anything to do, or to say."""
        return self._changing or self.scheduler.busy or bool(self._undelivered)

    def step(self) -> list[RequestOutput]:
        """Read at most ``prefill_chunk`` tokens' worth of a prompt, then run one decode launch.

        If the first token of a request that goes on comes of it, the launch is left to the next step, so that nobody
        waits for it.

        A request that fails by itself, such as in its tokenizer, ends with ``finish_reason="error"``; the others go
        on. After any other error, or an interrupt such as Ctrl-C, what the host knows may not be what the device has
        done: all that was read or decoded then ends with an error that says so, and what waits goes on.

        Returns:
            The output so far of every request that got new tokens or ended.
        """
        self._run_step()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def step_for(self, names: Sequence[str]) -> list[RequestOutput]:
        """Outputs of some requests, after a step if there were none; those of others stay for whoever waits for them.

        Raises:
            RequestError: All of them were ended by :meth:`reset` or :meth:`discard`.
        """
        wanted = set(names)
        if not any(output.request_id in wanted for output in self._undelivered):
            if not wanted.intersection(self._requests):
                raise RequestError("the engine has forgotten this request: reset() or discard() was called meanwhile")
            self._run_step()
        mine = [output for output in self._undelivered if output.request_id in wanted]
        self._undelivered = [output for output in self._undelivered if output.request_id not in wanted]
        return mine

    def prefill_progress(self, request_id: str) -> tuple[int, int]:
        """How much of a running request's prompt has been read, in tokens, and how many it has.

        All tokens pass one layer after the other, so it is the share of the work that is done, times the length.

        Raises:
            RequestError: No such request.
        """
        request = self._requests.get(request_id)
        if request is None:
            raise RequestError(f"no request {request_id!r} is running")
        length = len(request.prompt)
        if request.layout is not None or request.sequence is not None:
            return length, length
        reading = self.executor.reading
        is_read = reading is not None and any(reader is request for reader, _ in self.executor.readers)
        return (int(reading.share * length) if reading is not None and is_read else 0), length

    @property
    def request_ids(self) -> list[str]:
        """Requests that wait or run, or whose last output has not been taken."""
        return [*self._requests, *(output.request_id for output in self._undelivered)]

    @property
    def reading(self) -> list[str]:
        """The requests whose prompt is being read, which is the same."""
        return [request.request_id for request, _ in self.executor.readers]

    def slots(self) -> list[SlotUse | None]:
        """What each slot holds, or held last; ``None`` for one that was never used."""
        uses = list(self._last_uses)
        for request in self.scheduler.running:
            assert request.slot is not None
            uses[request.slot] = slot_use(request, self.plan.bytes_per_token)
        return uses

    def context_budget(self, asked: int | CacheBudget | None = None) -> CacheBudget:
        """The cache of a text that is stored to be asked about: see :meth:`CacheBudget.for_context`."""
        return self.budget.for_context(asked, self.config.kept_queries)

    def kept_bytes(self, tokens: int, kv_budget: int | CacheBudget | None = None) -> int:
        """Memory of what is left of a prompt of so many tokens, if it is given out (``keep``).

        Raises:
            RequestError: There can be no such cache.
        """
        entries = lay_out(tokens, self.budget.for_request(kv_budget, self.config.kept_queries)).count
        return entries * self.spec.saved_bytes_per_entry(self.dtype)

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Tokens of a prompt as the engine reads it; may be called from any thread.

        Raises:
            RequestError: Not text, or tokens that the model does not have.
        """
        return self._admission.tokenize(prompt)

    # -- staying consistent -------------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        """Refuse to work in a fork: the threads that share the work were not copied, and would be waited for."""
        if os.getpid() != self._process:
            raise RequestError(
                f"this engine was made by process {self._process} and cannot work in its fork, process {os.getpid()}: "
                "make an engine after the fork, or start processes with the method 'spawn'"
            )

    def _mend(self) -> None:
        """If a change was broken off, end all that ran with an error, and forget it; what waits is as it was.

        An interrupt in here leaves everything to the next call: each part can be done again.
        """
        if not self._changing:
            return
        told = {output.request_id for output in self._undelivered if output.finished}
        untouched = [r for r in self.scheduler.waiting if r.finish_reason is None and r.request_id in self._requests]
        waiting = [request for request in untouched if request.request_id not in told]
        settled = told | {request.request_id for request in waiting}
        for name, request in self._requests.items():
            if name in settled:
                continue
            request.finish_reason = "error"
            request.error = (
                f"the engine was interrupted ({self._broken_by or 'unknown'}) while this request was running; ask again"
            )
            if request.slot is not None and request.layout is not None:
                self._last_uses[request.slot] = slot_use(request, self.plan.bytes_per_token)
            self._undelivered.append(self._output(request))
        self._forget_running(waiting)

    def _forget_running(self, waiting: Sequence[Request] = ()) -> None:
        """Free all slots; nothing is left but what waits."""
        scheduler = Scheduler(self.config.slots)
        for request in waiting:
            scheduler.add(request)
        self.scheduler = scheduler
        self._requests = {request.request_id: request for request in waiting}
        self.executor.clear()
        self._changing, self._broken_by = False, ""
        self._discard_unwanted()

    def _discard_unwanted(self) -> None:
        if not self._unwanted:
            return
        with Change(self):
            while self._unwanted:  # more may come while this runs
                name = next(iter(self._unwanted))
                request = self._requests.get(name)
                if request is not None:
                    request.finish_reason = "abort"
                    self._finish(request)
                self._undelivered = [output for output in self._undelivered if output.request_id != name]
                self._unwanted.discard(name)

    def _is_known(self, name: str) -> bool:
        return name in self._requests or any(output.request_id == name for output in self._undelivered)

    def new_name(self) -> str:
        """A name that no request has."""
        while self._is_known(name := f"request-{next(self._numbers)}"):
            pass
        return name

    # -- one step -----------------------------------------------------------------------------------------------------

    def _run_step(self) -> None:
        """Do one step's work; the outputs are put where :meth:`step` takes them from."""
        self._check_process()
        with Change(self):
            touched = [] if self._launch_is_due else self._read()
            self._launch_is_due = any(request.finish_reason is None for request in touched)
            if not self._launch_is_due:
                touched += self._launch()
            for request in touched:
                self._undelivered.append(self._output(request))
                if request.finish_reason is not None:
                    self._finish(request)
        self._discard_unwanted()

    def _launch(self) -> list[Request]:
        """Decode; returns the requests that were in it."""
        going = [request for request in self.scheduler.running if request.finish_reason is None]
        if going:
            for request, error in self.executor.launch(going):
                self._fail(request, error)
        return going

    def _read(self) -> list[Request]:
        """Give free slots to who is next, and read as much of a prompt as one chunk is through all layers.

        Returns:
            Requests that have ended, or whose first token is there.
        """
        touched = []
        while (request := self.scheduler.next()) is not None:
            if request.sequence is not None:  # read with another's, or continued as it is
                self.scheduler.give_slot(request)
                touched.append(request)
                self._attempt(request, self._put_and_start)
            elif self.executor.reading is None:
                self.scheduler.give_slot(request)
                readers = [request, *self.scheduler.sharing(request, self._room_for_one_more)]
                with_slot = [reader for reader in readers if reader.slot is not None]
                try:
                    try:
                        self.executor.begin(readers, self.scheduler.waiting)
                    except Exception:  # such as too little memory after all for those who wait
                        if len(with_slot) == len(readers):
                            raise
                        self.executor.begin(with_slot, self.scheduler.waiting)
                except Exception as error:
                    touched += self._fail_readers(with_slot, error)
            else:
                break
        if self.executor.reading is None:
            return touched
        try:
            read = self.executor.read(self.spec.cached_layers)
        except Exception as error:
            return touched + self._fail_readers([request for request, _ in self.executor.stop_reading()], error)
        for request, failure in read:
            if failure is not None:
                self._fail(request, failure)
                touched.append(request)
            elif request.slot is not None:
                self._attempt(request, self.executor.start)
                touched.append(request)
        return touched

    def _room_for_one_more(self, request: Request, others: Sequence[Request]) -> bool:
        """Whether memory that nobody else was promised has room for the compressed prompts of these, too."""
        held = sum(r.sequence.nbytes for r in self.scheduler.waiting if r.sequence is not None)
        coming = sum(min(len(r.prompt), r.budget.capacity) for r in (*others, request)) * self.plan.bytes_per_token
        return held + coming <= self._spare

    def _fail_readers(self, readers: Sequence[Request], error: Exception) -> list[Request]:
        """End those who have a slot; the others wait, and will have a reading of their own."""
        failed = [request for request in readers if request.slot is not None]
        for request in failed:
            self._fail(request, error)
        return failed

    def _put_and_start(self, request: Request) -> None:
        self.executor.put(request)
        self.executor.start(request)

    def _attempt(self, request: Request, work: Callable[[Request], None]) -> None:
        try:
            work(request)
        except Exception as error:
            self._fail(request, error)

    def _fail(self, request: Request, error: Exception) -> None:
        """End one request because of an error of its own; the others are not touched."""
        logger.error("request %s failed", request.request_id, exc_info=error)
        request.finish_reason, request.error = "error", f"{type(error).__name__}: {error}"

    def _finish(self, request: Request) -> None:
        if request.slot is not None and request.layout is not None:
            self._last_uses[request.slot] = slot_use(request, self.plan.bytes_per_token)
        self.executor.drop(request)
        slot = self.scheduler.finish(request)
        if slot is not None:
            self.executor.decode.release(slot)
        del self._requests[request.request_id]

    def _output(self, request: Request) -> RequestOutput:
        saved, new_text = None, ""
        try:
            new_text = request.text.take_new(finished=request.finish_reason is not None)
            if request.keep and request.finish_reason in ("stop", "length"):
                saved = self.executor.save(request)
        except Exception as error:
            self._fail(request, error)
        return output_of(request, new_text, saved, self.plan.bytes_per_token)


def _print_plan(plan: EnginePlan) -> None:
    print(plan.summary(), file=sys.stderr)
