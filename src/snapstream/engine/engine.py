"""The engine: requests in, tokens out; one prefill chunk and one decode launch at a time."""

from __future__ import annotations

import itertools
import logging
import operator
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from snapstream.attention import choose_backend
from snapstream.config import CacheBudget, EngineConfig, SamplingParams
from snapstream.engine.decode import Decode
from snapstream.engine.graphs import graph_pool
from snapstream.engine.memory import MemoryPlan, available_memory, plan_memory
from snapstream.engine.prefill import Prefill
from snapstream.engine.request import CacheUse, Detokenizer, Request, RequestOutput, TokenLogprobs
from snapstream.engine.sampler import Sampled, SamplingState, sample
from snapstream.engine.scheduler import Scheduler
from snapstream.engine.settings import (
    can_compile,
    choose_budget,
    choose_device,
    choose_max_model_len,
    load_tokenizer,
)
from snapstream.errors import ConfigurationError, RequestError
from snapstream.models import load_model, resolve_checkpoint
from snapstream.models.weights import load_spec, resolve_config

logger = logging.getLogger(__name__)

Prompt = str | Sequence[int]


class LLM:
    """A model with a fixed number of slots, each with a cache of fixed size.

    Use :meth:`generate` for a list of prompts; a server drives :meth:`add_request`, :meth:`step` and :meth:`abort`.

    Example:
        >>> llm = LLM("path/to/model", budget=4096, slots=8)  # doctest: +SKIP
        >>> llm.generate("A very long text ...")[0].text  # doctest: +SKIP
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
        eager = config.enforce_eager or not can_compile(self.device)
        loaded = load_model(checkpoint, spec, dtype, self.device)
        self.prefill = Prefill(
            loaded, backend, self.budget, max_model_len=self.max_model_len, chunk=config.prefill_chunk, eager=eager
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
        self._names = (f"request-{number}" for number in itertools.count())
        # Final outputs that a loop over other requests came across, kept for whoever waits for them.
        self._undelivered: list[RequestOutput] = []
        if not eager:
            pool = graph_pool(self.device)
            self.prefill.warm_up(pool)
            self.decode.warm_up(pool)

    # -- for users --------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Generate for one prompt or many, batched as slots come free.

        Args:
            prompts: Text, or token ids, or a list of either.
            params: One for all, or one per prompt; greedy with 128 tokens by default.

        Returns:
            The final output of each prompt, in order.

        Raises:
            RequestError: A prompt or parameter that cannot be served; nothing of this call is run then.
        """
        many = _as_list(prompts)
        each = list(params) if isinstance(params, Sequence) else [params or SamplingParams()] * len(many)
        if len(each) != len(many):
            raise RequestError(f"{len(many)} prompts but {len(each)} sampling parameters; give one, or one per prompt")
        names: list[str] = []
        try:
            for prompt, one in zip(many, each, strict=True):
                names.append(self.add_request(prompt, one))
            finished: dict[str, RequestOutput] = {}
            while len(finished) < len(names):
                finished.update((o.request_id, o) for o in self._step_for(names) if o.finished)
        finally:  # an error or an interrupt leaves nothing running
            self._drop(names)
        return [finished[name] for name in names]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Generate for one prompt and yield its output as it grows; closing the iterator aborts the request."""
        name = self.add_request(prompt, params)
        try:
            finished = False
            while not finished:
                for output in self._step_for([name]):
                    finished = finished or output.finished
                    yield output
        finally:
            self._drop([name])

    def chat(self, messages: Sequence[dict[str, str]], params: SamplingParams | None = None) -> RequestOutput:
        """Generate the next turn of a conversation, laid out by the model's chat template.

        Raises:
            RequestError: The model has no chat template, or it rejects the messages.
        """
        return self.generate(self.chat_prompt(messages), params)[0]

    def chat_prompt(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Lay a conversation out with the model's chat template; returns tokens.

        Tokens rather than text: templates write the special tokens themselves, and encoding their text as a prompt
        would add another beginning-of-sequence.

        Raises:
            RequestError: The model has no chat template, or it rejects the messages.
        """
        import jinja2

        if not getattr(self.tokenizer, "chat_template", None):
            raise RequestError("this model has no chat template; give a plain prompt instead")
        try:
            text = self.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
        except (ValueError, TypeError, KeyError, AttributeError, jinja2.TemplateError) as error:
            raise RequestError(f"the chat template rejects these messages: {error}") from error
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    # -- for a server -----------------------------------------------------------------------------------------------

    def add_request(self, prompt: Prompt, params: SamplingParams | None = None, request_id: str | None = None) -> str:
        """Queue a request.

        Args:
            prompt: Text, or token ids.
            params: How to sample; greedy by default.
            request_id: A name of the caller's, not in use; made up if not given.

        Returns:
            The request's name.

        Raises:
            RequestError: Says what cannot be served; no other request is affected.
        """
        params = params or SamplingParams()
        name = request_id if request_id is not None else next(n for n in self._names if n not in self._requests)
        if name in self._requests:
            raise RequestError(f"request id {name!r} is in use")
        tokens = self._tokens_of(prompt)
        if not tokens:
            raise RequestError("the prompt has no tokens; give at least one")
        if len(tokens) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(tokens)} tokens; with max_model_len={self.max_model_len} at most "
                f"{self.max_model_len - 1} fit. Shorten it or raise max_model_len"
            )
        if (params.logprobs or 0) > self._first_token.max_logprobs:
            raise RequestError(
                f"logprobs is {params.logprobs}; at most {self._first_token.max_logprobs} (max_logprobs)"
            )
        self._check_tokens(params.forced)
        if len(params.forced) > self.max_model_len - len(tokens):
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
            max_tokens=min(params.max_tokens, self.max_model_len - len(tokens)),
            detokenizer=Detokenizer(self.tokenizer),
        )
        self.scheduler.add(request)
        return name

    def abort(self, request_id: str) -> None:
        """End a request wherever it is and free its slot at once; unknown or finished ones are ignored.

        The next :meth:`step` returns its final output.
        """
        request = self._requests.get(request_id)
        if request is not None:
            request.finish_reason = "abort"
            self._undelivered.append(self._output(request))
            self._finish(request)

    @property
    def busy(self) -> bool:
        """Whether :meth:`step` has anything to do."""
        return self.scheduler.busy

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
        delivered += [self._output(request) for request in touched.values()]
        for request in touched.values():
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

    # -- inside -----------------------------------------------------------------------------------------------------

    def _step_for(self, names: Sequence[str]) -> list[RequestOutput]:
        """One step; outputs of other requests are kept for the next."""
        outputs = self.step()
        self._undelivered = [output for output in outputs if output.request_id not in names]
        return [output for output in outputs if output.request_id in names]

    def _drop(self, names: Sequence[str]) -> None:
        """Abort what still runs of these requests and forget what nobody will ask for."""
        for name in names:
            self.abort(name)
        self._undelivered = [output for output in self._undelivered if output.request_id not in names]

    def _tokens_of(self, prompt: Prompt) -> list[int]:
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
        start, length = request.prefilled, len(request.prompt)
        logits = self.prefill.held_logits(request.prompt) if start == 0 else None
        if logits is not None:  # the request before had the same prompt
            request.prefilled = length
        else:
            tokens = request.prompt[start : start + self.config.prefill_chunk]
            logits = self.prefill.run_chunk(tokens, start)
            request.prefilled += len(tokens)
        if request.prefilled < length:
            return False
        sequence = self.prefill.finish(request.prompt, request.budget, logits)
        request.plan = sequence.plan
        if request.params.telemetry:
            request.kept = self.prefill.telemetry(sequence)
        with torch.inference_mode():
            prompt = torch.tensor(request.prompt, device=self.device)
            self._first_token.assign(0, request.params, request.seed, prompt)
            position = torch.tensor([length], device=self.device)
            active = torch.ones(1, dtype=torch.bool, device=self.device)
            forced = torch.tensor([*request.params.forced[:1], -1][:1], device=self.device)
            sampled = sample(sequence.logits, self._first_token, position, active, forced)
        token = int(sampled.tokens[0])
        request.append(token, _logprobs_of(sampled, 0, request.params.logprobs))
        slot = self.scheduler.start_decode(request)
        if request.finish_reason is None:
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
                report = _logprobs_of(details[index], slot, wanted) if details and wanted is not None else None
                try:
                    request.append(tokens[index][slot], report)
                except Exception as error:
                    self._fail(request, error)

    def _fail(self, request: Request, error: Exception) -> None:
        """End one request because of an error of its own; the others are not touched."""
        logger.error("request %s failed", request.request_id, exc_info=error)
        request.finish_reason, request.error = "error", f"{type(error).__name__}: {error}"

    def _finish(self, request: Request) -> None:
        slot = self.scheduler.finish(request)
        if slot is not None:
            self.decode.release(slot)
        del self._requests[request.request_id]

    def _output(self, request: Request) -> RequestOutput:
        new_text = request.take_new_text()
        return RequestOutput(
            request_id=request.request_id,
            text=request.text[: request.reported],
            new_text=new_text,
            token_ids=tuple(request.tokens),
            finished=request.finish_reason is not None,
            finish_reason=request.finish_reason,
            error=request.error,
            logprobs=None if request.params.logprobs is None else tuple(request.logprobs),
            cache=self._cache_use(request),
        )

    def _cache_use(self, request: Request) -> CacheUse | None:
        plan = request.plan
        if plan is None:
            return None
        sink = min(request.budget.sink, plan.length)
        return CacheUse(
            prompt_tokens=plan.length,
            sink=sink,
            pinned=min(plan.base, plan.count) - sink,
            recent=max(plan.count - plan.base, 0),
            dropped=plan.dropped,
            limit=plan.limit,
            bytes_held=plan.limit * self.plan.bytes_per_token,
            bytes_full=(plan.length + len(request.tokens)) * self.plan.bytes_per_token,
            kept=request.kept,
        )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    try:
        items: list[Any] = list(prompts)
    except TypeError:
        raise RequestError(f"prompts is {prompts!r}; give text, token ids, or a list of either") from None
    try:
        operator.index(items[0])
    except (IndexError, TypeError):
        return items
    return [items]  # a list of token ids is one prompt


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
