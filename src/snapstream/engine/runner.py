"""Runs the model: prefills prompts, draws first tokens, decodes, and copies caches out of slots.

A runner takes requests and jobs, and returns results. It changes no request and keeps nothing of one, except what is in
its slot.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from snapstream.cache import CompressedSequence, LayerCache, SequenceStore, make_caches
from snapstream.compression import Layout, lay_out, surviving_tokens
from snapstream.config import MIN_CAPACITY, CacheBudget
from snapstream.config.policy import enough_queries
from snapstream.engine.decode.decode import Decode
from snapstream.engine.decode.evicted import FURTHEST
from snapstream.engine.decode.graphs import graph_pool
from snapstream.engine.decode.renewal import Placement, newest
from snapstream.engine.prefill.job import PrefillJob
from snapstream.engine.prefill.prefill import SCORED_ROWS, Prefill
from snapstream.engine.prefill.prefix_cache import BLOCK, PrefixCache
from snapstream.engine.prefill.result import PrefillResult
from snapstream.engine.requests.output import Token, TokenLogprobs
from snapstream.engine.requests.request import Request
from snapstream.engine.settings import Setup
from snapstream.errors import ConfigurationError
from snapstream.inference import in_inference_mode
from snapstream.kernels.sampling import Sampled, SamplingState, sample, shapes_may_vary
from snapstream.kernels.triton import current_device
from snapstream.models import DecoderModel
from snapstream.transfers import to_device, to_host

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepResult:
    """What one launch has generated.

    Attributes:
        tokens: Per request, its tokens; those after its end are of no use.
        drafted: Per request, draft tokens that were verified; ``None`` without any. Of a request with any, all tokens
            but one are accepted draft tokens; others may have forced ones.
    """

    tokens: Sequence[Sequence[Token]]
    drafted: Sequence[int] | None = None


class Runner(Protocol):
    """What the engine needs of a model.

    Attributes:
        lanes: Tokens of the longest prompt in each lane, the longest lane first.
        steps: Tokens that a launch decodes at most.
    """

    lanes: Sequence[int]
    steps: int

    def begin(self, requests: Sequence[Request], lane: int) -> PrefillJob:
        """Begin the prefill of a prompt.

        Args:
            requests: The requests with this prompt; those without a slot get caches of their own.
            lane: The lane of the prompt.

        Returns:
            A job with a target for each request, for :meth:`prefill`.
        """

    def prefill(self, job: PrefillJob, seconds: float | None = None) -> list[PrefillResult | Exception] | None:
        """Take about a chunk of the prompt through all layers.

        Args:
            job: The prefill.
            seconds: Take fewer layers, but at least one, if the next one would probably end later than this.

        Returns:
            ``None`` until the prefill is finished. Then, for each target of the job, its result or its own error.
        """

    def start(self, request: Request) -> Token | None:
        """Put a compressed prompt into its slot, if it is not there yet, and draw the first token.

        Returns:
            The token; ``None`` if the request asks for none. Launches decode the slot from now on.
        """

    def renew(self, request: Request) -> Placement:
        """Renew the pinned places of a request's cache; an error leaves its slot half renewed."""

    def decode(self, batch: Sequence[Request], most: int | None = None) -> StepResult:
        """Decode one or a few tokens of each of these requests, which are all that were started and not released.

        Args:
            batch: The requests.
            most: Tokens of each at most, where a launch decodes several of them one after another.
        """

    def save(self, request: Request) -> CompressedSequence | None:
        """Copy the cache that a next turn continues from; ``None`` if it cannot be restored any more."""

    def release(self, slot: int) -> None:
        """Free a slot."""

    def clear(self) -> None:
        """Free all slots, whatever state an error has left them in."""


class ModelRunner:
    """Runs a model in its lanes and slots.

    Attributes:
        prefiller: Prefills prompts.
        decoder: Holds the slots.
        prefixes: The prefix cache, if enabled.
        steps: Tokens that a launch decodes at most.
        windows: Sizes of sliding windows, the smallest first.
        pool: The memory that graphs share, on CUDA.
    """

    def __init__(
        self, setup: Setup, model: DecoderModel, lanes: Sequence[int], prefixes: SequenceStore | None = None
    ) -> None:
        """Allocate everything.

        Args:
            setup: The engine's setup.
            model: The model; on the meta device, for a plan of memory.
            lanes: Tokens of the longest prompt in each lane.
            prefixes: Keeps the full caches of what prompts begin with; ``None`` for no prefix cache.
        """
        config, spec = setup.config, setup.spec
        self.spec, self.device, self.steps, self.lanes = spec, model.device, config.decode_steps, lanes
        self._setup = setup
        self.prefiller = Prefill.of(setup, model, lanes)
        self.decoder = Decode.of(setup, model)
        self.prefixes: PrefixCache | None = None
        if prefixes is not None:
            block = BLOCK if self.prefiller.takes_rows_alone else setup.chunk
            sizes = spec.sizes(setup.types.of_prefixes)
            self.prefixes = PrefixCache(prefixes, sizes, chunk=setup.chunk, block=block)
        # What else entries depend on, to the bit: those of others may be in the same directory.
        types = setup.types.activations, *([] if setup.types.prefixes is None else [setup.types.prefixes])
        self._kind = " ".join([self.device.type, type(setup.backend).__name__, *map(str, types)])
        self.windows = sorted(group.window for group in spec.groups if group.window and group.slides)
        self.pool = graph_pool(self.device)
        self._first_token = SamplingState(1, spec.vocab_size, config.max_logprobs, self.device)

    def warm_up(self) -> None:
        """On CUDA, build kernels and capture decode steps."""
        setup = self._setup
        if setup.eager:
            return
        with current_device(self.device):
            for lane, longest in enumerate(self.lanes):
                self._rehearse(setup.budget, min(setup.max_model_len, longest), setup.queries, lane)
            self._rehearse_renewal(setup.budget.capacity)
            self.decoder.warm_up(self.pool)

    def _rehearse(self, budget: CacheBudget, longest: int, queries: int, lane: int) -> None:
        """Prefill and compress dummy prompts, so that all kernels that prefill needs are built and loaded."""
        # Short prompts may be read by other kernels, and so may chunks of a few tokens and of a single one.
        longest = min(longest, max(self.prefiller.chunk + 4 * MIN_CAPACITY, self.prefiller.widened_from))
        for wanted, scored in ((longest, None), (SCORED_ROWS, 0), (16, 0), (1, None)):
            length = min(wanted, longest)
            job = PrefillJob(self.spec, [0] * length, lane=lane)
            for each in smaller_budgets(budget, length // 2, queries):
                job.add(each, self._caches(job.layouts(each)), return_kept_tokens=True, scored=scored)
            while not job.finished:
                self.prefiller.advance(job)
            for target in job.targets:
                if target.error is not None:
                    raise target.error

    def _rehearse_renewal(self, entries: int) -> None:
        """Renew the places of a free slot, because any request may ask for ``ring="resnap"``."""
        budget = replace(CacheBudget.of(entries), ring="resnap")
        nowhere = [
            torch.zeros(layer.heads, entries, dtype=torch.int32, device=self.device) for layer in self.decoder.layers
        ]
        placement = Placement.of_prompt(lay_out(entries + 1, budget), budget, nowhere)
        due = placement.due(budget)
        assert due is not None
        self.decoder.renew(0, placement, due, entries + 1, budget)
        self.decoder.release(0)

    def _caches(self, layouts: Sequence[Layout]) -> list[LayerCache]:
        """Caches for one sequence outside any slot, per layer."""
        counts = [layout.count for layout in layouts]
        return make_caches(self.spec.groups, counts, entry_type=self.decoder.entry_type, device=self.device)

    # -- prefill ------------------------------------------------------------------------------------------------------

    @in_inference_mode
    def begin(self, requests: Sequence[Request], lane: int) -> PrefillJob:
        """Begin a prefill; see :class:`Runner`."""
        first = requests[0]
        job = PrefillJob(self.spec, first.prompt, past=first.past, lane=lane)
        for request in requests:
            layouts = job.layouts(request.budget)
            job.add(
                request.budget,
                self._caches(layouts) if request.slot is None else self.decoder.slot(request.slot, layouts),
                slot=request.slot,
                return_kept_tokens=request.params.return_kept_tokens,
                keep=request.keep,
                scored=request.params.prompt_logprobs,
            )
        if self.prefixes is not None and first.past is None and job.scored is None:
            # All voting queries must be computed, and the last token's logits.
            most = len(job.tokens) - max(1, self.prefiller.lanes[0].queries.shape[1])
            is_wide = self.prefiller.widens(len(job.tokens))
            try:
                prefix, job.keeps = self.prefixes.find(job.tokens, most, kind=f"{self._kind} {is_wide} {first.salt}")
                if prefix.tokens:
                    job.begin_behind(prefix)
            except Exception:  # a prompt can do without it
                logger.exception("the prefix cache could not be asked")
        return job

    def prefill(self, job: PrefillJob, seconds: float | None = None) -> list[PrefillResult | Exception] | None:
        """Take as much of a prompt as one chunk through all layers; see :class:`Runner`."""
        begin = time.perf_counter()
        with current_device(self.device):
            for number in range(1, self.spec.cached_layers + 1):
                self.prefiller.advance(job)
                if job.finished or job.failed:
                    break
                took = time.perf_counter() - begin
                if seconds is not None and took * (number + 1) / number > seconds:  # the next one would be too long
                    break
        if not job.finished and not job.failed:
            return None
        if job.finished and self.prefixes is not None and job.keeps is not None:
            try:
                self.prefixes.keep(job.keeps)
            except Exception:  # the prompt has been read
                logger.exception("the prefix of a prompt could not be kept")
        job.keeps = None
        return [job.result(target) if target.error is None else target.error for target in job.targets]

    # -- decoding -----------------------------------------------------------------------------------------------------

    def start(self, request: Request) -> Token | None:
        """Draw a request's first token; see :class:`Runner`."""
        result, slot = request.prefilled, request.own_slot
        assert result is not None
        if result.sequence is not None:
            self.decoder.put(slot, result.sequence)
        token = None
        if request.max_tokens:
            assert result.logits is not None
            token = self._draw_first(request, result.logits)
        if token is not None or request.keep:
            following = 0 if token is None else token.token_id
            self.decoder.start(
                slot, result.layouts, request.prompt_tokens, following, self._first_token, active=token is not None
            )
        return token

    @in_inference_mode
    def _draw_first(self, request: Request, logits: Tensor) -> Token:
        """Sample the first token of an output from the logits of prefill."""
        tokens = to_device(request.all_tokens, self.device)
        self._first_token.assign(0, request.params, request.seed, tokens, request.text.stop_ids)
        position = to_device([len(tokens)], self.device)
        active = torch.ones(1, dtype=torch.bool, device=self.device)
        forced = to_device([*_forced(request)[:1], -1][:1], self.device)
        if request.grammar is not None:
            self._first_token.allowed[0].copy_(request.grammar.masks((), 1, early=request.params.min_tokens))
        with current_device(self.device):
            sampled = Sampled(*to_host(sample(logits, self._first_token, position, active, forced)))
        return Token(int(sampled.tokens[0]), _logprobs_of(sampled, 0, request.params.logprobs))

    def renew(self, request: Request) -> Placement:
        """Renew the pinned places of a request's cache; see :class:`Runner`."""
        placement = request.placement
        assert placement is not None
        position = request.prompt_tokens + placement.decoded
        with current_device(self.device):
            return self.decoder.renew(request.own_slot, placement, request.decoded, position, request.budget)

    def decode(self, batch: Sequence[Request], most: int | None = None) -> StepResult:
        """Decode a few tokens of each request; see :class:`Runner`."""
        keep = any(request.keep for request in batch)
        logprobs = any(request.params.logprobs is not None for request in batch)
        steps = min(self._steps_of(batch, keep), most or self.steps)
        forced = _next_forced(batch, {request.own_slot: steps for request in batch})
        # One mask for all steps: those before the last one take forced tokens.
        coming = {slot: tokens[: steps - 1] for slot, tokens in forced.items()}
        masks = _masks(batch, lambda request: coming.get(request.own_slot, ()), most=1)
        greedy = _greedy(batch, self.device)
        with current_device(self.device):
            self.decoder.allow(masks)
            results = self.decoder.launch(steps, greedy=greedy, logprobs=logprobs, forced=forced, keep=keep)
            # One copy per kind of result, for all steps of the launch.
            kinds = zip(*(step[: None if logprobs else 1] for step in results), strict=True)
            stacked = to_host([torch.stack(kind) for kind in kinds])
        return StepResult(_tokens_of(batch, stacked, [steps] * self.decoder.slots, logprobs))

    def verify(self, batch: Sequence[Request], guesses: Mapping[int, Sequence[int]]) -> StepResult:
        """Verify draft tokens of each request, by slot, in one step, and decode one more token."""
        logprobs = any(request.params.logprobs is not None for request in batch)
        forced = _next_forced(batch, {slot: len(tokens) + 1 for slot, tokens in guesses.items()})
        masks = _masks(batch, lambda request: guesses[request.own_slot])
        greedy = _greedy(batch, self.device)
        with current_device(self.device):
            self.decoder.allow(masks)
            results, certain = self.decoder.verify(
                dict(guesses), greedy=greedy, forced=forced, keep=any(request.keep for request in batch)
            )
            kinds = zip(*(step[: None if logprobs else 1] for step in results), strict=True)
            *stacked, counts = to_host([*(torch.stack(kind) for kind in kinds), certain])
        tokens = _tokens_of(batch, stacked, counts.tolist(), logprobs)
        drafted = [
            0 if request.grammar is not None and request.grammar.forced else len(guesses[request.own_slot])
            for request in batch
        ]
        return StepResult(tokens, drafted)

    def _steps_of(self, batch: Sequence[Request], keep: bool) -> int:
        """Steps of a launch.

        No more than the longest remaining request can use, none past the next renewal, none that overwrite what the
        launch itself has stored in the window of a sequence that is returned, and none after a token that a grammar
        does not know yet.
        """
        limits = [self.steps, max(request.remaining for request in batch)]
        if keep:
            limits += self.windows[:1]
        limits += [len(request.grammar.forced) + 1 for request in batch if request.grammar is not None]
        return int(min(*limits, *(request.until_renewal for request in batch)))

    # -- caches that leave --------------------------------------------------------------------------------------------

    def save(self, request: Request) -> CompressedSequence | None:
        """Extract the cache that a next turn continues from: whole tokens, and nothing decoded past the end.

        How far the last launch went past the end depends on which other requests were running. The maximum is assumed,
        so the same conversation always continues from the same cache.

        Returns:
            The sequence; ``None`` if the text ends so long before its last token that later tokens have already
            competed for pinned places, taken places in a sliding window, or changed a state.
        """
        placement, result = request.placement, request.prefilled
        assert placement is not None
        tokens = request.text.whole_tokens()
        if placement.decoded - tokens > newest(request.budget) or self._window_is_gone(request, tokens):
            return None
        decoded = request.decoded + self.steps if request.tokens else 0
        with current_device(self.device):
            return self.decoder.extract(
                request.own_slot,
                surviving_tokens(placement.layout, placement.count(tokens), placement.count(decoded)),
                placement,
                request.prompt_tokens + placement.decoded,
                tokens=[*request.all_tokens, *request.tokens[:tokens]],
                answer=request.text.of(tokens),
                logits=None if result is None else result.logits,
                budget=request.budget,
            )

    def _window_is_gone(self, request: Request, tokens: int) -> bool:
        """Whether decoded tokens after the first ``tokens`` have changed windows or states for good."""
        stored = request.prompt_tokens + request.decoded + self.steps
        is_gone = self.spec.has_states or any(stored > window for window in self.windows)
        return request.decoded - tokens > FURTHEST and is_gone

    def release(self, slot: int) -> None:
        """Free a slot."""
        self.decoder.release(slot)

    def clear(self) -> None:
        """Free all slots."""
        for slot in range(self.decoder.slots):
            self.decoder.release(slot)


def smaller_budgets(budget: CacheBudget, entries: int, kept_queries: int) -> list[CacheBudget]:
    """Budgets of about ``entries`` entries for the dummy prompt: the default policy, and the engine's own policy.

    All of the prompt is pinned, so more than fits.
    """
    budgets = [CacheBudget.of(max(MIN_CAPACITY, entries))]
    with contextlib.suppress(ConfigurationError):  # too small for the policy
        budgets.append(budget.resized(max(MIN_CAPACITY, entries)))
    pinned = [replace(each, pin=((0, 2 * entries + 1),)) for each in budgets]
    return [each for each in pinned if enough_queries(each.queries, kept_queries)]


def _greedy(batch: Sequence[Request], device: torch.device) -> bool:
    """Whether all requests want the most likely token and nothing else, and no grammar needs a sampled step for it."""
    is_plain = all(request.params.plain_greedy for request in batch)
    return is_plain and (shapes_may_vary(device) or all(request.grammar is None for request in batch))


def _next_forced(batch: Sequence[Request], steps: Mapping[int, int]) -> dict[int, Sequence[int]]:
    """Forced tokens of the next steps, by slot."""
    coming = {request.own_slot: _forced(request)[: steps[request.own_slot]] for request in batch}
    return {slot: tokens for slot, tokens in coming.items() if tokens}


def _masks(
    batch: Sequence[Request], following: Callable[[Request], Sequence[int]], most: int | None = None
) -> dict[int, Tensor]:
    """The masks of requests with a grammar, by slot.

    Args:
        batch: The requests.
        following: Tokens that may follow in this step.
        most: How many masks are needed, the last ones; by default, one more than there are tokens.
    """
    masks = {}
    for request in batch:
        if request.grammar is not None:
            tokens, early = following(request), request.params.min_tokens - len(request.tokens)
            masks[request.own_slot] = request.grammar.masks(tokens, most or len(tokens) + 1, early=early)
    return masks


def _forced(request: Request) -> Sequence[int]:
    """Tokens that come next, whatever the model predicts."""
    if request.grammar is not None:
        return request.grammar.forced
    return request.params.forced[len(request.tokens) :]


def _tokens_of(
    batch: Sequence[Request], stacked: Sequence[Tensor], counts: Sequence[int], logprobs: bool
) -> list[list[Token]]:
    """The tokens of each request.

    Args:
        batch: The requests.
        stacked: The fields of :class:`Sampled` on the host, each with a dimension for steps in front.
        counts: How many steps count, by slot.
        logprobs: Whether there are log-probabilities.
    """
    tokens = stacked[0].tolist()
    details = [Sampled(*step) for step in zip(*stacked, strict=True)] if logprobs else []
    rows = []
    for request in batch:
        slot, wanted = request.own_slot, request.params.logprobs
        scores = [_logprobs_of(step, slot, wanted) for step in details[: counts[slot]]] or [None] * counts[slot]
        rows.append([Token(tokens[step][slot], scores[step]) for step in range(counts[slot])])
    return rows


def _logprobs_of(sampled: Sampled, row: int, wanted: int | None) -> TokenLogprobs | None:
    if wanted is None:
        return None
    ids, values = sampled.top_ids[row, :wanted].tolist(), sampled.top_logprobs[row, :wanted].tolist()
    return TokenLogprobs(int(sampled.tokens[row]), float(sampled.logprob[row]), dict(zip(ids, values, strict=True)))
