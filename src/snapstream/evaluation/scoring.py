"""Which answers are right, and confidence intervals of shares of right answers."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

_NORMAL = 1.959963984540054  # 97.5 % quantile


def found_parts(parts: Sequence[str], rivals: Sequence[str], output: str) -> list[bool]:
    """Which parts of an answer occur in an output, as whole words or numbers; case and spacing do not matter.

    Of the parts and rivals that the output names, only the first ones count, as many as there are parts: an output that
    names every word of a text has not answered which three are the most common.

    Args:
        parts: What the answer consists of; their order does not matter.
        rivals: What else might have been named.
        output: What the model wrote.
    """
    places = {name: place for name in (*parts, *rivals) if (place := _place(name, output)) is not None}
    first = sorted(places, key=lambda name: places[name])[: len(parts)]
    return [part in first for part in parts]


def _place(name: str, output: str) -> int | None:
    words = r"\s+".join(map(re.escape, name.split()))
    match = re.search(rf"(?<![0-9A-Za-z]){words}(?![0-9A-Za-z])", output, re.IGNORECASE)
    return None if match is None else match.start()


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


def paired_difference(gaps: Sequence[float]) -> tuple[float, float, float]:
    """The mean of differences on the same questions, and its 95 % interval.

    The interval is that of Agresti and Min: it adds two questions, of which half a question is won and half a question
    is lost. It therefore has a width even if all questions agree.

    Args:
        gaps: Per question, how much more often one was right than the other, -1 to 1. Everything that was asked about
            one text, such as at several cache sizes, is one question, because the answers are not independent.
    """
    count = len(gaps)
    center = sum(gaps) / (count + 2)
    variance = (sum(gap * gap for gap in gaps) + 1) / (count + 2) - center**2
    half = _NORMAL * math.sqrt(variance / (count + 2))
    return sum(gaps) / count, max(-1.0, center - half), min(1.0, center + half)
