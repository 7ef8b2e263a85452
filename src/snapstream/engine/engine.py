"""The engine: requests in, tokens out; one prefill chunk and one decode launch at a time."""

from __future__ import annotations

import itertools
import logging
import operator
import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from snapstream.attention import choose_backend
from snapstream.compression import surviving_tokens
from snapstream.config import CacheBudget, EngineConfig, SamplingParams
from snapstream.engine.conversation import SavedSequence
from snapstream.engine.decode import Decode
from snapstream.engine.graphs import graph_pool
from snapstream.engine.memory import MemoryPlan, available_memory, plan_memory
from snapstream.engine.prefill import Prefill, kept_shares
from snapstream.engine.report import SlotUse, cache_use, slot_use
from snapstream.engine.request import CONTEXT, Detokenizer, Request, RequestOutput, TokenLogprobs, special_tokens
from snapstream.engine.sampler import Sampled, SamplingState, sample
from snapstream.engine.scheduler import Scheduler
from snapstream.engine.settings import (
    can_compile,
    choose_budget,
    choose_device,
    choose_max_model_len,
    load_sampling_defaults,
    load_tokenizer,
)
from snapstream.errors import ConfigurationError, RequestError
from snapstream.models import load_model, resolve_checkpoint
from snapstream.models.weights import load_spec, resolve_config

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


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
        report_plan: Callable[[MemoryPlan], None] | None = None,
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
        spec = load_spec(resolve_config(model))
        self.config, self.spec = config, spec
        self.device = choose_device(config.device)
        dtype = spec.dtype if config.dtype == "auto" else getattr(torch, config.dtype)
        self.max_model_len = choose_max_model_len(config.max_model_len, spec.max_position)
        self.budget = choose_budget(budget, self.max_model_len)
        backend = choose_backend(config.attention, self.device, dtype, spec.head_dim)
        self.plan = plan_memory(
            spec,
            config,
            self.budget,
            max_model_len=self.max_model_len,
            dtype=dtype,
            available=available_memory(self.device, config.memory_fraction),
            masked_prefill=backend.reads_all_keys_in_prefill,
        )
        (report_plan or _print_plan)(self.plan)
        self.plan.check()
        checkpoint = resolve_checkpoint(model)  # of a hub id, weights are fetched only now
        self.tokenizer = load_tokenizer(str(checkpoint))
        self._special_tokens = special_tokens(self.tokenizer)
        self.sampling_defaults = load_sampling_defaults(str(checkpoint))
        eager = config.enforce_eager or not can_compile(self.device)
        loaded = load_model(checkpoint, spec, dtype, self.device)
        self.prefill = Prefill(
            loaded, backend, self.budget, padded=self.plan.padded_len, chunk=config.prefill_chunk, eager=eager
        )
        self.decode = Decode(
            loaded,
            backend,
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
        self._names = (f"request-{number}" for number in itertools.count())
        # Final outputs that a loop over other requests came across, kept for whoever waits for them.
        self._undelivered: list[RequestOutput] = []
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
        params = params or SamplingParams()
        name = request_id if request_id is not None else next(n for n in self._names if n not in self._requests)
        if name in self._requests:
            raise RequestError(f"request id {name!r} is in use")
        if (past is not None or keep) and not self.config.sessions:
            raise RequestError("this engine keeps no caches between turns; make it with sessions=1 or more")
        tokens = self.tokenize(prompt)
        before = 0 if past is None else len(past.tokens)
        room = self.max_model_len - before - len(tokens)
        if not tokens:
            raise RequestError("the prompt has no tokens; give at least one")
        if room < 1:
            turns = f" after {before} of earlier turns" if before else ""
            raise RequestError(
                f"the prompt has {len(tokens)} tokens{turns}; with max_model_len={self.max_model_len} at most "
                f"{max(self.max_model_len - 1 - before, 0)} fit. Shorten it or raise max_model_len"
            )
        if (params.logprobs or 0) > self._first_token.max_logprobs:
            raise RequestError(
                f"logprobs is {params.logprobs}; at most {self._first_token.max_logprobs} (max_logprobs)"
            )
        self._check_tokens(params.forced)
        self._check_tokens(list(params.logit_bias))
        if len(params.forced) > room:
            raise RequestError(
                f"{len(params.forced)} forced tokens after a prompt of {len(tokens)} are more than "
                f"max_model_len={self.max_model_len}"
            )
        stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self.spec.eos_token_ids))
        self._requests[name] = request = Request(
            request_id=name,
            prompt=tokens,
            params=params,
            seed=random.getrandbits(62) if params.seed is None else params.seed & (2**62 - 1),
            budget=self.budget.for_request(params.kv_budget),
            stop_ids=frozenset(stop_ids),
            max_tokens=min(params.max_tokens, room),
            detokenizer=Detokenizer(self.tokenizer, self._special_tokens, tokens[-CONTEXT:]),
            past=past,
            keep=keep,
        )
        self.scheduler.add(request, first=first)
        return name

    def abort(self, request_id: str) -> bool:
        """End a request wherever it is and free its slot at once; unknown or finished ones are ignored.

        The next :meth:`step` returns its final output.

        Returns:
            Whether it was there.
        """
        request = self._requests.get(request_id)
        if request is not None:
            request.finish_reason = "abort"
            self._undelivered.append(self._output(request))
            self._finish(request)
        return request is not None

    def discard(self, request_ids: Sequence[str]) -> None:
        """Abort what still runs of these requests, and return no more output of them."""
        for name in request_ids:
            self.abort(name)
        self._undelivered = [output for output in self._undelivered if output.request_id not in request_ids]

    def reset(self) -> None:
        """End all requests without a word and free all slots, whatever state an error has left things in."""
        self.scheduler = Scheduler(self.config.slots)
        self._requests.clear()
        self._undelivered.clear()
        self.prefill.forget()
        for slot in range(self.config.slots):
            self.decode.release(slot)

    @property
    def busy(self) -> bool:
        """Whether :meth:`step` has anything to do, or to say."""
        return self.scheduler.busy or bool(self._undelivered)

    def step(self) -> list[RequestOutput]:
        """Run at most one prefill chunk, then one decode launch.

        A request that fails by itself, such as in its tokenizer, ends with ``finish_reason="error"``; the others go
        on.

        Returns:
            The output so far of every request that got new tokens or ended.
        """
        delivered, self._undelivered = self._undelivered, []
        touched: dict[str, Request] = {}
        prefilling = self.scheduler.next_prefill()
        if prefilling is not None and self._prefill_chunk(prefilling):
            touched[prefilling.request_id] = prefilling
        running = self.scheduler.running
        if running:
            self._decode_launch(running)
            touched.update((request.request_id, request) for request in running)
        for request in touched.values():
            delivered.append(self._output(request))
            if request.finish_reason is not None:
                self._finish(request)
        return delivered

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
        """Requests that wait or run, or have ended without a word so far."""
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
        if isinstance(prompt, str):
            try:
                tokens = list(self.tokenizer.encode(prompt))
            except (UnicodeEncodeError, TypeError) as error:
                raise RequestError(f"the prompt is not valid text: {error}") from error
        else:
            try:
                tokens = [operator.index(token) for token in prompt]
            except TypeError as error:
                raise RequestError(f"a prompt is text or a list of token ids; {error}") from error
        self._check_tokens(tokens)
        return tokens

    def _check_tokens(self, tokens: Sequence[int]) -> None:
        wrong = [token for token in tokens if not 0 <= token < self.spec.vocab_size]
        if wrong:
            raise RequestError(f"token {wrong[0]} is not in the model's vocabulary of {self.spec.vocab_size}")

    def _prefill_chunk(self, request: Request) -> bool:
        """Read one chunk of a prompt; at its end compress it, draw its first token and start decoding."""
        try:
            return self._read_chunk(request)
        except Exception as error:
            self._fail(request, error)
            return True

    def _read_chunk(self, request: Request) -> bool:
        start, length, past = request.prefilled, len(request.prompt), request.past
        logits = self.prefill.held_logits(request.prompt) if start == 0 and past is None else None
        if logits is not None:  # the request before had the same prompt
            request.prefilled = length
        else:
            if start == 0 and past is not None:
                self.prefill.load(past)
            entries = 0 if past is None else past.entries
            tokens = request.prompt[start : start + self.config.prefill_chunk]
            logits = self.prefill.run_chunk(tokens, entries + start, request.before - entries)
            request.prefilled += len(tokens)
        if request.prefilled < length:
            return False
        sequence = self.prefill.finish(request.prompt, request.budget, logits, past)
        request.plan = sequence.plan
        request.shares = kept_shares(sequence)
        if request.keep:
            request.positions = sequence.positions
        if request.params.telemetry:
            request.kept = self.prefill.telemetry(sequence)
        with torch.inference_mode():
            tokens = [*(past.tokens if past else ()), *request.prompt]
            prompt = torch.tensor(tokens, dtype=torch.int64, device=self.device)
            self._first_token.assign(0, request.params, request.seed, prompt)
            position = torch.tensor([sequence.position], device=self.device)
            active = torch.ones(1, dtype=torch.bool, device=self.device)
            forced = torch.tensor([*request.params.forced[:1], -1][:1], device=self.device)
            sampled = sample(sequence.logits, self._first_token, position, active, forced)
        token = int(sampled.tokens[0])
        request.append(token, _logprobs_of(sampled, 0, request.params.logprobs))
        slot = self.scheduler.start_decode(request)
        if request.finish_reason is None or request.keep:
            self.decode.insert(slot, sequence, token, self._first_token)
        return True

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
        return RequestOutput(
            request_id=request.request_id,
            text=request.text[: request.reported],
            new_text=new_text,
            token_ids=tuple(request.tokens),
            finished=request.finish_reason is not None,
            finish_reason=request.finish_reason,
            error=request.error,
            logprobs=None if request.params.logprobs is None else tuple(request.logprobs),
            cache=cache_use(request, self.plan.bytes_per_token),
            saved=saved,
        )

    def _save(self, request: Request) -> SavedSequence:
        """Take out of its slot what a next turn may go on from: whole tokens, and nothing decoded past the end.

        How far the last launch went past the end depends on who else was running, so it is taken to have gone as far
        as it can: the same conversation always goes on from the same cache.
        """
        plan, slot = request.plan, request.slot
        assert plan is not None
        assert slot is not None
        tokens = request.whole_tokens()
        written = plan.count + len(request.tokens) - 1 + self.config.decode_steps
        indices = surviving_tokens(plan, plan.count + tokens, written)
        return self.decode.extract(
            slot,
            indices,
            plan,
            positions=request.positions,
            tokens=[*(request.past.tokens if request.past else ()), *request.prompt, *request.tokens[:tokens]],
            answer=request.text[: request.ends[tokens - 1]] if tokens else "",
        )


def _next_forced(requests: Sequence[Request], steps: int) -> dict[int, Sequence[int]]:
    """Forced tokens of the next steps, by slot."""
    ahead = {r.slot: r.params.forced[len(r.tokens) : len(r.tokens) + steps] for r in requests if r.slot is not None}
    return {slot: tokens for slot, tokens in ahead.items() if tokens}


def _print_plan(plan: MemoryPlan) -> None:
    print(plan.summary(), file=sys.stderr)


def _logprobs_of(sampled: Sampled, row: int, wanted: int | None) -> TokenLogprobs | None:
    if wanted is None:
        return None
    ids, values = sampled.top_ids[row, :wanted].tolist(), sampled.top_logprobs[row, :wanted].tolist()
    return TokenLogprobs(int(sampled.tokens[row]), float(sampled.logprob[row]), dict(zip(ids, values, strict=True)))
