"""The engine: requests in, tokens out; one prefill chunk and one decode launch at a time."""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch

from snapstream.assets import PLAIN_CHAT, is_shipped
from snapstream.compression import surviving_tokens
from snapstream.config import CacheBudget, EngineConfig, SamplingParams
from snapstream.engine.admission import Admission, Prompt
from snapstream.engine.conversation import SavedSequence
from snapstream.engine.decode import Decode
from snapstream.engine.graphs import graph_pool
from snapstream.engine.memory import EnginePlan, available_memory, plan_engine
from snapstream.engine.output import RequestOutput, SlotUse, TokenLogprobs
from snapstream.engine.prefill import CompressedSequence, Prefill, kept_shares
from snapstream.engine.report import output_of, slot_use
from snapstream.engine.request import Request
from snapstream.engine.sampler import Sampled, SamplingState, sample
from snapstream.engine.scheduler import Scheduler
from snapstream.engine.settings import load_sampling_defaults, load_tokenizer, set_up
from snapstream.errors import ConfigurationError, RequestError
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
        """Plan memory, load the model and compile the graphs.

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
        self.tokenizer = load_tokenizer(str(checkpoint))
        # Used instead of the tokenizer's own; the shipped models have none of their own.
        self.chat_template = PLAIN_CHAT.read_text() if is_shipped(model) else None
        self._admission = Admission(self.tokenizer, spec, self.budget, config, max_model_len=self.max_model_len)
        self.sampling_defaults = load_sampling_defaults(str(checkpoint))
        eager = setup.eager
        loaded = load_model(checkpoint, spec, self.dtype, self.device)
        self.prefill = Prefill(
            loaded, setup.backend, self.budget, padded=self.plan.padded_len, chunk=config.prefill_chunk, eager=eager
        )
        self.decode = Decode(
            loaded,
            setup.backend,
            capacity=self.budget.capacity,
            slots=config.slots,
            steps=config.decode_steps,
            max_logprobs=config.max_logprobs,
            eager=eager,
        )
        self._first_token = SamplingState(1, spec.vocab_size, config.max_logprobs, self.device)
        self.scheduler = Scheduler(config.slots)
        self._requests: dict[str, Request] = {}
        self._last_uses: list[SlotUse | None] = [None] * config.slots
        self._numbers = itertools.count()
        # Outputs that were not taken yet, and requests whose outputs will not be.
        self._undelivered: list[RequestOutput] = []
        self._unwanted: set[str] = set()
        # Whether something is being changed, or was when an error or an interrupt broke it off; see _mend().
        self._changing = False
        self._broken_by = ""
        if not eager:
            pool = graph_pool(self.device)
            self.prefill.warm_up(pool)
            self.decode.warm_up(pool)

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        past: SavedSequence | None = None,
        keep: bool = False,
        first: bool = False,
    ) -> str:
        """Queue a request.

        Args:
            prompt: Text, or token ids; only what is new if there is a ``past``.
            params: How to sample; greedy by default.
            request_id: A name of the caller's, not in use; made up if not given.
            past: The turns before, as the ``saved`` of an earlier output. The prompt is read over this compressed
                cache, and both are compressed again at its end.
            keep: Give the compressed cache out with the last output, for a next turn.
            first: Put it at the head of the queue.

        Returns:
            The request's name.

        Raises:
            RequestError: Says what cannot be served; no other request is affected.
        """
        self._mend()
        name = self._new_name() if request_id is None else request_id
        if self._is_known(name):
            raise RequestError(f"request id {name!r} is in use")
        request = self._admission.admit(name, prompt, params, past=past, keep=keep)
        with _Change(self):
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
            with _Change(self):
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
        """Run at most one prefill chunk, then one decode launch.

        A request that fails by itself, such as in its tokenizer, ends with ``finish_reason="error"``; the others go
        on. After any other error, or an interrupt such as Ctrl-C, what the host knows may not be what the device has
        done: all that was read or decoded then ends with an error that says so, and what waits goes on.

        Returns:
            The output so far of every request that got new tokens or ended.
        """
        self._run_step()
        outputs, self._undelivered = self._undelivered, []
        return outputs

    def prefill_progress(self, request_id: str) -> tuple[int, int]:
        """Prompt tokens of a running request that have been read, and how many there are.

        Raises:
            RequestError: No such request.
        """
        if request_id not in self._requests:
            raise RequestError(f"no request {request_id!r} is running")
        request = self._requests[request_id]
        return request.prefilled, len(request.prompt)

    @property
    def request_ids(self) -> list[str]:
        """Requests that wait or run, or whose last output has not been taken."""
        return [*self._requests, *(output.request_id for output in self._undelivered)]

    @property
    def reading(self) -> str | None:
        """The request whose prompt is being read."""
        request = self.scheduler.prefilling
        return None if request is None else request.request_id

    def slots(self) -> list[SlotUse | None]:
        """What each slot holds, or held last; ``None`` for one that was never used."""
        running = self.scheduler.decoding
        return [
            last if one is None else slot_use(one, self.plan.bytes_per_token)
            for one, last in zip(running, self._last_uses, strict=True)
        ]

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Tokens of a prompt as the engine reads it; may be called from any thread.

        Raises:
            RequestError: Not text, or tokens that the model does not have.
        """
        return self._admission.tokenize(prompt)

    # -- staying consistent -------------------------------------------------------------------------------------------

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
            if request.slot is not None:
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
        self.prefill.forget()
        for slot in range(self.config.slots):
            self.decode.release(slot)
        self._changing, self._broken_by = False, ""
        self._discard_unwanted()

    def _discard_unwanted(self) -> None:
        if not self._unwanted:
            return
        with _Change(self):
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

    def _new_name(self) -> str:
        while self._is_known(name := f"request-{next(self._numbers)}"):
            pass
        return name

    # -- one step -----------------------------------------------------------------------------------------------------

    def _run_step(self) -> None:
        """Do one step's work; the outputs are put where :meth:`step` takes them from."""
        with _Change(self):
            prefilling = self.scheduler.next_prefill()
            touched: dict[str, Request] = {}
            if prefilling is not None and self._prefill_chunk(prefilling):
                touched[prefilling.request_id] = prefilling
            running = self.scheduler.running
            if running:
                self._decode_launch(running)
                touched.update((request.request_id, request) for request in running)
            for request in touched.values():
                self._undelivered.append(self._output(request))
                if request.finish_reason is not None:
                    self._finish(request)
        self._discard_unwanted()

    def _prefill_chunk(self, request: Request) -> bool:
        """Read one chunk of a prompt; at its end compress it, draw its first token and start decoding."""
        try:
            return self._read_chunk(request)
        except Exception as error:
            self._fail(request, error)
            return True

    def _read_chunk(self, request: Request) -> bool:
        start, length, past = request.prefilled, len(request.prompt), request.past
        scored = request.params.prompt_logprobs
        held = self.prefill.held(request.prompt, scored) if start == 0 and past is None else None
        if held is not None:  # the request before had the same prompt
            logits, request.prompt_logprobs = held
            request.prefilled = length
        else:
            if start == 0 and past is not None:
                self.prefill.load(past)
            entries = 0 if past is None else past.entries
            tokens = request.prompt[start : start + self.config.prefill_chunk]
            logits = self.prefill.run_chunk(tokens, entries + start, request.before - entries)
            request.prefilled += len(tokens)
            if scored is not None:
                following = request.prompt[start + 1 : request.prefilled + 1]
                more = self.prefill.score(following, scored)
                request.prompt_logprobs = (*(request.prompt_logprobs or (None,)), *more)
        if request.prefilled < length:
            return False
        sequence = self.prefill.finish(request.prompt, request.budget, logits, past, (scored, request.prompt_logprobs))
        request.plan = sequence.plan
        request.shares = kept_shares(sequence)
        if request.keep:
            request.positions = sequence.positions
        if request.params.telemetry:
            request.kept = self.prefill.telemetry(sequence)
        token = self._draw_first(request, sequence) if request.max_tokens else 0
        if not request.max_tokens:
            request.finish_reason = "length"
        slot = self.scheduler.start_decode(request)
        if request.finish_reason is None or request.keep:
            self.decode.insert(slot, sequence, token, self._first_token)
        return True

    def _draw_first(self, request: Request, sequence: CompressedSequence) -> int:
        """Draw the first token of an output, from what prefill says."""
        with torch.inference_mode():
            tokens = [*(request.past.tokens if request.past else ()), *request.prompt]
            prompt = torch.tensor(tokens, dtype=torch.int64, device=self.device)
            self._first_token.assign(0, request.params, request.seed, prompt, request.stop_ids)
            position = torch.tensor([sequence.position], device=self.device)
            active = torch.ones(1, dtype=torch.bool, device=self.device)
            forced = torch.tensor([*request.params.forced[:1], -1][:1], device=self.device)
            sampled = sample(sequence.logits, self._first_token, position, active, forced)
        token = int(sampled.tokens[0])
        request.append(token, _logprobs_of(sampled, 0, request.params.logprobs))
        return token

    def _decode_launch(self, running: list[Request]) -> None:
        going = [request for request in running if request.finish_reason is None]
        if not going:
            return
        greedy = all(request.params.plain_greedy for request in going)
        # No more steps than the request that needs most can use.
        steps = min(self.config.decode_steps, max(r.max_tokens - len(r.tokens) for r in going))
        results = self.decode.launch(steps, greedy=greedy, forced=_next_forced(going, steps))
        tokens = torch.stack([step.tokens for step in results]).tolist()
        details = None if greedy else [Sampled(*(tensor.cpu() for tensor in step)) for step in results]
        for request in going:
            slot = request.slot
            assert slot is not None
            for index in range(steps):
                if request.finish_reason is not None:
                    break  # what was decoded past a stop is thrown away
                wanted = request.params.logprobs
                try:
                    report = _logprobs_of(details[index], slot, wanted) if details and wanted is not None else None
                    request.append(tokens[index][slot], report)
                except Exception as error:
                    self._fail(request, error)

    def _fail(self, request: Request, error: Exception) -> None:
        """End one request because of an error of its own; the others are not touched."""
        logger.error("request %s failed", request.request_id, exc_info=error)
        request.finish_reason, request.error = "error", f"{type(error).__name__}: {error}"

    def _finish(self, request: Request) -> None:
        if request.slot is not None:
            self._last_uses[request.slot] = slot_use(request, self.plan.bytes_per_token)
        slot = self.scheduler.finish(request)
        if slot is not None:
            self.decode.release(slot)
        del self._requests[request.request_id]

    def _output(self, request: Request) -> RequestOutput:
        saved, new_text = None, ""
        try:
            new_text = request.take_new_text()
            if request.keep and request.finish_reason in ("stop", "length"):
                saved = self._save(request)
        except Exception as error:
            self._fail(request, error)
        return output_of(request, new_text, saved, self.plan.bytes_per_token)

    def _save(self, request: Request) -> SavedSequence:
        """Take out of its slot what a next turn may continue from: whole tokens, and nothing decoded past the end.

        How far the last launch went past the end depends on who else was running, so it is taken to have gone as far
        as it can: the same conversation always continues from the same cache.
        """
        plan, slot = request.plan, request.slot
        assert plan is not None
        assert slot is not None
        tokens = request.whole_tokens()
        written = plan.count + max(len(request.tokens) - 1, 0) + self.config.decode_steps
        indices = surviving_tokens(plan, plan.count + tokens, written)
        return self.decode.extract(
            slot,
            indices,
            plan,
            positions=request.positions,
            tokens=[*(request.past.tokens if request.past else ()), *request.prompt, *request.tokens[:tokens]],
            answer="".join(request.produced.pieces)[: request.ends[tokens - 1]] if tokens else "",
        )


class _Change:
    """Around everything that changes requests, slots or the device.

    What breaks off in between leaves the engine marked as changing. It is mended at once if that is possible, and in
    any case before the next change. A generator would be less code, but may be closed at any later moment.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __enter__(self) -> None:
        self.engine._mend()
        self.engine._changing = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.engine._changing = False
            return
        self.engine._broken_by = kind.__name__
        try:
            self.engine._mend()
        except Exception as another:  # the first one is what the caller has to know
            logger.error("the engine could not be mended after %s", kind.__name__, exc_info=another)


def _next_forced(requests: Sequence[Request], steps: int) -> dict[int, Sequence[int]]:
    """Forced tokens of the next steps, by slot."""
    ahead = {r.slot: r.params.forced[len(r.tokens) : len(r.tokens) + steps] for r in requests if r.slot is not None}
    return {slot: tokens for slot, tokens in ahead.items() if tokens}


def _print_plan(plan: EnginePlan) -> None:
    print(plan.summary(), file=sys.stderr)


def _logprobs_of(sampled: Sampled, row: int, wanted: int | None) -> TokenLogprobs | None:
    if wanted is None:
        return None
    ids, values = sampled.top_ids[row, :wanted].tolist(), sampled.top_logprobs[row, :wanted].tolist()
    return TokenLogprobs(int(sampled.tokens[row]), float(sampled.logprob[row]), dict(zip(ids, values, strict=True)))
