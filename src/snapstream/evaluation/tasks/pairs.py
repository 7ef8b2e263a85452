"""Key-value retrieval: one value out of a JSON object of random pairs, in the manner of InfiniteBench.

There is no filler: every pair resembles the one that is asked for, so votes must be exact.
"""

from __future__ import annotations

import json
import random

from snapstream.evaluation.tasks.text import Count, Question, TaskText, TooShortError

HEADER = "Find the value of a key in this JSON object.\n"


def key_value(rng: random.Random, room: int, count: Count, depth: float | None) -> TaskText:
    """Pairs of six digits each, as many as fit."""
    ask = '\nThe value of "000000"?'
    lead = '\n{"000000": "'
    left = room - count(HEADER) - count("{}") - count(ask + lead)
    pairs: dict[str, str] = {}
    while True:
        key, value = f"{rng.randrange(10**6):06d}", f"{rng.randrange(10**6):06d}"
        left -= count(f'{key}": "{value}", "')  # cut where tokenizers cut: before digits
        if left < 0:
            break
        pairs.setdefault(key, value)
    keys, number = list(pairs), len(pairs)
    if number < 2:
        raise TooShortError(f"two pairs do not fit into {room} tokens")
    asked = [rng.randrange(number) for _ in range(12)]
    if depth is not None:
        asked[0] = min(number - 1, int(depth * number))
    questions = tuple(
        Question(ask.replace("000000", key), lead.replace("000000", key), f'{pairs[key]}"}}', (pairs[key],))
        for key in (keys[index] for index in asked)
    )
    return TaskText(HEADER + json.dumps(pairs), questions)
