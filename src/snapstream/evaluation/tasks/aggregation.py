"""Aggregation: which words of a long list are the most common, in the manner of RULER.

The answer is not in any one place. It needs a little of everything, which is what a small cache loses first.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from snapstream.evaluation.tasks.text import Count, Question, TaskText, TooShortError, others
from snapstream.evaluation.tasks.words import ADJECTIVES, NOUNS

HEADER = "Some words in this list are more common than others."


def common_words(rng: random.Random, room: int, count: Count, depth: float | None) -> TaskText:
    """Three words occur in the list ten times as often as each of the others."""
    words = rng.sample((*ADJECTIVES, *NOUNS), 23)
    return _listed(rng, room, count, words, lambda rank: 10.0 if rank < 3 else 1.0)


def frequent_words(rng: random.Random, room: int, count: Count, depth: float | None) -> TaskText:
    """Frequencies fall with the square of the rank (a zeta distribution); the first three are asked for."""
    words = rng.sample((*ADJECTIVES, *NOUNS), 40)
    return _listed(rng, room, count, words, lambda rank: (rank + 1) ** -2.0)


def _listed(rng: random.Random, room: int, count: Count, words: list[str], weight: Callable[[int], float]) -> TaskText:
    ask, lead = " Which three words are the most common?", " They are"
    left = room - count(HEADER) - count(ask + lead) - 1
    weights = [weight(rank) for rank in range(len(words))]
    sizes = [count(f" {word}") for word in words]
    unit = left / sum(size * share for size, share in zip(sizes, weights, strict=True))
    listed = [word for word, share in zip(words, weights, strict=True) for _ in range(int(unit * share))]
    if len(set(listed)) < 6:
        raise TooShortError(f"a list of words to count does not fit into {room} tokens")
    rng.shuffle(listed)
    wanted = tuple(words[:3])
    text = f"{HEADER} {' '.join(listed)}."
    return TaskText(text, (Question(ask, lead, f" {', '.join(wanted)}.", wanted, others(words, wanted)),))
