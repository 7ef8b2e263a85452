"""The model's own next-token module (multi-token prediction, DeepSeek-V3, arXiv 2412.19437, section 2.2).

It is part of the checkpoint, costs one layer of the model's depth, and knows what the model knows: the state that the
next token was taken from.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ReferenceType, ref

from snapstream.engine.ahead import Ahead
from snapstream.engine.drafters.base import Drafter
from snapstream.engine.request import Request
from snapstream.kernels.triton import current_device
from snapstream.transfers import to_host


class NextToken(Drafter):
    """Guesses what comes after the tokens of the last step; a request's first step has none."""

    needs_every_step = True

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead
        # Whose last step the module has followed, by slot.
        self._followed: dict[int, ReferenceType[Request]] = {}

    def guess(self, requests: Sequence[Request], most: Sequence[int]) -> list[Sequence[int]]:
        """See :class:`Drafter`."""
        before, self._followed = self._followed, {}
        wanted: list[tuple[int, int]] = []
        for request, many in zip(requests, most, strict=True):
            slot = request.slot
            assert slot is not None
            known = before.get(slot)
            wanted.append((slot, many if known is not None and known() is request else 0))
            self._followed[slot] = ref(request)
        deepest = max((many for _, many in wanted), default=0)
        if deepest < 1:
            return [()] * len(requests)
        with current_device(self._ahead.device):
            rows = to_host([self._ahead.guess(deepest)])[0].tolist()
        return [rows[slot][: max(0, many)] for slot, many in wanted]

    def reset(self) -> None:
        """See :class:`Drafter`."""
        self._followed = {}
