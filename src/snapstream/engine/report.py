"""What a request's cache holds, for people and for servers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from snapstream.compression import entry_of

if TYPE_CHECKING:
    from snapstream.engine.request import Request

KEPT_PARTS = 64
"""Parts of a prompt for which a slot says how much was kept."""


@dataclass(frozen=True)
class KeptTokens:
    """What compression kept of one prompt, token by token.

    Attributes:
        mass: Per layer, the share of the attention of the last prompt tokens (32, or the engine's window if that is
            shorter) that went to tokens which were kept, averaged over these tokens and the heads; 1 if nothing was
            dropped.
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
        pinned: Tokens kept by vote.
        recent: Last tokens kept.
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
        pinned: Entries of voted tokens.
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


def cache_use(request: Request, bytes_per_token: int) -> CacheUse | None:
    """What was kept of a request's prompt; ``None`` until it has been read."""
    plan = request.plan
    if plan is None:
        return None
    sink = min(request.budget.sink, plan.length)
    prompt_tokens = request.before + len(request.prompt)
    return CacheUse(
        prompt_tokens=prompt_tokens,
        sink=sink,
        pinned=min(plan.base, plan.count) - sink,
        recent=max(plan.count - plan.base, 0),
        dropped=prompt_tokens - plan.count,
        limit=plan.limit,
        bytes_held=plan.limit * bytes_per_token,
        bytes_full=request.seen * bytes_per_token,
        kept=request.kept,
    )


def slot_use(request: Request, bytes_per_token: int) -> SlotUse:
    """What a request that is being decoded holds."""
    plan = request.plan
    assert plan is not None
    assert request.slot is not None
    stored = plan.count + len(request.tokens) - 1  # the last token is stored when the next step reads it
    sink = min(request.budget.sink, plan.count)
    return SlotUse(
        slot=request.slot,
        busy=request.finish_reason is None,
        request_id=request.request_id,
        seen=request.seen,
        held=min(stored, plan.limit),
        sink=sink,
        pinned=max(min(plan.base, plan.count) - sink, 0),
        limit=plan.limit,
        next_entry=entry_of(plan, stored),
        generated=len(request.tokens),
        bytes_held=plan.limit * bytes_per_token,
        bytes_full=request.seen * bytes_per_token,
        kept=request.shares,
    )
