"""What is true of an engine between two steps; tests check it after every one."""

from __future__ import annotations

import torch

from snapstream.cache import reported_layers
from snapstream.engine.engine import Engine
from snapstream.engine.renewal import Placement
from snapstream.engine.request import Phase, Request


@torch.inference_mode()
def check_integrity(engine: Engine) -> None:
    """See that host and device agree about every slot, and that every cache is what its layout says.

    Raises:
        AssertionError: They do not.
    """
    executor, scheduler = engine.executor, engine.scheduler
    decode, readers = executor.decode, [request for request, _ in executor.readers]
    for slot, request in enumerate(scheduler.slots):
        if request is None or request.phase is not Phase.DECODE:
            assert not bool(decode.active[slot]), f"slot {slot} decodes for nobody"
            assert not bool(decode.count[:, slot].any())
            assert request is None or request in readers, f"{request.request_id} has a slot, but nobody reads for it"
        else:
            assert request.slot == slot
            _check_slot(engine, slot, request)
    for request in scheduler.waiting:
        assert request.slot is None
        assert request.phase is Phase.WAITING
        if request.sequence is not None:
            request.sequence.check_integrity()
    known = set(engine.request_ids)
    assert known >= {request.request_id for request in (*scheduler.waiting, *scheduler.running, *readers)}
    reading = executor.reading
    assert (reading is None) == (not readers)
    if reading is not None:
        assert reading.targets == [target for _, target in executor.readers]
        assert 0 <= reading.done < len(reading.tokens)
        assert reading.length <= executor.prefill.staging.entries
        for target in reading.targets:
            assert len(target.layers) == engine.spec.cached_layers
            done = range(min(reading.layer, engine.spec.layers))  # nothing is told of the next-token module
            told = len(set(done) & set(reported_layers(engine.spec.groups)))
            assert target.error is not None or len(target.mass) == told * target.telemetry


def _check_slot(engine: Engine, slot: int, request: Request) -> None:
    decode, placement = engine.executor.decode, request.placement
    assert placement is not None
    assert bool(decode.active[slot])
    if request.finish_reason is None:
        assert request.until_renewal >= 0
        assert int(decode.token[slot]) == request.tokens[-1]
    for number, group in enumerate(engine.spec.groups):
        now = placement if group.window is None else Placement.of_prompt(request.layouts[number], request.budget)
        layout = now.layout
        base, count, limit = (int(column[number, slot]) for column in (decode.base, decode.count, decode.limit))
        assert (base, limit) == (layout.base, layout.limit)
        # Tokens are stored when they are read, so the one drawn last is not there; a launch may have gone past an end.
        assert count >= now.count(request.decoded)
        assert int(decode.position[slot]) - count == request.before + len(request.prompt) - now.count(0)
        if request.finish_reason is None:
            assert count == now.count(request.decoded)
        for layer in (decode.layers[each] for each in group.layers):
            assert layout.base <= layout.limit <= layer.entries
            valid = layer.row(slot, min(count, limit))
            assert all(bool(torch.isfinite(tensor.float()).all()) for tensor in valid.tensors), (
                f"slot {slot} has no numbers"
            )
