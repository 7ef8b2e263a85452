"""Variable tracking: chains of copies scattered over noise, in the manner of RULER's multi-hop tracing."""

from __future__ import annotations

import random

from snapstream.evaluation.tasks.number import noise
from snapstream.evaluation.tasks.text import Count, Question, TaskText, depths, hide, others
from snapstream.evaluation.tasks.words import ANIMALS

HEADER = "A number is copied from variable to variable in this text. Follow it."
CHAIN = 4
"""Variables of one chain: the first gets a number, each other one a copy of its predecessor."""


def variables(rng: random.Random, room: int, count: Count, depth: float | None) -> TaskText:
    """Asks where a number was copied to, directly or through other variables; other chains are interleaved."""
    chains = min(8, max(2, room // 256))
    names = rng.sample(ANIMALS, chains * CHAIN)
    numbers = [f"{value:06d}" for value in rng.sample(range(10**6), chains)]
    hidden: list[tuple[float, str]] = []
    questions: list[Question] = []
    for index, number in enumerate(numbers):
        chain = names[index * CHAIN : (index + 1) * CHAIN]
        sources = [number, *chain[:-1]]
        places = sorted(depths(rng, CHAIN, None))
        if index == 0 and depth is not None:
            places = [depth, *(depth + (1 - depth) * place for place in places[1:])]  # where the chain begins
        hidden += [
            (place, f" Copy {source} to {name}.") for place, name, source in zip(places, chain, sources, strict=True)
        ]
        ask, lead = f" Where was {number} copied to?", f" It went from {number} to"
        questions.append(Question(ask, lead, f" {' to '.join(chain)}.", tuple(chain), others(names, chain)))
    asked = max(count(question.ask + question.lead) for question in questions)
    body = hide(rng, room - count(HEADER) - asked, count, noise, hidden)
    return TaskText(HEADER + body, tuple(questions))
