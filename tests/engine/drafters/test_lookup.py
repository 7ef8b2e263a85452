"""Prompt lookup beside the obvious search."""

import random
from types import SimpleNamespace

import pytest

from snapstream.engine.drafters.lookup import LONGEST, SHORTEST, PromptLookup, Text


def naive_continuation(tokens, most):
    """Every earlier place, every length."""
    best, end = 0, None
    for at in range(len(tokens) - 1):
        same = 0
        while same < LONGEST and same <= at and tokens[at - same] == tokens[len(tokens) - 1 - same]:
            same += 1
        if same >= max(best, SHORTEST):
            best, end = same, at
    text = list(tokens)
    while end is not None and len(text) < len(tokens) + most:
        end += 1
        text.append(text[end])
    return text[len(tokens) :] if end is not None else []


@pytest.mark.parametrize("vocabulary", [1, 2, 3, 10, 1000])
def test_equals_the_obvious_search(vocabulary):
    rng = random.Random(vocabulary)
    found = 0
    for _ in range(300):
        tokens = [rng.randrange(vocabulary) for _ in range(rng.randrange(1, 60))]
        most = rng.randrange(1, 9)
        got = Text(tokens).continuation(most)
        assert got == naive_continuation(tokens, most)
        found += bool(got)
    assert found or vocabulary == 1000


def test_a_text_that_grows_is_the_same_text():
    rng = random.Random(0)
    tokens = [rng.randrange(3) for _ in range(500)]
    text, at = Text(tokens[:1]), 1
    while at < len(tokens):
        more = tokens[at : at + rng.randrange(5)]
        text.extend(more)
        at += len(more)
        assert len(text) == at
        assert text.continuation(4) == Text(tokens[:at]).continuation(4)


def test_what_was_generated_is_part_of_the_text_and_nothing_is_kept_of_who_is_gone():
    class Request(SimpleNamespace):
        __hash__ = object.__hash__

    lookup = PromptLookup()
    request = Request(all_tokens=[1, 2, 3, 4, 5, 6, 7, 8], tokens=[1])
    assert lookup.guess([request], [3]) == [[]]
    request.tokens += [2]
    assert lookup.guess([request], [3]) == [[3, 4, 5]]
    request.tokens += [3, 4, 9]
    assert lookup.guess([request], [3]) == [[]]
    request.tokens += [2, 3]
    assert lookup.guess([request], [2]) == [[4, 9]]
    assert lookup.guess([request], [0]) == [()]
    assert len(lookup._texts) == 1
    del request
    assert not lookup._texts
