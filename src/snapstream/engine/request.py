"""One request inside the engine: what was asked, how far it is, and what it has produced."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from snapstream.compression import PromptPlan
from snapstream.config import CacheBudget, SamplingParams
from snapstream.engine.conversation import SavedSequence
from snapstream.engine.detokenizer import Detokenizer
from snapstream.engine.output import FinishReason, KeptTokens, Produced, TokenLogprobs


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    FINISHED = enum.auto()


@dataclass(eq=False)
class Request:
    """State of a request.

    Text passes through three stages: :attr:`tail` may still be cut by a stop string, the pieces of :attr:`produced`
    have been handed out, and what the detokenizer holds back is no text yet. Nothing here grows with the length of the
    output but lists that are added to.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    seed: int
    budget: CacheBudget
    stop_ids: frozenset[int]
    max_tokens: int
    detokenizer: Detokenizer
    past: SavedSequence | None = None
    keep: bool = False
    phase: Phase = Phase.WAITING
    prefilled: int = 0
    slot: int | None = None
    plan: PromptPlan | None = None
    produced: Produced = field(default_factory=Produced)
    tail: str = ""
    handed_out: int = 0
    ends: list[int] = field(default_factory=list)
    early_text: int = 0
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    kept: KeptTokens | None = None
    shares: tuple[float, ...] = ()
    positions: Sequence[Tensor] = ()
    finish_reason: FinishReason | None = None
    error: str | None = None

    @property
    def before(self) -> int:
        """Tokens of earlier turns."""
        return 0 if self.past is None else len(self.past.tokens)

    @property
    def tokens(self) -> list[int]:
        """Generated tokens."""
        return self.produced.tokens

    @property
    def seen(self) -> int:
        """Tokens of the conversation up to now."""
        return self.before + len(self.prompt) + len(self.tokens)

    @property
    def text_length(self) -> int:
        """Characters of the output, without what the detokenizer holds back."""
        return self.handed_out + len(self.tail)

    def append(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Take one generated token; sets ``finish_reason`` if it is the last."""
        self.tokens.append(token)
        if logprobs is not None:
            self.produced.logprobs.append(logprobs)
        is_early = len(self.tokens) <= max(len(self.params.forced), self.params.min_tokens)
        at_stop = token in self.stop_ids and not is_early
        at_length = len(self.tokens) >= self.max_tokens
        if not at_stop:
            self.tail += self.detokenizer.add(token)
            self.ends.append(-1 if self.detokenizer.pending else self.text_length)
        if at_stop or at_length:
            self.tail += self.detokenizer.flush()
        if is_early:
            self.early_text = self.text_length
        if self._cut_at_stop_string() or at_stop:
            self.finish_reason = "stop"
        elif at_length:
            self.finish_reason = "length"

    def take_new_text(self) -> str:
        """Text that is final and was not returned before."""
        end = len(self.tail)
        if self.finish_reason is None and self.params.stop:
            end -= _held_back(self.tail, tuple(self.params.stop))
        new, self.tail = self.tail[:end], self.tail[end:]
        if new:
            self.produced.pieces.append(new)
            self.handed_out += len(new)
        return new

    def whole_tokens(self) -> int:
        """Tokens whose text the output has in full, and after which a next turn may go on; not the last one.

        The last token has not been read, an end token is no text, and a stop string cuts text inside of tokens.
        """
        fitting = (n for n in range(len(self.tokens) - 1, 0, -1) if 0 <= self.ends[n - 1] <= self.text_length)
        return next(fitting, 0)

    def _cut_at_stop_string(self) -> bool:
        """Nothing of the tokens that may not end the output is part of a stop string."""
        start = max(self.early_text - self.handed_out, 0)
        found = [at for at in (self.tail.find(stop, start) for stop in self.params.stop) if at >= 0]
        if found:
            self.tail = self.tail[: min(found)]
        return bool(found)


def _held_back(text: str, stops: tuple[str, ...]) -> int:
    """Length of the longest end of ``text`` that a stop string may begin with."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
