"""Questions about passages: who bought what from whom, among passages about the same people and objects.

Every distractor shares the seller or the object, so that no single word finds the answer. The answer's lead states the
deal in the words of the text, because a small model cannot rephrase the question by itself.
"""

from __future__ import annotations

import random

from snapstream.evaluation.tasks.text import Count, Question, TaskText, depths, hide, others
from snapstream.evaluation.tasks.words import NOUNS, PEOPLE, filler

HEADER = "Read these passages."


def deals(rng: random.Random, room: int, count: Count, depth: float | None) -> TaskText:
    """Asks for one deal; up to 24 others share its seller or its object."""
    seller, buyer, *people = rng.sample(PEOPLE, len(PEOPLE))
    thing, *things = rng.sample(NOUNS, 40)
    number = min(24, max(2, room // 96))
    told = [(seller, thing, buyer)]
    for index in range(number):
        other = people[1 + index // 2]
        told.append((seller, things[index], other) if index % 2 else (other, thing, rng.choice(people)))
    questions = tuple(
        Question(
            f" Who bought the {what} from the {who}?",
            f" The {who} sold the {what} to the",
            f" {whom}.",
            (whom,),
            others([buyer for _, _, buyer in told], (whom,)),
        )
        for who, what, whom in told
    )
    sentences = [
        f" The {who} sold the {what} to the {whom} in the {rng.choice(('morning', 'evening', 'spring', 'summer'))}."
        for who, what, whom in told
    ]
    asked = max(count(question.ask + question.lead) for question in questions)
    places = depths(rng, len(told), depth)
    body = hide(rng, room - count(HEADER) - asked, count, filler, list(zip(places, sentences, strict=True)))
    return TaskText(HEADER + body, questions)
