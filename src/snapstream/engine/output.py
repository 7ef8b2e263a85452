"""What leaves the engine: outputs of requests and the state of slots, as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from snapstream.cache import CompressedSequence

FinishReason = Literal["stop", "length", "abort", "error"]

KEPT_PARTS = 64
"""Parts of a prompt for which a slot says how much was kept."""


@dataclass(frozen=True)
class KeptTokens:
    """What compression kept of one prompt, token by token.

    Attributes:
        mass: Per layer, the share of the attention of the last 32 prompt tokens that went to tokens which were kept,
            averaged over these tokens and the heads; 1 if nothing was dropped.
        positions: Per layer and KV head, the positions in the prompt that were kept, in order.
    """

    mass: tuple[float, ...]
    positions: tuple[tuple[tuple[int, ...], ...], ...]


@dataclass(frozen=True)
class CacheUse:
    """What compression kept of one prompt, per layer and KV head, and what that takes over all layers.

    Attributes:
        prompt_tokens: Length of the prompt, with the turns before it.
        sink: First tokens kept.
        pinned: Tokens that were chosen.
        recent: Last of all other tokens, in the ring.
        dropped: Tokens left out, now or in a turn before.
        limit: Most entries the sequence will ever hold.
        bytes_held: Keys and values of ``limit`` entries.
        bytes_full: Keys and values of prompt and output so far, had none been dropped.
        kept: Which tokens were kept, if asked for.
    """

    prompt_tokens: int
    sink: int
    pinned: int
    recent: int
    dropped: int
    limit: int
    bytes_held: int
    bytes_full: int
    kept: KeptTokens | None = None


@dataclass(frozen=True)
class SlotUse:
    """One slot as it is now, or as it was left; numbers of entries are per layer and KV head.

    Attributes:
        slot: Which.
        busy: Whether its request is still being decoded; if not, the slot is free for the next.
        request_id: Who decodes in it, or did.
        seen: Tokens of prompt, earlier turns and output so far.
        held: Entries in use.
        sink: Entries of first tokens.
        pinned: Entries of chosen tokens.
        limit: Most entries this sequence will ever hold.
        next_entry: Where the next token goes; in a full cache, the oldest entry of the ring.
        generated: Tokens of output.
        bytes_held: Keys and values of ``limit`` entries.
        bytes_full: Keys and values of all tokens seen.
        kept: Share of the prompt that was kept in each of :data:`KEPT_PARTS` equal parts of it, averaged over layers
            and heads; 1 where nothing was dropped.
    """

    slot: int
    busy: bool
    request_id: str
    seen: int
    held: int
    sink: int
    pinned: int
    limit: int
    next_entry: int
    generated: int
    bytes_held: int
    bytes_full: int
    kept: tuple[float, ...]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of one token, and the most likely ones at its place (token id to log-probability)."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass
class Produced:
    """All that a request has produced so far. It only grows, so its outputs share it and none of them copies it.

    Attributes:
        pieces: Text, in the pieces it was handed out in.
        tokens: Generated tokens.
        logprobs: One entry per token, if asked for.
    """

    pieces: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)


@dataclass(frozen=True, eq=False, repr=False)
class RequestOutput:
    """A request's output so far.

    An output is made in every step, so it holds what is new and finds the rest when it is asked for.

    Attributes:
        request_id: Given or made by :meth:`~snapstream.engine.engine.Engine.add_request`.
        new_text: What was added to :attr:`text` since the last output.
        token_count: Generated tokens.
        reused: Tokens that its prompt begins with and that were not read again, as others begin with them, too.
        drafted: Guesses of its tokens that were verified, with speculative decoding.
        accepted: Those that were right.
        finished: Whether this is the last output.
        finish_reason: ``stop`` (end token, stop token or stop string), ``length``, ``abort`` or ``error``.
        error: What went wrong, with ``finish_reason="error"``.
        cache: What was kept of the prompt; ``None`` until prefill has ended.
        prompt_logprobs: One entry per token of the prompt if asked for, and ``None`` for the first one, which nothing
            comes before; ``None`` until prefill has ended.
        saved: With the last output, if it was asked for and the request was not cut short (nor, with ``ring="resnap"``,
            its text long before its last token, as by a stop string of more than 16 tokens): what a next turn goes on
            from.
    """

    request_id: str
    new_text: str
    token_count: int
    reused: int
    drafted: int
    accepted: int
    finished: bool
    finish_reason: FinishReason | None
    error: str | None
    cache: CacheUse | None
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None
    saved: CompressedSequence | None
    _produced: Produced
    _pieces: int
    _has_logprobs: bool

    @cached_property
    def text(self) -> str:
        """Everything generated and final; a tail that may become a stop string is held back."""
        return "".join(self._produced.pieces[: self._pieces])

    @cached_property
    def token_ids(self) -> tuple[int, ...]:
        """Generated tokens."""
        return tuple(self._produced.tokens[: self.token_count])

    @cached_property
    def logprobs(self) -> tuple[TokenLogprobs, ...] | None:
        """One entry per generated token, if asked for."""
        return tuple(self.logprobs_after(0)) if self._has_logprobs else None

    def logprobs_after(self, known: int) -> Sequence[TokenLogprobs]:
        """The entries of :attr:`logprobs` without the first ``known``; nothing else is copied."""
        return self._produced.logprobs[known : self.token_count]

    def __repr__(self) -> str:
        """What people look for first."""
        error = f", error={self.error!r}" if self.error else ""
        return (
            f"RequestOutput(request_id={self.request_id!r}, text={self.text!r}, token_count={self.token_count}, "
            f"finish_reason={self.finish_reason!r}{error}, cache={self.cache!r})"
        )
