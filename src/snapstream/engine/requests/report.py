"""Builds the outputs and cache reports of requests."""

from __future__ import annotations

from snapstream.cache import CacheSizes, CompressedSequence
from snapstream.compression import entry_of
from snapstream.engine.requests.output import CacheUse, RequestOutput, SlotUse
from snapstream.engine.requests.request import Phase, Request


def cache_use(request: Request, sizes: CacheSizes) -> CacheUse | None:
    """Cache use of a request's prompt; ``None`` until it is in its slot."""
    result = request.prefilled
    if result is None or request.phase is Phase.WAITING:
        return None
    layout = result.layouts[0]
    sink = min(request.budget.sink, layout.length, layout.base)
    return CacheUse(
        prompt_tokens=request.prompt_tokens,
        sink=sink,
        pinned=min(layout.base, layout.count) - sink,
        recent=max(layout.count - layout.base, 0),
        dropped=request.prompt_tokens - layout.count,
        limit=layout.limit,
        bytes_held=sizes.of([each.limit for each in result.layouts]),
        bytes_full=sizes.of_prompt(request.seen),
        kept=result.kept,
    )


def slot_use(request: Request, slot: int, sizes: CacheSizes) -> SlotUse:
    """Use of a slot by a request that is being decoded in it, or was when it ended."""
    result, placement = request.prefilled, request.placement
    assert result is not None
    assert placement is not None
    layout, stored = placement.layout, placement.count(request.decoded)
    sink = min(request.budget.sink, layout.count, layout.base)
    return SlotUse(
        slot=slot,
        busy=request.finish_reason is None,
        request_id=request.request_id,
        seen=request.seen,
        held=min(stored, layout.limit),
        sink=sink,
        pinned=max(min(layout.base, layout.count) - sink, 0),
        limit=layout.limit,
        next_entry=entry_of(layout, stored),
        generated=len(request.tokens),
        bytes_held=sizes.of([each.limit for each in result.layouts]),
        bytes_full=sizes.of_prompt(request.seen),
        kept=result.shares,
        pin=request.budget.pin,
    )


def output_of(request: Request, new_text: str, saved: CompressedSequence | None, sizes: CacheSizes) -> RequestOutput:
    """Build the output of a request.

    Args:
        request: The request.
        new_text: Text added since the last output.
        saved: Its compressed sequence, if it is returned now.
        sizes: Sizes of caches.
    """
    result, cache = request.prefilled, cache_use(request, sizes)
    wants_scores = request.params.prompt_logprobs is not None and cache is not None
    return RequestOutput(
        request_id=request.request_id,
        new_text=new_text,
        token_count=len(request.tokens),
        reused=0 if result is None else result.reused,
        drafted=request.drafted,
        accepted=request.accepted,
        finished=request.finish_reason is not None,
        finish_reason=request.finish_reason,
        stopped_by=request.text.stopped_by,
        error=request.error,
        cache=cache,
        prompt_logprobs=result.logprobs if wants_scores and result is not None else None,
        saved=saved,
        _produced=request.text.produced,
        _pieces=len(request.text.produced.pieces),
        _has_logprobs=request.params.logprobs is not None,
    )
