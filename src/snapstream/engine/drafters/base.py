"""What a drafter is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from snapstream.engine.request import Request


class Drafter(ABC):
    """Guesses the next tokens of requests.

    Whatever it says, the output stays the same: guesses are verified by the model. It keeps nothing of a request that
    has ended.
    """

    @abstractmethod
    def guess(self, requests: Sequence[Request], most: Sequence[int]) -> list[Sequence[int]]:
        """Guess what comes after the last token of each request.

        Args:
            requests: That are decoded and have not ended.
            most: Guesses that each one has use for; may be 0.

        Returns:
            Tokens of each, at most so many; none where nothing is known.
        """
