"""What is true of an engine between two steps; tests check it after every one."""

from __future__ import annotations

import torch

from snapstream.cache import reported_layers
from snapstream.engine.decode.renewal import Placement
from snapstream.engine.engine import Engine
from snapstream.engine.requests.request import Phase, Request


@torch.inference_mode()
def check_integrity(engine: Engine) -> None:
    """See that host and device agree about every slot, and that every cache is what its layout says.

    Raises:
        AssertionError: They do not.
    """
    table, runner = engine.table, engine.model_runner
    decode = runner.decoder
    for slot, request in enumerate(table.slots):
        if request is None or request.phase is not Phase.DECODE:
            assert not bool(decode.active[slot]), f"slot {slot} decodes for nobody"
            assert not bool(decode.count[:, slot].any())
            assert request is None or request in table.readers, (
                f"{request.request_id} has a slot, but nobody reads for it"
            )
        else:
            assert request.slot == slot
            _check_slot(engine, slot, request)
    for request in table.waiting:
        assert request.slot is None
        assert request.phase is Phase.WAITING
        if request.prefilled is not None:
            request.prefilled.sequence.check_integrity()
    known = set(engine.request_ids)
    assert known >= {request.request_id for request in (*table.waiting, *table.running, *table.readers)}
    for lane, prefill in table.prefills.items():
        job = prefill.job
        assert job.lane == lane
        assert [target.slot for target in job.targets] == [request.slot for request in prefill.readers]
        assert 0 <= job.done < len(job.tokens)
        assert job.length <= runner.prefiller.lanes[lane].entries
        for target in job.targets:
            assert len(target.layers) == engine.spec.cached_layers
            done = range(min(job.layer, engine.spec.layers))  # nothing is told of the next-token module
            told = len(set(done) & set(reported_layers(engine.spec.groups)))
            assert target.error is not None or len(target.mass) == told * target.return_kept_tokens


def _check_slot(engine: Engine, slot: int, request: Request) -> None:
    decode, placement = engine.model_runner.decoder, request.placement
    assert placement is not None
    assert bool(decode.active[slot])
    if request.finish_reason is None:
        assert request.until_renewal >= 0
        assert int(decode.token[slot]) == request.tokens[-1]
    for number, group in enumerate(engine.spec.groups):
        now = (
            placement
            if group.window is None
            else Placement.of_prompt(request.prefilled.layouts[number], request.budget)
        )
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
