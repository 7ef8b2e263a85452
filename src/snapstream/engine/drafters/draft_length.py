"""Chooses how many tokens to draft, from measured step costs and a request's recent acceptance rate."""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY = 0.9
"""Weight of the old value in moving averages of step times and acceptance."""
LASTING = 0.97
"""Weight of the old sums in the regression of step costs."""
UNKNOWN, SPREAD, LARGEST = 0.1, 0.5, 10.0
"""Cost of a draft token before anything was measured; variance of draft lengths below which no line is fitted; and the
largest cost ratio that a single measurement can report."""
LONGEST_REST = 32
"""Maximum number of steps without drafting before one token is drafted again."""


class StepCost:
    """Cost of a step with draft tokens, relative to a step without; measured while decoding.

    Matrix products read the weights once per step. A draft token therefore costs little where memory bandwidth is the
    limit. It costs more where arithmetic is, with many sequences or on processors without units for small products.
    With a very small model, the host dominates.

    The model is linear: a constant for the step, plus a cost per draft token and sequence. Recent measurements have the
    largest weight.
    """

    def __init__(self) -> None:
        self._plain: dict[int, float] = {}  # seconds of a step without guesses, by sequences
        self._weight = self._guesses = self._squares = self._ratios = self._products = 0.0

    def of(self, guesses: int) -> float:
        """Cost of a step with ``guesses`` draft tokens per sequence; a step without drafts costs 1."""
        if not self._weight:
            return 1 + UNKNOWN * guesses
        mean, ratio = self._guesses / self._weight, self._ratios / self._weight
        spread = self._squares / self._weight - mean**2
        if spread < SPREAD:  # nearly constant draft length: the cost of the step itself cannot be separated
            return 1 + max(0.0, (ratio - 1) / mean) * guesses
        slope = max(0.0, (self._products / self._weight - mean * ratio) / spread)
        return max(1.0, ratio - slope * mean) + slope * guesses

    def saw_plain(self, sequences: int, seconds: float) -> None:
        """Record the time of a step without draft tokens."""
        self._plain[sequences] = _mean(self._plain.get(sequences, seconds), seconds)

    def saw_guesses(self, sequences: int, guesses: int, seconds: float) -> None:
        """Record the time of a step that verified ``guesses`` draft tokens, counted over all sequences."""
        plain = self._plain.get(sequences)
        if plain is None:
            return
        each = guesses / sequences
        ratio = min(max(seconds / plain, 1.0), LARGEST)  # bounded, because other load on the machine distorts it
        seen = (1.0, each, each**2, ratio, each * ratio)
        known = (self._weight, self._guesses, self._squares, self._ratios, self._products)
        self._weight, self._guesses, self._squares, self._ratios, self._products = (
            LASTING * old + new for old, new in zip(known, seen, strict=True)
        )


@dataclass
class DraftLength:
    """Draft length of one request."""

    _right: float = field(default=0.7, repr=False)
    _rest: int = field(default=1, repr=False)
    _resting: int = field(default=0, repr=False)

    def most(self, limit: int, cost: StepCost) -> int:
        """Number of tokens to draft next.

        Args:
            limit: Maximum draft length.
            cost: Measured costs of steps.

        Returns:
            The number with the most expected tokens per cost.
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
        # Drafting does not pay: draft one token as a probe, then none for a while.
        self._rest = min(2 * self._rest, LONGEST_REST)
        self._resting = self._rest
        return min(1, limit)

    def saw(self, drafted: int, accepted: int) -> None:
        """Record the verified and accepted draft tokens of a step; those after a wrong one carry no information."""
        for right in [1.0] * accepted + [0.0] * (accepted < drafted):
            self._right = _mean(self._right, right)


def _mean(known: float, seen: float) -> float:
    return MEMORY * known + (1 - MEMORY) * seen
