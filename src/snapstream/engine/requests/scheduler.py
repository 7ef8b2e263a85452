"""What goes next: first come, first served, except that a short prompt does not wait for a long one."""

from __future__ import annotations

from collections.abc import Sequence

from snapstream.engine.requests.request import Request
from snapstream.engine.requests.table import Prefilling, RequestTable


class Scheduler:
    """Decides which request gets a slot, and which prompt is prefilled in a step.

    Requests get slots in the order they came. One prompt is prefilled at a time in each lane, and lanes take turns, one
    step each. So a short prompt waits for the short ones before it, takes at most twice as long as alone, and slows a
    long one down to half its speed at worst. A request waits only while there is no free slot or another prompt is in
    its lane; meanwhile those behind it may go first, if they need another lane or no prefill.
    """

    def __init__(self, table: RequestTable, lanes: Sequence[int]) -> None:
        """Create it.

        Args:
            table: The requests.
            lanes: Tokens that each lane has room for, the longest first.
        """
        self._table, self._lanes = table, lanes
        self._last_lane = -1

    def lane_of(self, request: Request) -> int:
        """The lane that a request's prompt is prefilled in: the shortest that it fits in."""
        return max(lane for lane, room in enumerate(self._lanes) if lane == 0 or request.staged <= room)

    def next_request(self) -> Request | None:
        """The waiting request that gets a slot next; ``None`` if nothing can begin now."""
        table = self._table
        if not table.has_free_slot:
            return None
        return next(
            (each for each in table.waiting if each.prefilled is not None or self.lane_of(each) not in table.prefills),
            None,
        )

    def next_prefill(self) -> Prefilling | None:
        """The prefill to continue in this step; ``None`` if nothing is being prefilled."""
        prefills = self._table.prefills
        if not prefills:
            return None
        others = [lane for lane in prefills if lane != self._last_lane]
        self._last_lane = others[0] if others else self._last_lane
        return prefills[self._last_lane]
