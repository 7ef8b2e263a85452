"""Builds the outputs and cache reports of requests."""

from __future__ import annotations

from snapstream.cache import CompressedSequence
from snapstream.compression import entry_of
from snapstream.engine.output import CacheUse, RequestOutput, SlotUse
from snapstream.engine.renewal import Placement
from snapstream.engine.request import Request


def cache_use(request: Request, bytes_per_token: int) -> CacheUse | None:
    """Cache use of a request's prompt; ``None`` until prefill has ended."""
    layout = request.layout
    if layout is None:
        return None
    sink = min(request.budget.sink, layout.length)
    prompt_tokens = request.before + len(request.prompt)
    return CacheUse(
        prompt_tokens=prompt_tokens,
        sink=sink,
        pinned=min(layout.base, layout.count) - sink,
        recent=max(layout.count - layout.base, 0),
        dropped=prompt_tokens - layout.count,
        limit=layout.limit,
        bytes_held=layout.limit * bytes_per_token,
        bytes_full=request.seen * bytes_per_token,
        kept=request.kept,
    )


def slot_use(request: Request, bytes_per_token: int) -> SlotUse:
    """Slot use of a request that is being decoded, or was when it ended."""
    assert request.layout is not None
    assert request.slot is not None
    placement = request.placement or Placement.of_prompt(request.layout, request.budget)
    layout, stored = placement.layout, placement.count(request.decoded)
    sink = min(request.budget.sink, layout.count)
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
        bytes_held=layout.limit * bytes_per_token,
        bytes_full=request.seen * bytes_per_token,
        kept=request.shares,
    )


def output_of(request: Request, new_text: str, saved: CompressedSequence | None, bytes_per_token: int) -> RequestOutput:
    """Build the output of a request.

    Args:
        request: The request.
        new_text: Text added since the last output.
        saved: Its compressed sequence, if it is returned now.
        bytes_per_token: Bytes of keys and values of one token over all layers.
    """
    wants_scores = request.params.prompt_logprobs is not None and request.layout is not None
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
        cache=cache_use(request, bytes_per_token),
        prompt_logprobs=request.prompt_logprobs if wants_scores else None,
        saved=saved,
        _produced=request.text.produced,
        _pieces=len(request.text.produced.pieces),
        _has_logprobs=request.params.logprobs is not None,
    )
