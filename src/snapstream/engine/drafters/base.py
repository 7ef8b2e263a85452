"""The interface of drafters."""

from __future__ import annotations

from collections.abc import Sequence

from snapstream.engine.requests.request import Request


class Drafter:
    """Drafts the next tokens of requests.

    A drafter cannot change the output, because the model verifies every draft token. It keeps nothing of a request that
    has ended.

    Attributes:
        needs_every_step: Whether every step must be a verification step, even without draft tokens.
    """

    needs_every_step = False

    def warm_up(self, pool: object = None) -> None:
        """Run the graphs, if there are any, and capture them; ``pool`` as for :meth:`StaticGraph.warm_up`."""

    def prepare(self, requests: Sequence[Request]) -> None:
        """Do work that must precede drafting, such as prefilling a prompt; at most one chunk of it per call.

        Args:
            requests: All requests that are being decoded. State of other requests can be dropped.
        """

    def reset(self) -> None:
        """Drop the state of all requests; works whatever state an error has left it in."""

    def guess(self, requests: Sequence[Request], most: Sequence[int]) -> list[Sequence[int]]:
        """Draft the tokens after the last token of each request.

        Args:
            requests: Requests that are being decoded and have not ended.
            most: Maximum number of draft tokens per request; may be 0.

        Returns:
            The draft tokens of each request, at most as many as ``most`` says, possibly none.
        """
        raise NotImplementedError
