"""How many guesses are worth verifying: as few as cost nothing where they are wrong, many where they are right."""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY = 0.9
"""Weight of what is known when one thing more is seen."""
LASTING = 0.97
"""Weight of what is known of a step's cost when one more is seen."""
UNKNOWN, SPREAD, LARGEST = 0.1, 0.5, 10.0
"""What a guess costs while nothing was measured; how alike numbers of guesses are if no line can be drawn; and the most
that one measurement can say."""
LONGEST_REST = 32
"""Steps without guesses before one is tried again."""


class StepCost:
    """What a step with guesses takes, of what one without takes; measured while decoding.

    Products of a step read the weights once, so a guess costs little where memory is what limits them, and more where
    arithmetic is: with many sequences, or on processors without units for small products. With a very small model, the
    host takes the time.

    It is a line: something for the step, and something for each guess of a sequence. What was seen lately counts most.
    """

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # seconds of a step without guesses, by sequences
        self._weight = self._guesses = self._squares = self._ratios = self._products = 0.0

    def of(self, guesses: int) -> float:
        """The cost of a step with so many guesses of each sequence; 1 is that of a step without."""
        if not self._weight:
            return 1 + UNKNOWN * guesses
        mean, ratio = self._guesses / self._weight, self._ratios / self._weight
        spread = self._squares / self._weight - mean**2
        if spread < SPREAD:  # always about as many: what a step costs by itself cannot be told
            return 1 + max(0.0, (ratio - 1) / mean) * guesses
        slope = max(0.0, (self._products / self._weight - mean * ratio) / spread)
        return max(1.0, ratio - slope * mean) + slope * guesses

    def saw_plain(self, sequences: int, seconds: float) -> None:
        """Note what a step without guesses took."""
        self._plain[sequences] = _mean(self._plain.get(sequences, seconds), seconds)

    def saw_guesses(self, sequences: int, guesses: int, seconds: float) -> None:
        """Note what a step took that verified so many guesses of all sequences together."""
        plain = self._plain.get(sequences)
        if plain is None:
            return
        each = guesses / sequences
        ratio = min(max(seconds / plain, 1.0), LARGEST)  # whatever else the machine was busy with
        seen = (1.0, each, each**2, ratio, each * ratio)
        known = (self._weight, self._guesses, self._squares, self._ratios, self._products)
        self._weight, self._guesses, self._squares, self._ratios, self._products = (
            LASTING * old + new for old, new in zip(known, seen, strict=True)
        )


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

    def most(self, limit: int, cost: StepCost) -> int:
        """Guesses to make next.

        Args:
            limit: At most so many.
            cost: Of steps.

        Returns:
            The number that gives most tokens for what the step will cost.
        """
        if self._resting:
            self._resting -= 1
            return 0
        best, best_value, tokens = 0, 1.0, 1.0
        for guesses in range(1, limit + 1):
            tokens += self._right**guesses
            value = tokens / cost.of(guesses)
            if value > best_value:
                best, best_value = guesses, value
        if best:
            self._rest = 1
            return best
        # One is tried, and then none for a while.
        self._rest = min(2 * self._rest, LONGEST_REST)
        self._resting = self._rest
        return min(1, limit)

    def saw(self, drafted: int, accepted: int) -> None:
        """Note how many guesses were verified, and how many of them were right; those after a wrong one say nothing."""
        self.drafted += drafted
        self.accepted += accepted
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._right = _mean(self._right, right)


def _mean(known: float, seen: float) -> float:
    return MEMORY * known + (1 - MEMORY) * seen
