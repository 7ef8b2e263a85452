"""How many guesses are worth verifying: as few as cost nothing where they are wrong, many where they are right."""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY = 0.8
"""Weight of what is known when one thing more is seen."""
LONGEST_REST = 32
"""Steps without guesses before one is tried again."""


class StepCost:
    """What one more token of every sequence costs in a step, of what the step costs; measured while decoding.

    Products of a step read the weights once, so it is little where memory is what limits them, and more where it is
    arithmetic: with many sequences, or on processors without units for small products.

    Attributes:
        share: The cost.
    """

    def __init__(self, share: float = 0.1) -> None:
        self.share = share
        self._plain: dict[int, float] = {}  # seconds of a step without guesses, by sequences

    def saw_plain(self, sequences: int, seconds: float) -> None:
        """Note what a step without guesses took."""
        self._plain[sequences] = _mean(self._plain.get(sequences, seconds), seconds)

    def saw_guesses(self, sequences: int, guesses: int, seconds: float) -> None:
        """Note what a step took that verified so many guesses of all sequences together."""
        plain = self._plain.get(sequences)
        if plain is not None:
            share = (seconds / plain - 1) * sequences / guesses
            self.share = _mean(self.share, min(max(share, 0.0), 1.0))  # whatever else the machine was busy with


@dataclass
class Pace:
    """Of one request.

    Attributes:
        drafted: Guesses that were verified.
        accepted: Those that were right.
    """

    drafted: int = 0
    accepted: int = 0
    _right: float = field(default=0.7, repr=False)
    _rest: int = field(default=1, repr=False)
    _resting: int = field(default=0, repr=False)

    def most(self, limit: int, cost: float) -> int:
        """Guesses to make next.

        Args:
            limit: At most so many.
            cost: See :class:`StepCost`.

        Returns:
            The number that gives most tokens for what the step will cost.
        """
        if self._resting:
            self._resting -= 1
            return 0
        best, best_value, tokens = 0, 1.0, 1.0
        for guesses in range(1, limit + 1):
            tokens += self._right**guesses
            value = tokens / (1 + cost * guesses)
            if value > best_value:
                best, best_value = guesses, value
        if not best and limit:
            # One is tried, and then, if it is wrong, none for a while.
            self._rest = min(2 * self._rest, LONGEST_REST)
            self._resting = self._rest
            return 1
        return best

    def saw(self, drafted: int, accepted: int) -> None:
        """Note how many guesses were verified, and how many of them were right; those after a wrong one say nothing."""
        self.drafted += drafted
        self.accepted += accepted
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._right = _mean(self._right, right)
        if accepted:
            self._rest, self._resting = 1, 0


def _mean(known: float, seen: float) -> float:
    return MEMORY * known + (1 - MEMORY) * seen
