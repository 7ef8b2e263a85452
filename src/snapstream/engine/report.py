"""Builds the outputs and cache reports of requests."""

from __future__ import annotations

from snapstream.cache import CacheSizes, CompressedSequence
from snapstream.compression import entry_of
from snapstream.engine.output import CacheUse, RequestOutput, SlotUse
from snapstream.engine.renewal import Placement
from snapstream.engine.request import Request


def cache_use(request: Request, sizes: CacheSizes) -> CacheUse | None:
    """Cache use of a request's prompt; ``None`` until prefill has ended."""
    if not request.layouts:
        return None
    layout = request.layouts[0]
    sink = min(request.budget.sink, layout.length, layout.base)
    prompt_tokens = request.before + len(request.prompt)
    return CacheUse(
        prompt_tokens=prompt_tokens,
        sink=sink,
        pinned=min(layout.base, layout.count) - sink,
        recent=max(layout.count - layout.base, 0),
        dropped=prompt_tokens - layout.count,
        limit=layout.limit,
        bytes_held=sizes.of([each.limit for each in request.layouts]),
        bytes_full=sizes.of_prompt(request.seen),
        kept=request.kept,
    )


def slot_use(request: Request, sizes: CacheSizes) -> SlotUse:
    """Slot use of a request that is being decoded, or was when it ended."""
    assert request.slot is not None
    placement = request.placement or Placement.of_prompt(request.layouts[0], request.budget)
    layout, stored = placement.layout, placement.count(request.decoded)
    sink = min(request.budget.sink, layout.count, layout.base)
    return SlotUse(
        slot=request.slot,
        busy=request.finish_reason is None,
        request_id=request.request_id,
        seen=request.seen,
        held=min(stored, layout.limit),
        sink=sink,
        pinned=max(min(layout.base, layout.count) - sink, 0),
        limit=layout.limit,
        next_entry=entry_of(layout, stored),
        generated=len(request.tokens),
        bytes_held=sizes.of([each.limit for each in request.layouts]),
        bytes_full=sizes.of_prompt(request.seen),
        kept=request.shares,
    )


def output_of(request: Request, new_text: str, saved: CompressedSequence | None, sizes: CacheSizes) -> RequestOutput:
    """Build the output of a request.

    Args:
        request: The request.
        new_text: Text added since the last output.
        saved: Its compressed sequence, if it is returned now.
        sizes: Sizes of caches.
    """
    wants_scores = request.params.prompt_logprobs is not None and bool(request.layouts)
    return RequestOutput(
        request_id=request.request_id,
        new_text=new_text,
        token_count=len(request.tokens),
        reused=request.reused,
        drafted=request.pace.drafted,
        accepted=request.pace.accepted,
        finished=request.finish_reason is not None,
        finish_reason=request.finish_reason,
        error=request.error,
        cache=cache_use(request, sizes),
        prompt_logprobs=request.prompt_logprobs if wants_scores else None,
        saved=saved,
        _produced=request.text.produced,
        _pieces=len(request.text.produced.pieces),
        _has_logprobs=request.params.logprobs is not None,
    )
