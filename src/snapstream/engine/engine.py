"""The engine: requests in, tokens out. Each step runs one prefill chunk and one decode launch."""

from __future__ import annotations

import itertools
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from snapstream.cache import CompressedSequence
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
from snapstream.engine.tokenizing import PromptTokenizer, give_memory_back
from snapstream.errors import ConfigurationError, RequestError
from snapstream.kernels import cpu as cpu_kernels
from snapstream.models import load_model, resolve_checkpoint

logger = logging.getLogger(__name__)


class Engine:
    """The slots and the requests that run in them.

    A server drives it with :meth:`add_request`, :meth:`step` and :meth:`abort`. An engine belongs to one thread and
    does no locking. Only :meth:`tokenize` may be called from other threads.
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
            budget: Cache of one sequence: a :class:`CacheBudget` or its number of entries; ``None`` for a full cache of
                ``max_model_len`` entries.
            config: Engine settings.
            report_plan: Called with the memory plan before anything is loaded; by default, its summary is printed to
                stderr.
            **settings: Fields of :class:`EngineConfig`, instead of ``config``: ``max_model_len``, ``slots``,
                ``prefill_chunk``, ``dtype``, ``device``, ...

        Raises:
            ConfigurationError: The settings are invalid or incompatible with each other.
            CheckpointError: The checkpoint is missing, corrupt or unsupported.
            MemoryPlanError: The engine does not fit into memory; the message says which settings would fit.
        """
        if config is not None and settings:
            raise ConfigurationError(f"give config or individual settings, not both ({', '.join(sorted(settings))})")
        if config is None:
            unknown = sorted(set(settings) - set(EngineConfig.__dataclass_fields__))
            if unknown:
                allowed = ", ".join(sorted(EngineConfig.__dataclass_fields__))
                raise ConfigurationError(f"unknown engine setting {', '.join(unknown)}; allowed: {allowed}")
            config = EngineConfig(**settings)
        setup = set_up(model, budget, config)
        spec = setup.spec
        if budget is not None and not spec.has_budget:
            logger.warning(
                "Every layer of this model has a sliding window, so its cache has a fixed size already: the budget has "
                "no effect."
            )
        self.model, self.config, self.spec, self.device, self.types = model, config, spec, setup.device, setup.types
        self.max_model_len, self.budget = setup.max_model_len, setup.budget
        self._sizes = spec.sizes(self.types.cache)
        plan = plan_engine(setup, available_memory(self.device, config.memory_fraction))
        self.plan = plan.ours
        (report_plan or _print_plan)(plan)
        plan.check()
        checkpoint = resolve_checkpoint(model)  # for a hub id, weights are downloaded only now
        self.files = SequenceFiles(setup, checkpoint)
        self.tokenizer = load_tokenizer(str(checkpoint))
        self._admission = Admission(self.tokenizer, spec, self.budget, config, max_model_len=self.max_model_len)
        self.sampling_defaults = load_sampling_defaults(str(checkpoint))
        if self.device.type == "cpu":
            cpu_kernels.available()  # builds them now: the model's matrix products check for them
        loaded = load_model(checkpoint, spec, self.types.weights, self.device)
        drafter = make_drafter(setup, self.tokenizer)
        self.executor = Executor(setup, loaded, drafter, padded=self.plan.padded_len)
        # Spare memory: holds compressed prompts that were prefilled for several requests until those have a slot.
        self._spare = self.plan.slots if plan.available is None else max(0, plan.available - self.plan.total)
        self.scheduler = Scheduler(config.slots)
        self._requests: dict[str, Request] = {}
        self._last_uses: list[SlotUse | None] = [None] * config.slots
        self._numbers = itertools.count()
        # Outputs that were not returned yet, and requests whose outputs are to be dropped.
        self._undelivered: list[RequestOutput] = []
        self._unwanted: set[str] = set()
        # Whether first tokens were returned and the decode launch of that step was left to the next one.
        self._launch_is_due = False
        # Whether a change is in progress, or was interrupted by an error or a signal; see _mend().
        self._changing = False
        self._broken_by = ""
        self._process = os.getpid()
        give_memory_back()  # a tokenizer is built from lists that are larger than itself

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
            prompt: Text or token ids; only the new part if there is a ``past``.
            params: Sampling parameters; greedy by default.
            request_id: An id that is not in use; generated by default.
            past: Earlier turns: the ``saved`` of an earlier output, or a sequence from a file (:attr:`files`). The
                prompt is prefilled over this compressed cache, and both are compressed again at its end. With an empty
                prompt, a cache that was prefilled with ``max_tokens=0`` is decoded unchanged.
            keep: Whether to return the compressed cache with the last output, for a next turn or a file.
            first: Whether to put the request at the head of the queue.

        Returns:
            The request's id.

        Raises:
            RequestError: The request cannot be served; the message says why. No other request is affected.
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
        """Abort a request in any phase and free its slot at once. Unknown or finished requests are ignored.

        The next :meth:`step` returns its final output.

        Returns:
            Whether the request was found.
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
        """Abort those of these requests that still run, and drop all their outputs."""
        self._unwanted.update(request_ids)
        # The garbage collector may close a stream in the middle of a step; the rest is then done at the step's end.
        if not self._changing:
            self._discard_unwanted()

    def reset(self) -> None:
        """Drop all requests without outputs and free all slots; works whatever state an error has left behind."""
        self._changing = True
        self._requests.clear()
        self._undelivered.clear()
        self._unwanted.clear()
        self._forget_running()

    @property
    def special_tokens(self) -> frozenset[int]:
        """The tokenizer's special tokens, which are not text."""
        return self._admission.special_tokens

    @property
    def busy(self) -> bool:
        """Whether :meth:`step` has work to do or outputs to return."""
        return self._changing or self.scheduler.busy or bool(self._undelivered)

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
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def step_for(self, names: Sequence[str]) -> list[RequestOutput]:
        """Return outputs of some requests, running a step first if there are none. Outputs of other requests are kept.

        Raises:
            RequestError: All of these requests were dropped by :meth:`reset` or :meth:`discard`.
        """
        wanted = set(names)
        if not any(output.request_id in wanted for output in self._undelivered):
            if not wanted.intersection(self._requests):
                raise RequestError("the engine has dropped this request: reset() or discard() was called meanwhile")
            self._run_step()
        mine = [output for output in self._undelivered if output.request_id in wanted]
        self._undelivered = [output for output in self._undelivered if output.request_id not in wanted]
        return mine

    def prefill_progress(self, request_id: str) -> tuple[int, int]:
        """Prefill progress of a running request: tokens done, and tokens of the prompt.

        Prefill takes all tokens through one layer before the next, so the first number is the share of the work that is
        done, times the prompt's length.

        Raises:
            RequestError: No such request is running.
        """
        request = self._requests.get(request_id)
        if request is None:
            raise RequestError(f"no request {request_id!r} is running")
        length = len(request.prompt)
        if request.layouts or request.sequence is not None:
            return length, length
        reading = self.executor.reading
        is_read = reading is not None and any(reader is request for reader, _ in self.executor.readers)
        return (int(reading.share * length) if reading is not None and is_read else 0), length

    @property
    def request_ids(self) -> list[str]:
        """Ids of requests that wait or run, or whose last output has not been returned."""
        return [*self._requests, *(output.request_id for output in self._undelivered)]

    @property
    def reading(self) -> list[str]:
        """Ids of the requests whose prompt is being prefilled; if there are several, they have the same prompt."""
        return [request.request_id for request, _ in self.executor.readers]

    def slots(self) -> list[SlotUse | None]:
        """The use of each slot, now or by its last request; ``None`` for a slot that was never used."""
        uses = list(self._last_uses)
        for request in self.scheduler.running:
            assert request.slot is not None
            uses[request.slot] = slot_use(request, self._sizes)
        return uses

    def context_budget(self, asked: int | CacheBudget | None = None) -> CacheBudget:
        """The cache budget of a stored context; see :meth:`CacheBudget.for_context`."""
        return self.budget.for_context(asked, self.config.kept_queries)

    def kept_bytes(self, tokens: int, kv_budget: int | CacheBudget | None = None) -> int:
        """Bytes of the compressed cache of a prompt of ``tokens`` tokens, if it is returned (``keep``).

        Raises:
            RequestError: The budget is invalid.
        """
        budget = self.budget.for_request(kv_budget, self.config.kept_queries)
        return self._sizes.saved([group.lay_out(tokens, budget).count for group in self.spec.groups])

    @property
    def texts(self) -> PromptTokenizer:
        """The tokenizer of prompts, which stops where a prompt can no longer fit."""
        return self._admission.texts

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Tokenize a prompt as the engine does; may be called from any thread.

        Raises:
            RequestError: The prompt is not valid text, or has tokens that are not in the model's vocabulary.
        """
        return self._admission.tokenize(prompt)

    # -- staying consistent -------------------------------------------------------------------------------------------

    def _check_process(self) -> None:
        """Refuse to work in a forked process: worker threads are not copied by a fork, so work would hang."""
        if os.getpid() != self._process:
            raise RequestError(
                f"this engine was created in process {self._process} and cannot be used in its fork, process "
                f"{os.getpid()}: create the engine after the fork, or use the start method 'spawn'"
            )

    def _mend(self) -> None:
        """Repair the engine after an interrupted change: running requests end with an error, waiting ones are kept.

        An interrupt in here leaves the work to the next call, because each part can be repeated.
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
            if request.slot is not None and request.layouts:
                self._last_uses[request.slot] = slot_use(request, self._sizes)
            self._undelivered.append(self._output(request))
        self._forget_running(waiting)

    def _forget_running(self, waiting: Sequence[Request] = ()) -> None:
        """Free all slots and drop all requests except those in ``waiting``."""
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
            while self._unwanted:  # more may be added while this runs
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
        """Generate an id that no request has."""
        while self._is_known(name := f"request-{next(self._numbers)}"):
            pass
        return name

    # -- one step -----------------------------------------------------------------------------------------------------

    def _run_step(self) -> None:
        """Do the work of one step; outputs are queued for :meth:`step` and :meth:`step_for`."""
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
        """Run a decode launch; returns the requests that it decoded."""
        going = [request for request in self.scheduler.running if request.finish_reason is None]
        if going:
            for request, error in self.executor.launch(going):
                self._fail(request, error)
        return going

    def _read(self) -> list[Request]:
        """Assign free slots to the next requests, and do as much prefill work as one chunk through all layers.

        Returns:
            Requests that have ended, or whose first token is available.
        """
        touched = []
        while (request := self.scheduler.next()) is not None:
            if request.sequence is not None:  # prefilled with another request's, or continued unchanged
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
                    except Exception:  # for example, not enough memory for the requests without a slot
                        if len(with_slot) == len(readers):
                            raise
                        self.executor.begin(with_slot, self.scheduler.waiting)
                except Exception as error:
                    touched += self._fail_readers(with_slot, error)
            else:
                break
        if self.executor.reading is None:
            return touched
        readers = [request for request, _ in self.executor.readers]  # an error may come after they have been let go
        try:
            read = self.executor.read(self.spec.cached_layers)
        except Exception as error:
            self.executor.stop_reading()
            return touched + self._fail_readers(readers, error)
        for request, failure in read:
            if failure is not None:
                self._fail(request, failure)
                touched.append(request)
            elif request.slot is not None:
                self._attempt(request, self.executor.start)
                touched.append(request)
        return touched

    def _room_for_one_more(self, request: Request, others: Sequence[Request]) -> bool:
        """Whether the spare memory has room for the compressed prompts of ``others`` and ``request``."""
        held = sum(r.sequence.nbytes for r in self.scheduler.waiting if r.sequence is not None)
        coming = sum(self._sizes.of_prompt(len(r.prompt), r.budget.capacity) for r in (*others, request))
        return held + coming <= self._spare

    def _fail_readers(self, readers: Sequence[Request], error: Exception) -> list[Request]:
        """Fail the requests that have a slot; the others keep waiting, and get their own prefill later."""
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
        """End one request because of its own error; others are not affected."""
        logger.error("request %s failed", request.request_id, exc_info=error)
        request.finish_reason, request.error = "error", f"{type(error).__name__}: {error}"

    def _finish(self, request: Request) -> None:
        if request.slot is not None and request.layouts:
            self._last_uses[request.slot] = slot_use(request, self._sizes)
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
        return output_of(request, new_text, saved, self._sizes)


def _print_plan(plan: EnginePlan) -> None:
    print(plan.summary(), file=sys.stderr)
