"""One request inside the engine: what was asked, how far it is, and what it has produced."""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from snapstream.cache import CompressedSequence
from snapstream.compression import Layout
from snapstream.config import CacheBudget, SamplingParams
from snapstream.engine.output import FinishReason, KeptTokens, TokenLogprobs
from snapstream.engine.pace import Pace
from snapstream.engine.renewal import Placement
from snapstream.engine.text import OutputText


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class Request:
    """State of a request.

    Attributes:
        request_id: Its name.
        prompt: Tokens to read; with a ``past``, only what is new.
        params: How to sample.
        seed: For drawing.
        budget: Its cache.
        max_tokens: Most tokens to generate.
        text: What it has generated.
        past: The turns before.
        keep: Whether its cache is given out at the end.
        phase: Where it is.
        slot: Where it decodes, or will once its prompt has been read.
        sequence: Its compressed prompt, if that is there but has no slot yet.
        layout: Of its cache, once the prompt has been read.
        placement: How its cache was laid out when places were given last, once it decodes.
        logits: Of the prompt's last token, if the cache is given out with nothing generated.
        positions: Per layer, true positions of the entries of its placement, if the cache is given out.
        prompt_logprobs: Of the prompt's tokens, if asked for.
        kept: Which tokens were kept, if asked for.
        shares: How much of each part of the prompt was kept.
        reused: Tokens that its prompt begins with and that were read for another one.
        pace: What came of guesses of its tokens.
        finish_reason: Why it ended, once it has.
        error: What went wrong.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    budget: CacheBudget
    max_tokens: int
    text: OutputText
    past: CompressedSequence | None = None
    keep: bool = False
    phase: Phase = Phase.WAITING
    slot: int | None = None
    sequence: CompressedSequence | None = None
    layout: Layout | None = None
    placement: Placement | None = None
    logits: Tensor | None = None
    positions: Sequence[Tensor] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    kept: KeptTokens | None = None
    shares: tuple[float, ...] = ()
    reused: int = 0
    pace: Pace = field(default_factory=Pace)
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def before(self) -> int:
        """Tokens of earlier turns."""
        return 0 if self.past is None else len(self.past.tokens)

    @property
    def all_tokens(self) -> list[int]:
        """The prompt, with the turns before."""
        return [*(() if self.past is None else self.past.tokens), *self.prompt]

    @property
    def tokens(self) -> list[int]:
        """Generated tokens."""
        return self.text.tokens

    @property
    def decoded(self) -> int:
        """Generated tokens that are stored; the last one is when the next step reads it."""
        return max(len(self.tokens) - 1, 0)

    @property
    def until_renewal(self) -> float:
        """Tokens that may be stored before pinned places of its cache are given anew."""
        due = None if self.placement is None else self.placement.due(self.budget)
        return math.inf if due is None else due - self.decoded

    @property
    def seen(self) -> int:
        """Tokens of the conversation up to now."""
        return self.before + len(self.prompt) + len(self.tokens)

    def append(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Take one generated token; sets ``finish_reason`` if it is the last."""
        last = len(self.tokens) + 1 >= self.max_tokens
        if self.text.append(token, logprobs, last=last):
            self.finish_reason = "stop"
        elif last:
            self.finish_reason = "length"

    def shares_prompt_with(self, other: Request) -> bool:
        """Whether one reading does for both."""
        return self.past is other.past and self.prompt == other.prompt
