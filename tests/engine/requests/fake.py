"""A runner without a model: prompts take as many steps as they have chunks, and token ``n`` of an answer is ``n``."""

import torch

from snapstream.cache import CacheSizes, EntryShape, LayerGroup
from snapstream.compression import lay_out
from snapstream.config import CacheBudget, SamplingParams
from snapstream.engine.core import EngineCore
from snapstream.engine.decode.renewal import Placement
from snapstream.engine.prefill.result import PrefillResult
from snapstream.engine.requests.output import Produced, Token
from snapstream.engine.requests.request import Request
from snapstream.engine.runner import StepResult

CHUNK = 10
BUDGET = CacheBudget.of(16)


class FakeJob:
    """A prompt on its way."""

    def __init__(self, requests, lane):
        self.lane, self.targets = lane, [request.slot for request in requests]
        self.tokens, self.done = requests[0].prompt, 0

    @property
    def share(self):
        return self.done / len(self.tokens)


class FakeSequence:
    """A compressed prompt that waits for a slot."""

    nbytes = 100


class FakeRunner:
    """Remembers what it was asked to do, and fails where ``fails`` says so.

    Attributes:
        done: Names of calls, with what they were about.
        active: Requests that are decoded, by slot.
        fails: Raises an error, or not, given the name of a call.
    """

    def __init__(self, lanes=(1000, 20), steps=4):
        self.lanes, self.steps = lanes, steps
        self.done, self.active, self.fails = [], {}, lambda name: None

    def begin(self, requests, lane):
        self._note("begin", tuple(request.request_id for request in requests))
        assert all(request.staged <= self.lanes[lane] for request in requests)
        return FakeJob(requests, lane)

    def prefill(self, job, seconds=None):
        self._note("prefill", job.lane)
        job.done = min(job.done + CHUNK, len(job.tokens))
        if job.done < len(job.tokens):
            return None
        layouts = (lay_out(len(job.tokens), BUDGET),)
        return [PrefillResult(layouts, None, sequence=FakeSequence() if slot is None else None) for slot in job.targets]

    def start(self, request):
        self._note("start", request.request_id)
        assert request.slot not in self.active
        self.active[request.slot] = request
        return Token(0) if request.max_tokens else None

    def renew(self, request):
        return Placement.of_prompt(request.prefilled.layouts[0], BUDGET)

    def decode(self, batch, most=None):
        self._note("decode", len(batch))
        assert {request.slot: request for request in batch} == self.active
        return StepResult([[Token(len(request.tokens) + at) for at in range(self.steps)] for request in batch])

    def save(self, request):
        return None

    def release(self, slot):
        self._note("release", slot)
        self.active.pop(slot, None)

    def clear(self):
        self.active.clear()

    def _note(self, name, about):
        self.done.append((name, about))
        self.fails(name)


class FakeText:
    """Tokens without any text."""

    def __init__(self):
        self.produced, self.stopped_by = Produced(), None

    @property
    def tokens(self):
        return self.produced.tokens

    def append(self, token, logprobs, *, last):
        self.tokens.append(token)
        return False

    def take_new(self, *, finished):
        return ""


def make_core(slots=2, spare=10**6, max_gap=None, kind=FakeRunner, **options):
    """An engine's core over a fake runner."""
    sizes = CacheSizes([LayerGroup((0,), EntryShape(1, 1, False))], torch.float32)
    return EngineCore(kind(**options), slots=slots, sizes=sizes, spare=spare, max_gap=max_gap)


def ask(name, length, tokens=3, start=0):
    """A request for ``tokens`` tokens after a prompt of ``length`` tokens, counted from ``start``."""
    prompt = list(range(start, start + length))
    return Request(name, prompt, SamplingParams(), 0, BUDGET, tokens, FakeText())
