"""How many guesses are made, of how many were right."""

import random

import pytest

from snapstream.engine.pace import LONGEST_REST, Pace, StepCost

COST = 0.1


def follow(share, steps=2000, limit=3, seed=0):
    """Guesses per step and tokens per step, where each guess is right with a probability."""
    rng, pace, tokens, made = random.Random(seed), Pace(), 0, 0
    for _ in range(steps):
        most = pace.most(limit, COST)
        assert 0 <= most <= limit
        right = 0
        while right < most and rng.random() < share:
            right += 1
        if most:
            pace.saw(most, right)
        made, tokens = made + most, tokens + right + 1
    assert pace.drafted == made
    assert pace.accepted == tokens - steps
    return made / steps, tokens / steps


def test_nothing_right_costs_nothing():
    guesses, tokens = follow(0.0)
    assert guesses < 2 / LONGEST_REST
    assert tokens == 1


def test_everything_right_gives_all_there_is():
    assert follow(1.0) == (3, 4)
    assert follow(1.0, limit=7) == pytest.approx((7, 8), abs=0.01)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_never_much_worse_than_any_fixed_number(share):
    """By what a step costs, and what it gives."""
    guesses, tokens = follow(share, limit=7)
    mine = tokens / (1 + COST * guesses)
    best = max(sum(share**k for k in range(g + 1)) / (1 + COST * g) for g in range(8))
    assert mine > 0.9 * best


def test_who_was_wrong_for_long_is_tried_again():
    pace = Pace()
    for _ in range(500):
        if pace.most(3, COST):
            pace.saw(1, 0)
    waits = 0
    while not pace.most(3, COST):
        waits += 1
    assert waits <= LONGEST_REST
    for _ in range(200):
        if (most := pace.most(3, COST)) > 0:
            pace.saw(most, most)
    assert pace.most(3, COST) == 3


def test_the_cost_of_a_guess_is_measured():
    """Beside a step without guesses of as many sequences; whatever else the machine was busy with."""
    cost = StepCost(0.1)
    cost.saw_guesses(2, 6, 9.0)
    assert cost.share == 0.1  # nothing to compare with
    for _ in range(50):
        cost.saw_plain(1, 1.0)
        cost.saw_plain(2, 1.5)
        cost.saw_guesses(1, 3, 1.6)
    assert cost.share == pytest.approx(0.2, abs=0.01)
    for _ in range(50):
        cost.saw_guesses(2, 3, 1.5 * 1.75)
    assert cost.share == pytest.approx(0.5, abs=0.01)
    cost.saw_guesses(1, 3, 1000.0)
    assert cost.share < 0.7
    cost.saw_guesses(1, 3, 0.001)
    assert 0 < cost.share


def test_guesses_that_cost_much_are_made_where_they_are_sure():
    pace = Pace()
    assert pace.most(7, 0.9) <= 1
    for _ in range(30):
        pace.saw(1, 1)
    assert pace.most(7, 0.3) == 7
    assert pace.most(7, 0.05) == 7
