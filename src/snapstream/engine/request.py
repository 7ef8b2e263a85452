"""One request inside the engine: its parameters, its progress, and what it has produced."""

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
    """Phase of a request."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class Request:
    """State of a request.

    Attributes:
        request_id: Its id.
        prompt: Tokens to prefill; with a ``past``, only the new ones.
        params: Sampling parameters.
        seed: Seed of its random draws.
        budget: Its cache budget.
        max_tokens: Maximum number of tokens to generate.
        text: The generated text.
        past: The compressed cache of earlier turns.
        keep: Whether its compressed cache is returned at the end.
        phase: Its phase.
        slot: The slot it decodes in, or will after prefill.
        sequence: Its compressed prompt, as long as that waits for a slot.
        layouts: Per group of layers, the layout of its cache, once prefill has ended; empty before.
        placement: Layout of its cache in layers with a budget when places were last assigned, once it decodes.
        logits: Logits of the prompt's last token, if the cache is returned with nothing generated.
        positions: Per layer, true positions of the entries of its placement, if the cache is returned.
        prompt_logprobs: Log-probabilities of the prompt's tokens, if requested.
        kept: Which tokens were kept, if requested.
        shares: Share of tokens kept in each part of the prompt.
        reused: Prompt tokens taken from the prefix cache.
        pace: Draft length and acceptance with speculative decoding.
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
    layouts: tuple[Layout, ...] = ()
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
        """The prompt, with earlier turns."""
        return [*(() if self.past is None else self.past.tokens), *self.prompt]

    @property
    def tokens(self) -> list[int]:
        """Generated tokens."""
        return self.text.tokens

    @property
    def decoded(self) -> int:
        """Number of generated tokens that are stored; the last one is stored by the next step."""
        return max(len(self.tokens) - 1, 0)

    @property
    def until_renewal(self) -> float:
        """Number of tokens that may be stored before the pinned places of its cache are renewed."""
        due = None if self.placement is None else self.placement.due(self.budget)
        return math.inf if due is None else due - self.decoded

    @property
    def seen(self) -> int:
        """Number of tokens of the conversation so far."""
        return self.before + len(self.prompt) + len(self.tokens)

    def append(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Add a generated token; sets ``finish_reason`` if it is the last."""
        last = len(self.tokens) + 1 >= self.max_tokens
        if self.text.append(token, logprobs, last=last):
            self.finish_reason = "stop"
        elif last:
            self.finish_reason = "length"

    def shares_prompt_with(self, other: Request) -> bool:
        """Whether one prefill serves both requests."""
        return self.past is other.past and self.prompt == other.prompt
