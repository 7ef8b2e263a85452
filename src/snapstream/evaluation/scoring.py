"""Right or wrong, and how sure one can be of a share of right answers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_NORMAL = 1.959963984540054  # 97.5 % quantile


def found(part: str, output: str) -> bool:
    """Whether ``part`` stands in ``output`` as whole words or numbers; case and spacing do not matter."""
    words = r"\s+".join(map(re.escape, part.split()))
    return re.search(rf"(?<![0-9A-Za-z]){words}(?![0-9A-Za-z])", output, re.IGNORECASE) is not None


def equal(answer: str, output: str) -> bool:
    """Whether ``output`` is ``answer`` and nothing else, apart from spacing."""
    return output.split() == answer.split()


def interval(right: float, samples: int) -> tuple[float, float]:
    """The 95 % interval of a share (Wilson's score interval).

    Args:
        right: How many of the samples were right.
        samples: How many there were, 1 or more.
    """
    share, z2 = right / samples, _NORMAL**2
    center = (share + z2 / (2 * samples)) / (1 + z2 / samples)
    half = _NORMAL * math.sqrt(share * (1 - share) / samples + z2 / (4 * samples**2)) / (1 + z2 / samples)
    return max(0.0, center - half), min(1.0, center + half)


def paired_difference(ours: Sequence[bool], theirs: Sequence[bool]) -> tuple[float, float, float]:
    """How much more often the first was right on the same questions: the difference, and its 95 % interval.

    Args:
        ours: Right or wrong, question by question.
        theirs: The same questions in the same order.
    """
    count = len(ours)
    gaps = [int(a) - int(b) for a, b in zip(ours, theirs, strict=True)]
    mean = sum(gaps) / count
    variance = sum((gap - mean) ** 2 for gap in gaps) / max(count - 1, 1)
    half = _NORMAL * math.sqrt(variance / count)
    return mean, mean - half, mean + half
