"""Runs the model for requests: prefills prompts, samples first tokens, decodes, and extracts caches.

It does no scheduling, and it keeps nothing of a request that has ended.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from snapstream.cache import CompressedSequence, LayerCache, reported_layers
from snapstream.compression import Layout, lay_out, surviving_tokens
from snapstream.config import MIN_CAPACITY, CacheBudget
from snapstream.config.policy import enough_queries
from snapstream.engine.decode import Decode
from snapstream.engine.drafters import Drafter, NextToken
from snapstream.engine.evicted import FURTHEST
from snapstream.engine.graphs import graph_pool
from snapstream.engine.output import TokenLogprobs
from snapstream.engine.pace import StepCost
from snapstream.engine.prefill import SCORED_ROWS, Prefill
from snapstream.engine.prefixes import Prefix, Prefixes
from snapstream.engine.reading import Reading, Target, kept_shares
from snapstream.engine.renewal import Placement, newest
from snapstream.engine.request import Phase, Request
from snapstream.engine.settings import Setup
from snapstream.errors import ConfigurationError
from snapstream.kernels.sampling import Sampled, SamplingState, sample
from snapstream.kernels.triton import current_device
from snapstream.models import DecoderModel
from snapstream.transfers import to_device, to_host

logger = logging.getLogger(__name__)


class Executor:
    """A model with its staging cache and its slots.

    Attributes:
        prefill: Prefills prompts.
        decode: Holds the slots.
        reading: The prefill in progress, if there is one.
        readers: The requests it is for, each with its target.
        drafter: The drafter, with speculative decoding.
        prefixes: The prefix cache, if enabled.
        cost: How long steps with and without draft tokens have taken.
    """

    def __init__(self, setup: Setup, model: DecoderModel, drafter: Drafter | None, *, padded: int) -> None:
        config, spec, eager = setup.config, setup.spec, setup.eager
        self.spec, self.device, self.steps = spec, setup.device, config.decode_steps
        self._guesses, self.cost = config.guesses, StepCost()
        self.prefill = Prefill.of(setup, model, padded=padded)
        self.decode = Decode.of(setup, model)
        self.drafter = drafter if self.decode.ahead is None else NextToken(self.decode.ahead)
        self.reading: Reading | None = None
        self.readers: list[tuple[Request, Target]] = []
        self.prefixes: Prefixes | None = None
        if config.prefix_contexts:
            self.prefixes = Prefixes(config.prefix_contexts, setup.chunk, only_whole=spec.has_states)
        self._windows = sorted(group.window for group in spec.groups if group.window and group.slides)
        self._first_token = SamplingState(1, spec.vocab_size, config.max_logprobs, self.device)
        if not eager:
            with current_device(self.device):
                self._rehearse(setup.budget, setup.max_model_len, setup.queries)
                pool = graph_pool(self.device)
                self.decode.warm_up(pool)
                if drafter is not None:
                    drafter.warm_up(pool)

    def _rehearse(self, budget: CacheBudget, max_model_len: int, queries: int) -> None:
        """Prefill and compress dummy prompts, so that all kernels that prefill needs are built and loaded."""
        # Short prompts may be read by other kernels, and so may chunks of a few tokens and of a single one.
        longest = min(max_model_len, max(self.prefill.chunk + 4 * MIN_CAPACITY, self.prefill.widened_from))
        for wanted, scored in ((longest, None), (SCORED_ROWS, 0), (16, 0), (1, None)):
            length = min(wanted, longest)
            reading = Reading(self.spec, [0] * length, scored=scored)
            for each in _smaller(budget, length // 2, queries):
                reading.add(each, self._caches(reading.layouts(each)), telemetry=True)
            while not reading.finished:
                self.prefill.advance(reading)
            for target in reading.targets:
                if target.error is not None:
                    raise target.error
        self._rehearse_renewal(budget.capacity)

    def _rehearse_renewal(self, entries: int) -> None:
        """Renew the places of a free slot, because any request may ask for ``ring="resnap"``."""
        budget = replace(CacheBudget.of(entries), ring="resnap")
        placement = Placement.of_prompt(lay_out(entries + 1, budget), budget)
        nowhere = [
            torch.zeros(layer.keys.shape[1], entries, dtype=torch.int32, device=self.device)
            for layer in self.decode.layers
        ]
        due = placement.due(budget)
        assert due is not None
        self.decode.renew(0, placement, due, entries + 1, budget, nowhere)
        self.decode.release(0)

    def _caches(self, layouts: Sequence[Layout]) -> list[LayerCache]:
        """Caches for one sequence outside any slot, per layer."""
        spec, dtype = self.spec, self.decode.layers[0].dtype
        counts = [layouts[spec.group_of(layer)].count for layer in range(spec.cached_layers)]
        return [
            spec.layer_group(layer).entry.empty(1, count, dtype=dtype, device=self.device)
            for layer, count in enumerate(counts)
        ]

    # -- prefill ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def begin(self, requests: Sequence[Request], waiting: Iterable[Request] = ()) -> None:
        """Start the prefill of a prompt for one or more requests.

        Args:
            requests: Requests with this prompt. Those without a slot get separately allocated caches.
            waiting: Requests that will be prefilled later; their prompts show which prefixes are worth caching.
        """
        first = requests[0]
        wanted = [r.params.prompt_logprobs for r in requests if r.params.prompt_logprobs is not None]
        reading = Reading(self.spec, first.prompt, past=first.past, scored=max(wanted, default=None))
        readers = []
        for request in requests:
            layouts = reading.layouts(request.budget)
            caches = self._caches(layouts) if request.slot is None else self.decode.slot(request.slot, layouts)
            target = reading.add(
                request.budget, caches, telemetry=request.params.telemetry, wants_positions=request.keep
            )
            readers.append((request, target))
        if self.prefixes is not None and first.past is None and not wanted:
            alike = [r for r in waiting if r.past is None and r.sequence is None and r.params.prompt_logprobs is None]
            self._share_beginning(self.prefixes, reading, [r.prompt for r in alike if r.prompt != first.prompt])
        self.reading, self.readers = reading, readers

    def _share_beginning(self, prefixes: Prefixes, reading: Reading, waiting: Iterable[Sequence[int]]) -> None:
        """Skip the cached prefix of a prompt, and select a prefix that other prompts share for caching."""
        # All voting queries must be computed, and the last token's logits.
        most = len(reading.tokens) - max(1, self.prefill.queries.shape[1])
        if most < prefixes.block:
            return
        widened = self.prefill.widens(len(reading.tokens))
        found, known = prefixes.find(reading.tokens, most, widened=widened), 0
        if found is not None:
            prefix, usable, known = found
            reading.begin_behind(prefix, usable)
        length = prefixes.worth_keeping(reading.tokens, waiting, known, most)
        if length:
            reading.keeps = Prefix(list(reading.tokens[:length]), widened)

    def drop(self, request: Request) -> None:
        """Stop prefilling for one request; the prefill continues for the others, if there are any."""
        self.readers = [one for one in self.readers if one[0] is not request]
        if self.reading is not None:
            self.reading.targets = [target for _, target in self.readers]
            if not self.readers:
                self.reading = None

    def read(self, units: int) -> list[tuple[Request, Exception | None]]:
        """Do up to ``units`` units of prefill; a unit is one chunk through one layer.

        Returns:
            Empty until the prefill is finished. Then all requests it was for, each with its error or ``None``. Without
            an error, the request's compressed cache is complete, in its slot or as its ``sequence``.
        """
        reading = self.reading
        assert reading is not None
        with current_device(self.device):
            for _ in range(units):
                self.prefill.advance(reading)
                if reading.finished or reading.failed:
                    break
        if not reading.finished and not reading.failed:
            return []
        if reading.finished and self.prefixes is not None and reading.keeps is not None:
            self.prefixes.keep(reading.keeps)
        for request, target in self.readers:
            if target.error is None:
                self._take_over(request, target, reading)
        return [(request, target.error) for request, target in self.stop_reading()]

    def stop_reading(self) -> list[tuple[Request, Target]]:
        """Abandon the current prefill; returns the requests it was for."""
        readers, self.reading, self.readers = self.readers, None, []
        return readers

    def _take_over(self, request: Request, target: Target, reading: Reading) -> None:
        """Store the results of a prefill in a request."""
        most = request.params.prompt_logprobs
        if most is not None:
            request.prompt_logprobs = tuple(_shortened(one, most) for one in reading.logprobs)
        if request.params.telemetry:
            request.kept = target.kept_tokens(reported_layers(self.spec.groups))
        request.positions = target.positions if request.keep else ()
        request.shares = target.kept_shares(reading.total)
        request.logits, request.reused = reading.logits, reading.skipped
        if request.slot is None:
            request.sequence = CompressedSequence(
                groups=self.spec.groups,
                layers=target.layers,
                positions=target.positions,
                layouts=target.layouts,
                tokens=tuple(request.all_tokens),
                logits=reading.logits,
                budget=request.budget,
            )
        else:
            request.layouts = target.layouts

    def put(self, request: Request) -> None:
        """Copy a request's compressed prompt into its slot."""
        sequence, slot = request.sequence, request.slot
        assert sequence is not None
        assert slot is not None
        self.decode.put(slot, sequence)
        pairs = zip(self.spec.groups, sequence.layouts, strict=True)
        request.layouts = tuple(group.resumed(layout) for group, layout in pairs)
        request.sequence, request.logits = None, sequence.logits
        request.shares = request.shares or kept_shares(sequence)
        if request.keep:
            request.positions = sequence.positions

    # -- decoding -----------------------------------------------------------------------------------------------------

    def start(self, request: Request) -> None:
        """Sample the first token of a request whose cache is in its slot; launches decode it from then on."""
        layouts, slot, logits = request.layouts, request.slot, request.logits
        assert slot is not None
        assert logits is not None
        token = self._draw_first(request, logits) if request.max_tokens else 0
        if not request.max_tokens:
            request.finish_reason = "length"
        if request.max_tokens or not request.keep:
            request.logits = None
        request.phase = Phase.DECODE
        if request.finish_reason is None or request.keep:
            position = request.before + len(request.prompt)
            request.placement = Placement.of_prompt(layouts[0], request.budget)
            # If it has ended already, a launch in the same step must not go on.
            going = request.finish_reason is None
            self.decode.start(slot, layouts, position, token, self._first_token, active=going)

    @torch.inference_mode()
    def _draw_first(self, request: Request, logits: Tensor) -> int:
        """Sample the first token of an output from the logits of prefill."""
        tokens = to_device(request.all_tokens, self.device)
        self._first_token.assign(0, request.params, request.seed, tokens, request.text.stop_ids)
        position = to_device([len(tokens)], self.device)
        active = torch.ones(1, dtype=torch.bool, device=self.device)
        forced = to_device([*request.params.forced[:1], -1][:1], self.device)
        with current_device(self.device):
            sampled = Sampled(*to_host(sample(logits, self._first_token, position, active, forced)))
        token = int(sampled.tokens[0])
        request.append(token, _logprobs_of(sampled, 0, request.params.logprobs))
        return token

    def launch(self, going: Sequence[Request]) -> list[tuple[Request, Exception]]:
        """Decode a few tokens of each request: in several steps, or with draft tokens in one verification step.

        Args:
            going: Requests that have not ended.

        Returns:
            Requests whose own work failed, such as detokenization, each with its error.
        """
        greedy = all(request.params.plain_greedy for request in going)
        logprobs = any(request.params.logprobs is not None for request in going)
        keep = any(request.keep for request in going)
        for request in going:
            if request.until_renewal <= 0:
                self._renew(request)  # an error leaves a slot half renewed, so it fails the whole launch
        if self.drafter is not None:
            self._attempt_to_draft(lambda drafter: drafter.prepare(going))
        began = time.perf_counter()
        guesses = self._guess(going)
        with current_device(self.device):
            if guesses is not None:
                steps, forced = 0, _next_forced(going, {slot: len(tokens) + 1 for slot, tokens in guesses.items()})
                results, certain = self.decode.verify(guesses, greedy=greedy, forced=forced, keep=keep)
            else:
                steps = self._steps_of(going, keep)
                forced = _next_forced(going, {request.slot: steps for request in going})
                results = self.decode.launch(steps, greedy=greedy, logprobs=logprobs, forced=forced, keep=keep)
                certain = None
            # One copy per kind of result, for all steps of the launch.
            kinds = zip(*(step[: None if logprobs else 1] for step in results), strict=True)
            copied = [torch.stack(kind) for kind in kinds]
            stacked = to_host(copied if certain is None else [*copied, certain])
        counts = [steps] * self.decode.slots if certain is None else stacked.pop().tolist()
        tokens = stacked[0].tolist()
        seconds = time.perf_counter() - began
        drafted = sum(map(len, (guesses or {}).values()))
        if drafted:
            self.cost.saw_guesses(len(going), drafted, seconds)
        else:
            self.cost.saw_plain(len(going), seconds / len(tokens))
        details = [Sampled(*step) for step in zip(*stacked, strict=True)] if logprobs else None
        failed: list[tuple[Request, Exception]] = []
        for request in going:
            slot, wanted = request.slot, request.params.logprobs
            assert slot is not None
            if guesses is not None:
                request.pace.saw(len(guesses[slot]), counts[slot] - 1)
            try:
                for index in range(counts[slot]):
                    if request.finish_reason is not None:
                        break  # tokens decoded past a stop are discarded
                    report = _logprobs_of(details[index], slot, wanted) if details and wanted is not None else None
                    request.append(tokens[index][slot], report)
            except Exception as error:
                failed.append((request, error))
        return failed

    def _steps_of(self, going: Sequence[Request], keep: bool) -> int:
        """Steps of a launch.

        No more than the longest remaining request can use, none past the next renewal, and none that overwrite what the
        launch itself has stored in the window of a sequence that is returned.
        """
        limits = [self.steps, max(request.max_tokens - len(request.tokens) for request in going)]
        if keep:
            limits += self._windows[:1]
        return int(min(*limits, *(request.until_renewal for request in going)))

    def _guess(self, going: Sequence[Request]) -> dict[int, Sequence[int]] | None:
        """Draft tokens after each request's last token, by slot; ``None`` if a plain launch is to run instead."""
        if self.drafter is None:
            return None
        wanted = [self._most_guesses(request) for request in going]
        made = self._attempt_to_draft(lambda drafter: drafter.guess(going, wanted)) or [()] * len(going)
        guesses: dict[int, Sequence[int]] = {}
        vocabulary = self.spec.vocab_size
        for request, tokens in zip(going, made, strict=True):
            assert request.slot is not None
            # Nothing is drafted past an end token.
            end = next((at for at, token in enumerate(tokens, 1) if token in request.text.stop_ids), len(tokens))
            guesses[request.slot] = [*itertools.takewhile(lambda token: 0 <= token < vocabulary, tokens[:end])]
        needed = self.drafter is not None and self.drafter.needs_every_step
        return guesses if needed or any(guesses.values()) else None

    def _attempt_to_draft(self, work: Callable[[Drafter], list[Sequence[int]] | None]) -> list[Sequence[int]] | None:
        """Call the drafter; if it fails, disable it: answers do not depend on it."""
        assert self.drafter is not None
        try:
            return work(self.drafter)
        except Exception:
            logger.exception("drafting failed; speculative decoding is disabled")
            self.drafter = None
            return None

    def _most_guesses(self, request: Request) -> int:
        """Number of draft tokens for a request; save() limits how many tokens may be stored past the request's end."""
        most = request.pace.most(self._guesses, self.cost)
        if request.keep and request.params.stop:  # a stop string may end the text anywhere
            most = min(most, self.steps - 1)
        if request.keep and self._windows:
            most = min(most, self._windows[0] - 1)
        return int(min(most, request.max_tokens - len(request.tokens) - 1, request.until_renewal - 1))

    def _renew(self, request: Request) -> None:
        """Renew the pinned places of a request's cache."""
        placement, slot = request.placement, request.slot
        assert placement is not None
        assert slot is not None
        position = request.before + len(request.prompt) + placement.decoded
        with current_device(self.device):
            request.placement, request.positions = self.decode.renew(
                slot, placement, request.decoded, position, request.budget, request.positions
            )

    def save(self, request: Request) -> CompressedSequence | None:
        """Extract the cache that a next turn continues from: whole tokens, and nothing decoded past the end.

        How far the last launch went past the end depends on which other requests were running. The maximum is assumed,
        so the same conversation always continues from the same cache.

        Returns:
            The sequence; ``None`` if the text ends so long before its last token that later tokens have already
            competed for pinned places, taken places in a sliding window, or changed a state.
        """
        placement, slot = request.placement, request.slot
        assert placement is not None
        assert slot is not None
        tokens = request.text.whole_tokens()
        if placement.decoded - tokens > newest(request.budget) or self._window_is_gone(request, tokens):
            return None
        decoded = request.decoded + self.steps if request.tokens else 0
        layout = placement.layout
        with current_device(self.device):
            return self.decode.extract(
                slot,
                surviving_tokens(layout, placement.count(tokens), placement.count(decoded)),
                layout,
                request.before + len(request.prompt) + placement.decoded,
                positions=request.positions,
                tokens=[*request.all_tokens, *request.tokens[:tokens]],
                answer=request.text.of(tokens),
                logits=None if request.tokens else request.logits,
                budget=request.budget,
            )

    def _window_is_gone(self, request: Request, tokens: int) -> bool:
        """Whether decoded tokens after the first ``tokens`` have changed windows or states for good."""
        stored = request.before + len(request.prompt) + request.decoded + self.steps
        is_gone = self.spec.has_states or any(stored > window for window in self._windows)
        return request.decoded - tokens > FURTHEST and is_gone

    def clear(self) -> None:
        """Abandon the current prefill, reset the drafter, and free all slots."""
        self.stop_reading()
        if self.drafter is not None:
            self.drafter.reset()
        for slot in range(self.decode.slots):
            self.decode.release(slot)


def _smaller(budget: CacheBudget, entries: int, kept_queries: int) -> list[CacheBudget]:
    """Budgets of about ``entries`` entries for the dummy prompt: the default policy, and the engine's own policy."""
    budgets = [CacheBudget.of(max(MIN_CAPACITY, entries))]
    with contextlib.suppress(ConfigurationError):  # too small for the policy
        budgets.append(budget.resized(max(MIN_CAPACITY, entries)))
    return [each for each in budgets if enough_queries(each.queries, kept_queries)]


def _shortened(one: TokenLogprobs | None, most: int) -> TokenLogprobs | None:
    """The report cut to ``most`` alternatives; other requests with the same prompt may have asked for more."""
    if one is None or len(one.top) == most:
        return one
    return TokenLogprobs(one.token_id, one.logprob, dict(list(one.top.items())[:most]))


def _next_forced(requests: Sequence[Request], steps: Mapping[int | None, int]) -> dict[int, Sequence[int]]:
    """Forced tokens of the next steps, by slot."""
    coming = {r.slot: r.params.forced[len(r.tokens) : len(r.tokens) + steps[r.slot]] for r in requests}
    return {slot: tokens for slot, tokens in coming.items() if slot is not None and tokens}


def _logprobs_of(sampled: Sampled, row: int, wanted: int | None) -> TokenLogprobs | None:
    if wanted is None:
        return None
    ids, values = sampled.top_ids[row, :wanted].tolist(), sampled.top_logprobs[row, :wanted].tolist()
    return TokenLogprobs(int(sampled.tokens[row]), float(sampled.logprob[row]), dict(zip(ids, values, strict=True)))
