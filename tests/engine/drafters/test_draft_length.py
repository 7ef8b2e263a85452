"""How many guesses are made, of how many were right."""

import random

import pytest

from snapstream.engine.drafters.draft_length import LONGEST_REST, DraftLength, StepCost

COST = 0.1


class Line(StepCost):
    """A cost that is known."""

    def of(self, guesses):
        return 1 + COST * guesses


def follow(share, steps=2000, limit=3, seed=0):
    """Guesses per step and tokens per step, where each guess is right with a probability."""
    rng, length, tokens, made = random.Random(seed), DraftLength(), 0, 0
    for _ in range(steps):
        most = length.most(limit, Line())
        assert 0 <= most <= limit
        right = 0
        while right < most and rng.random() < share:
            right += 1
        if most:
            length.saw(most, right)
        made, tokens = made + most, tokens + right + 1
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
    length = DraftLength()
    for _ in range(500):
        if length.most(3, Line()):
            length.saw(1, 0)
    waits = 0
    while not length.most(3, Line()):
        waits += 1
    assert waits <= LONGEST_REST
    for _ in range(200):
        if (most := length.most(3, Line())) > 0:
            length.saw(most, most)
    assert length.most(3, Line()) == 3


def steps(fixed, slope, guesses=(1, 3, 7), sequences=1, rounds=30):
    """What is known after steps of so many guesses."""
    cost = StepCost()
    for _ in range(rounds):
        cost.saw_plain(sequences, 2.0)
        for each in guesses:
            cost.saw_guesses(sequences, each * sequences, 2.0 * (fixed + slope * each))
    return cost


@pytest.mark.parametrize(("fixed", "slope"), [(1.0, 0.05), (1.0, 0.3), (1.5, 0.0), (3.0, 0.4)])
@pytest.mark.parametrize("sequences", [1, 4])
def test_the_cost_of_a_step_is_measured(fixed, slope, sequences):
    """Beside a step without guesses of as many sequences."""
    cost = steps(fixed, slope, sequences=sequences)
    for guesses in (1, 2, 5, 7):
        assert cost.of(guesses) == pytest.approx(fixed + slope * guesses, rel=0.01)
    cost.saw_guesses(sequences + 1, 3, 1e9)  # nothing to compare with
    assert cost.of(5) == pytest.approx(fixed + slope * 5, rel=0.01)


def test_the_cost_of_always_as_many_guesses():
    cost = steps(1.0, 0.3, guesses=(4,))
    assert cost.of(4) == pytest.approx(2.2)
    assert cost.of(1) == pytest.approx(1.3)


def test_one_strange_measurement_is_not_the_end():
    cost = steps(1.0, 0.1)
    cost.saw_guesses(1, 3, 1e9)
    assert cost.of(3) < 4
    cost.saw_guesses(1, 3, 1e-9)
    assert cost.of(3) >= 1


def test_nothing_known_yet():
    assert StepCost().of(3) == pytest.approx(1.3)


def test_guesses_that_cost_more_than_they_bring_are_hardly_made():
    """As of a model so small that the host takes the time: all of them are right, and yet."""
    length, cost, made = DraftLength(), steps(3.0, 0.4), 0
    for _ in range(500):
        most = length.most(3, cost)
        made += most
        if most:
            length.saw(most, most)
    assert made < 500 / LONGEST_REST + 10
    assert length.most(7, steps(1.0, 0.2)) in (0, 7)
