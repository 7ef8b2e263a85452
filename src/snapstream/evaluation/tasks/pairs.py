"""Key-value retrieval: one value out of a JSON object of random pairs, in the manner of InfiniteBench.

Nothing in it is filler: every pair is like the one asked for, so what a vote keeps must be exact.
"""

from __future__ import annotations

import json
import random

from snapstream.evaluation.tasks.text import Count, DoesNotFit, Question, TaskText

HEADER = "Find the value of a key in this JSON object.\n"

_SAMPLE = [f"{key}23456" for key in range(1, 9)]


def key_value(rng: random.Random, room: int, count: Count, depth: float | None) -> TaskText:
    """Pairs of six digits each, as many as fit."""
    ask = '\nThe value of "000000"?'
    lead = '\n{"000000": "'
    size = (count(json.dumps(dict.fromkeys(_SAMPLE, "123456"))) - count("{}")) // len(_SAMPLE)
    left = room - count(HEADER) - count("{}") - count(ask + lead)
    number = left // size
    if number < 2:
        raise DoesNotFit(f"two pairs do not fit into {room} tokens")
    keys = [f"{key:06d}" for key in rng.sample(range(10**6), number)]
    pairs = {key: f"{rng.randrange(10**6):06d}" for key in keys}
    asked = [rng.randrange(number) for _ in range(12)]
    if depth is not None:
        asked[0] = min(number - 1, int(depth * number))
    questions = tuple(
        Question(ask.replace("000000", key), lead.replace("000000", key), f'{pairs[key]}"}}', (pairs[key],))
        for key in (keys[index] for index in asked)
    )
    return TaskText(HEADER + json.dumps(pairs), questions)
