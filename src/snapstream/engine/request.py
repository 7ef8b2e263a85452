"""One request: what was asked, how far it is, and what it has produced."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from snapstream.compression import PromptPlan
from snapstream.config import CacheBudget, SamplingParams
from snapstream.engine.conversation import SavedSequence
from snapstream.engine.report import CacheUse, KeptTokens

FinishReason = Literal["stop", "length", "abort", "error"]


class Phase(enum.Enum):
    """Where a request is."""

    WAITING = enum.auto()
    PREFILL = enum.auto()
    DECODE = enum.auto()
    FINISHED = enum.auto()


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of one generated token, and the most likely ones at its place (token id to log-probability)."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True)
class RequestOutput:
    """A request's output so far.

    Attributes:
        request_id: Given or made by :meth:`LLM.add_request`.
        text: Everything generated and final; a tail that may become a stop string is held back.
        new_text: What was added to ``text`` since the last output.
        token_ids: Generated tokens.
        finished: Whether this is the last output.
        finish_reason: ``stop`` (end token, stop token or stop string), ``length``, ``abort`` or ``error``.
        error: What went wrong, with ``finish_reason="error"``.
        logprobs: One entry per token if asked for.
        cache: What was kept of the prompt; ``None`` until prefill has ended.
        saved: With the last output, if it was asked for and the request was not cut short: what a next turn goes on
            from.
    """

    request_id: str
    text: str
    new_text: str
    token_ids: tuple[int, ...]
    finished: bool
    finish_reason: FinishReason | None
    error: str | None
    logprobs: tuple[TokenLogprobs, ...] | None
    cache: CacheUse | None
    saved: SavedSequence | None = None


@dataclass
class Request:
    """State of a request inside the engine."""

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
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    text: str = ""
    ends: list[int] = field(default_factory=list)
    reported: int = 0
    forced_text: int = 0
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
    def seen(self) -> int:
        """Tokens of the conversation up to now."""
        return self.before + len(self.prompt) + len(self.tokens)

    def append(self, token: int, logprobs: TokenLogprobs | None) -> None:
        """Take one generated token; sets ``finish_reason`` if it is the last."""
        self.tokens.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        is_forced = len(self.tokens) <= len(self.params.forced)
        at_stop = token in self.stop_ids and not is_forced
        at_length = len(self.tokens) >= self.max_tokens
        if not at_stop:
            self.text += self.detokenizer.add(token)
            self.ends.append(-1 if self.detokenizer.pending else len(self.text))
        if at_stop or at_length:
            self.text += self.detokenizer.flush()
        if is_forced:
            self.forced_text = len(self.text)
        if self._cut_at_stop_string() or at_stop:
            self.finish_reason = "stop"
        elif at_length:
            self.finish_reason = "length"

    def take_new_text(self) -> str:
        """Text that is final and was not returned before."""
        end = len(self.text)
        if self.finish_reason is None and self.params.stop:
            end -= _held_back(self.text, tuple(self.params.stop))
        end = max(end, self.reported)
        new, self.reported = self.text[self.reported : end], end
        return new

    def whole_tokens(self) -> int:
        """Tokens whose text the output has in full, and after which a next turn may go on; not the last one.

        The last token has not been read, an end token is no text, and a stop string cuts text inside of tokens.
        """
        fitting = (n for n in range(len(self.tokens) - 1, 0, -1) if 0 <= self.ends[n - 1] <= len(self.text))
        return next(fitting, 0)

    def _cut_at_stop_string(self) -> bool:
        start = max(self.reported, self.forced_text)
        found = [at for at in (self.text.find(stop, start) for stop in self.params.stop) if at >= 0]
        if found:
            self.text = self.text[: min(found)]
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


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Tokens that are no text."""
    return frozenset(token for token, added in tokenizer.added_tokens_decoder.items() if added.special)


class Detokenizer:
    """Turns tokens into text one at a time, holding back bytes of a character that is not complete.

    Args:
        tokenizer: A fast tokenizer of transformers.
        special: Its :func:`special_tokens`.
        context: Tokens before the first one. Some decoders leave out the space that begins a text; after other tokens
            they do not.
    """

    def __init__(self, tokenizer: Any, special: frozenset[int], context: Sequence[int] = ()) -> None:
        self._tokenizer, self._special = tokenizer.backend_tokenizer, special
        self._context, self._pending = list(context), list[int]()
        if self._decode(self._context).endswith(_INCOMPLETE):
            self._context = []

    @property
    def pending(self) -> bool:
        """Whether the last tokens have not become text yet."""
        return bool(self._pending)

    def add(self, token: int) -> str:
        """Text that ``token`` completes; may be empty."""
        if token in self._special:  # no text, and none will come of it
            return ""
        self._pending.append(token)
        text = self._pending_text()
        complete = bool(text) and not text.endswith(_INCOMPLETE)
        return self._emit(text) if complete or len(self._pending) > _LONGEST_CHARACTER else ""

    def flush(self) -> str:
        """Whatever is still held back, with replacement characters where a character is not complete."""
        return self._emit(self._pending_text()) if self._pending else ""

    def _pending_text(self) -> str:
        before = self._decode(self._context)
        return self._decode(self._context + self._pending)[len(before) :]

    def _emit(self, text: str) -> str:
        self._context, self._pending = self._pending, []
        return text

    def _decode(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_LONGEST_CHARACTER = 8
"""Tokens that may be held back; four bytes make a character, and more than these will not become one."""
CONTEXT = 4
"""Tokens of the prompt that are enough of a context for the text of the first generated one."""
