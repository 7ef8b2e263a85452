"""What a drafter is."""

from __future__ import annotations

from collections.abc import Sequence

from snapstream.engine.request import Request


class Drafter:
    """Guesses the next tokens of requests.

    Whatever it says, the output stays the same: guesses are verified by the model. It keeps nothing of a request that
    has ended.

    Attributes:
        needs_every_step: Steps verify guesses even if there are none.
    """

    needs_every_step = False

    def warm_up(self, pool: object = None) -> None:
        """Run and capture graphs, if there are any; ``pool`` as for :meth:`StaticGraph.warm_up`."""

    def prepare(self, requests: Sequence[Request]) -> None:
        """Work that comes before guessing, such as reading a prompt; a chunk of it at most.

        Args:
            requests: All that are decoded now; what is known of others can be forgotten.
        """

    def reset(self) -> None:
        """Forget all requests, whatever state an error has left things in."""

    def guess(self, requests: Sequence[Request], most: Sequence[int]) -> list[Sequence[int]]:
        """Guess what comes after the last token of each request.

        Args:
            requests: That are decoded and have not ended.
            most: Guesses that each one has use for; may be 0.

        Returns:
            Tokens of each, at most so many; none where nothing is known.
        """
        raise NotImplementedError
