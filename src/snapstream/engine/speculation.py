"""Speculative decoding: wraps a runner, whose steps then verify draft tokens where that pays."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from snapstream.cache import CompressedSequence
from snapstream.engine.decode.renewal import Placement
from snapstream.engine.drafters import Drafter
from snapstream.engine.drafters.draft_length import DraftLength, StepCost
from snapstream.engine.prefill.job import PrefillJob
from snapstream.engine.prefill.result import PrefillResult
from snapstream.engine.requests.output import Token
from snapstream.engine.requests.request import Request
from snapstream.engine.runner import ModelRunner, StepResult
from snapstream.kernels.triton import current_device

logger = logging.getLogger(__name__)


class SpeculativeRunner:
    """A runner that drafts tokens and lets another one verify them; results are the same.

    Attributes:
        drafter: The drafter; ``None`` after it has failed.
        cost: How long steps with and without draft tokens have taken.
    """

    def __init__(self, inner: ModelRunner, drafter: Drafter, *, guesses: int, eager: bool) -> None:
        """Wrap a runner.

        Args:
            inner: The runner.
            drafter: Drafts tokens.
            guesses: Maximum number of draft tokens per request and step.
            eager: Whether the drafter's graphs are not captured.
        """
        self.lanes, self.steps = inner.lanes, inner.steps
        self.drafter: Drafter | None = drafter
        self.cost = StepCost()
        self._inner, self._guesses = inner, guesses
        self._lengths: dict[int, DraftLength] = {}
        if not eager:
            with current_device(inner.device):
                drafter.warm_up(inner.pool)

    def begin(self, requests: Sequence[Request], lane: int) -> PrefillJob:
        """Begin a prefill."""
        return self._inner.begin(requests, lane)

    def prefill(self, job: PrefillJob, seconds: float | None = None) -> list[PrefillResult | Exception] | None:
        """Go on with a prefill."""
        return self._inner.prefill(job, seconds)

    def start(self, request: Request) -> Token | None:
        """Draw a request's first token; nothing is known yet of how well its tokens can be guessed."""
        self._lengths[request.own_slot] = DraftLength()
        return self._inner.start(request)

    def renew(self, request: Request) -> Placement:
        """Renew the pinned places of a request's cache."""
        return self._inner.renew(request)

    def decode(self, batch: Sequence[Request], most: int | None = None) -> StepResult:
        """Verify draft tokens, or decode a few tokens if there are none."""
        if self.drafter is not None:
            self._attempt(lambda drafter: drafter.prepare(batch))
        began = time.perf_counter()
        guesses = self._guess(batch)
        if guesses is None:
            result = self._inner.decode(batch, most)
            self.cost.saw_plain(len(batch), (time.perf_counter() - began) / max(map(len, result.tokens)))
            return result
        result = self._inner.verify(batch, guesses)
        seconds, verified = time.perf_counter() - began, sum(map(len, guesses.values()))
        if verified:
            self.cost.saw_guesses(len(batch), verified, seconds)
        else:
            self.cost.saw_plain(len(batch), seconds)
        for request, tokens, many in zip(batch, result.tokens, result.drafted or (), strict=True):
            self._lengths[request.own_slot].saw(many, min(many, len(tokens) - 1))
        return result

    def save(self, request: Request) -> CompressedSequence | None:
        """Copy the cache that a next turn continues from."""
        return self._inner.save(request)

    def release(self, slot: int) -> None:
        """Free a slot."""
        self._lengths.pop(slot, None)
        self._inner.release(slot)

    def clear(self) -> None:
        """Free all slots, and reset the drafter."""
        if self.drafter is not None:
            self.drafter.reset()
        self._lengths.clear()
        self._inner.clear()

    def _guess(self, batch: Sequence[Request]) -> Mapping[int, Sequence[int]] | None:
        """Draft tokens after each request's last token, by slot; ``None`` if a plain launch is to run instead."""
        if self.drafter is None:
            return None
        forced = [[] if request.grammar is None else request.grammar.forced for request in batch]
        wanted = [0 if mine else self._most_guesses(request) for request, mine in zip(batch, forced, strict=True)]
        made = self._attempt(lambda drafter: drafter.guess(batch, wanted)) or [()] * len(batch)
        guesses: dict[int, Sequence[int]] = {}
        vocabulary = self._inner.spec.vocab_size
        for request, tokens, mine in zip(batch, made, forced, strict=True):
            if mine:  # certain to be accepted
                guesses[request.own_slot] = mine[: self._most(request, self._guesses)]
                continue
            # Nothing is drafted past an end token.
            end = next((at for at, token in enumerate(tokens, 1) if token in request.text.stop_ids), len(tokens))
            known = [*itertools.takewhile(lambda token: 0 <= token < vocabulary, tokens[:end])]
            guesses[request.own_slot] = known if request.grammar is None else known[: request.grammar.valid(known)]
        needed = self.drafter is not None and self.drafter.needs_every_step
        return guesses if needed or any(guesses.values()) else None

    def _attempt(self, work: Callable[[Drafter], list[Sequence[int]] | None]) -> list[Sequence[int]] | None:
        """Call the drafter; if it fails, disable it: answers do not depend on it."""
        assert self.drafter is not None
        try:
            return work(self.drafter)
        except Exception:
            logger.exception("drafting failed; speculative decoding is disabled")
            self.drafter = None
            return None

    def _most_guesses(self, request: Request) -> int:
        """Number of draft tokens for a request that are likely to pay."""
        return self._most(request, self._lengths[request.own_slot].most(self._guesses, self.cost))

    def _most(self, request: Request, most: int) -> int:
        """Limits of draft tokens; save() limits how many tokens may be stored past the request's end."""
        if request.keep and request.params.stop:  # a stop string may end the text anywhere
            most = min(most, self._inner.steps - 1)
        if request.keep and self._inner.windows:
            most = min(most, self._inner.windows[0] - 1)
        return int(min(most, request.remaining - 1, request.until_renewal - 1))
