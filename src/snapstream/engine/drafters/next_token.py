"""Drafting with the model's own next-token module (multi-token prediction, DeepSeek-V3, arXiv 2412.19437, section 2.2).

The module is part of the checkpoint and costs as much as one layer of the model. Its input is the hidden state that the
model predicted the next token from.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ReferenceType, ref

from typing_extensions import override

from snapstream.engine.decode.mtp import Mtp
from snapstream.engine.drafters.base import Drafter
from snapstream.engine.requests.request import Request
from snapstream.kernels.triton import current_device
from snapstream.transfers import to_host


class NextToken(Drafter):
    """Drafts the tokens after those of the last step. A request's first step has no draft tokens."""

    needs_every_step = True

    def __init__(self, mtp: Mtp) -> None:
        self._mtp = mtp
        # The request whose last step the module has followed, by slot.
        self._followed: dict[int, ReferenceType[Request]] = {}

    @override
    def guess(self, requests: Sequence[Request], most: Sequence[int]) -> list[Sequence[int]]:
        before, self._followed = self._followed, {}
        wanted: list[tuple[int, int]] = []
        for request, many in zip(requests, most, strict=True):
            slot = request.own_slot
            known = before.get(slot)
            wanted.append((slot, many if known is not None and known() is request else 0))
            self._followed[slot] = ref(request)
        deepest = max((many for _, many in wanted), default=0)
        if deepest < 1:
            return [()] * len(requests)
        with current_device(self._mtp.device):
            rows = to_host([self._mtp.guess(deepest)])[0].tolist()
        return [rows[slot][: max(0, many)] for slot, many in wanted]

    @override
    def reset(self) -> None:
        self._followed = {}
