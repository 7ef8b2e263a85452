"""Drafting with a small model that has the same tokenizer, in its own caches of fixed size.

The draft model prefills every prompt itself, one chunk between two steps of the large model. In each step it then
processes the tokens that have been accepted since, which are stored in its cache, and drafts a few more, which are not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from weakref import ReferenceType, ref

from typing_extensions import override

from snapstream.engine.decode.decode import Decode
from snapstream.engine.drafters.base import Drafter
from snapstream.engine.prefill.job import PrefillJob
from snapstream.engine.prefill.prefill import Prefill
from snapstream.engine.requests.request import Request
from snapstream.engine.settings import Setup
from snapstream.kernels.triton import current_device
from snapstream.models import DecoderModel
from snapstream.transfers import to_host


@dataclass
class _Follower:
    """The draft model's progress with one request.

    Attributes:
        request: The request.
        job: The prefill of its prompt; ``None`` once that is done.
        stored: Number of generated tokens that are in the draft model's cache.
    """

    request: ReferenceType[Request]
    job: PrefillJob | None
    stored: int = 0


class DraftModel(Drafter):
    """Drafts with a small model, which uses the same slot for a request as the large model.

    Attributes:
        prefill: Prefills prompts with the draft model.
        decode: Holds its slots.
        followers: Progress with the requests that it follows, by slot.
    """

    def __init__(self, setup: Setup, model: DecoderModel, *, longest: int) -> None:
        """Allocate the draft model's caches.

        Args:
            setup: The draft model's setup.
            model: The draft model.
            longest: Tokens of the longest prompt.
        """
        self._setup, self._spec, self._device = setup, setup.spec, setup.device
        self.prefill = Prefill.of(setup, model, [longest])
        self.decode = Decode.of(setup, model)
        self.followers: dict[int, _Follower] = {}

    @override
    def warm_up(self, pool: object = None) -> None:
        self.decode.warm_up(pool)

    @override
    def prepare(self, requests: Sequence[Request]) -> None:
        """Prefill one chunk of one request's prompt, through all layers."""
        self._follow(requests)
        for slot, follower in self.followers.items():
            job = follower.job
            if job is None:
                continue
            with current_device(self._device):
                for _ in range(self._spec.cached_layers):
                    self.prefill.advance(job)
                    if job.finished or job.failed:
                        break
            if job.failed:
                error = job.targets[0].error
                assert error is not None
                raise error
            if job.finished:
                layouts = job.targets[0].layouts
                self.decode.start(slot, layouts, len(job.tokens), 0, None, active=False)
                follower.job = None
            return

    @override
    def guess(self, requests: Sequence[Request], most: Sequence[int]) -> list[Sequence[int]]:
        wanted: dict[int, tuple[Request, int]] = {}
        for request, many in zip(requests, most, strict=True):
            slot = request.own_slot
            if many and self._follows(slot, request):
                wanted[slot] = request, many
        with current_device(self._device):
            first = self._catch_up({slot: request for slot, (request, _) in wanted.items()})
            made = {slot: [first[slot]] for slot in wanted}
            while going := {slot: made[slot] for slot, (_, many) in wanted.items() if len(made[slot]) < many}:
                for slot, token in self._read(going, certain=False).items():
                    made[slot].append(token)
        return [made.get(request.own_slot, ()) for request in requests]

    @override
    def reset(self) -> None:
        for slot in list(self.followers):
            self._leave(slot)

    def _follow(self, requests: Sequence[Request]) -> None:
        """Start following new requests, and drop those that are gone."""
        here = {request.own_slot: request for request in requests}
        for left, follower in list(self.followers.items()):
            if follower.request() is not here.get(left):
                self._leave(left)
        for request in requests:
            slot, longest = request.own_slot, request.prompt_tokens + request.max_tokens
            if slot in self.followers or longest > self._setup.max_model_len:
                continue
            tokens = request.all_tokens
            if max(tokens) >= self._spec.vocab_size:
                continue
            job = PrefillJob(self._spec, tokens)
            budget = self._setup.budget
            job.add(budget, self.decode.slot(slot, job.layouts(budget)))
            self.followers[slot] = _Follower(ref(request), job)

    def _follows(self, slot: int, request: Request) -> bool:
        """Whether a request's prompt has been prefilled."""
        follower = self.followers.get(slot)
        return follower is not None and follower.request() is request and follower.job is None

    def _leave(self, slot: int) -> None:
        self.decode.release(slot)
        del self.followers[slot]

    def _catch_up(self, requests: dict[int, Request]) -> dict[int, int]:
        """Store the tokens accepted since the last call; returns the most likely token after them, by slot."""
        likeliest: dict[int, int] = {}
        most = self._setup.config.guesses + 1
        while True:
            coming = {slot: request.tokens[self.followers[slot].stored :][:most] for slot, request in requests.items()}
            coming = {slot: tokens for slot, tokens in coming.items() if tokens}
            if not coming:
                return likeliest
            likeliest |= self._read(coming, certain=True)
            for slot, tokens in coming.items():
                self.followers[slot].stored += len(tokens)

    def _read(self, tokens: Mapping[int, Sequence[int]], *, certain: bool) -> dict[int, int]:
        """Process tokens as :meth:`Decode.read` does; returns the most likely next token by slot."""
        last = self.decode.read(tokens, certain=certain)
        return dict(zip(tokens, (int(each) for each in to_host([last])[0][list(tokens)]), strict=True))
