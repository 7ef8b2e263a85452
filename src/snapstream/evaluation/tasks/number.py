"""One number hidden in noise, in the manner of InfiniteBench's passkey and number retrieval."""

from __future__ import annotations

import random

from snapstream.evaluation.tasks.text import Count, Question, TaskText, depths, hide

NOISE = (
    " The grass is green.",
    " The sky is blue.",
    " The sun is yellow.",
    " Here we go.",
    " There and back again.",
)


def noise(rng: random.Random) -> str:
    """Draws one of five sentences."""
    return rng.choice(NOISE)


def passkey(rng: random.Random, room: int, count: Count, depth: float | None) -> TaskText:
    """A pass key of six digits."""
    key = f"{rng.randrange(10**6):06d}"
    return _find(rng, room, count, depth, "pass key", key)


def number(rng: random.Random, room: int, count: Count, depth: float | None) -> TaskText:
    """A sequence of twelve digits with runs of equal digits, in which it is easy to lose the place."""
    digits = ""
    while len(digits) < 12:
        digits += str(rng.randrange(10)) * rng.randint(1, 4)
    return _find(rng, room, count, depth, "sequence", digits[:12])


def _find(rng: random.Random, room: int, count: Count, depth: float | None, name: str, value: str) -> TaskText:
    header = f"A {name} is hidden in this text. Remember it."
    hidden = f" The {name} is {value}. Remember it. {value} is the {name}."
    question = Question(f" What is the {name}?", f" The {name} is", f" {value}.", (value,))
    left = room - count(header) - count(question.ask + question.lead)
    body = hide(rng, left, count, noise, [(depths(rng, 1, depth)[0], hidden)])
    return TaskText(header + body, (question,))
