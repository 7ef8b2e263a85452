"""Requests over a runner without a model: thousands of steps in no time."""

import random

import pytest

from snapstream.engine.requests.request import Phase
from snapstream.errors import RequestError
from tests.engine.requests.fake import ask, make_core


def run(core, steps=1000):
    """The last output of each request."""
    ends = {}
    for _ in range(steps):
        if not core.busy:
            return ends
        for output in core.step():
            if output.finished:
                assert output.request_id not in ends, "told twice"
                ends[output.request_id] = output
    raise AssertionError("it does not come to an end")


def calls(core, name):
    return [about for call, about in core.runner.done if call == name]


def test_one_request_from_beginning_to_end():
    core = make_core()
    request = ask("one", 25, tokens=6)
    core.add(request)
    phases = []
    while core.busy:
        core.step()
        phases.append(request.phase)
    # Three chunks; the first token is told before a launch; of the second launch, one token is needed.
    assert phases == [Phase.PREFILL] * 2 + [Phase.DECODE] * 2 + [Phase.DONE]
    assert request.tokens == [0, 1, 2, 3, 4, 5]
    assert core.runner.done == [
        ("begin", ("one",)),
        ("prefill", 0),
        ("prefill", 0),
        ("prefill", 0),
        ("start", "one"),
        ("decode", 1),
        ("decode", 1),
        ("release", 0),
    ]


def test_first_come_first_served():
    core = make_core(slots=2)
    for number in range(6):
        core.add(ask(str(number), 30 + number))
    run(core)
    assert calls(core, "start") == ["0", "1", "2", "3", "4", "5"]


def test_the_head_of_the_queue():
    core = make_core(slots=1)
    core.add(ask("a", 30))
    core.step()
    core.add(ask("b", 31))
    core.add(ask("c", 32), first=True)
    run(core)
    assert calls(core, "start") == ["a", "c", "b"]


def test_a_short_prompt_does_not_wait_for_a_long_one():
    """It takes twice as long as alone at most, and so does the long one."""
    core = make_core(slots=3)
    core.add(ask("long", 500))
    core.step()
    core.add(ask("other", 400))  # waits: its lane is taken
    core.add(ask("short", 20))
    ends, steps = [], 0
    while core.busy:
        steps += 1
        ends += [(output.request_id, steps) for output in core.step() if output.token_count == 1]
    when = dict(ends)
    assert when["short"] <= 2 * 2 + 1
    assert when["long"] <= 50 + 2 + 3  # its chunks, those of the short one, and launches
    assert [name for name, _ in ends] == ["short", "long", "other"]


def test_many_short_prompts_do_not_starve_a_long_one():
    """However many there are, it gets half of the steps; and a slot when its turn comes."""
    core = make_core(slots=2)
    core.add(ask("long", 200, tokens=1))
    steps = 0
    while core.table.requests.get("long"):
        steps += 1
        core.add(ask(f"short-{steps}", 20, tokens=1))
        core.step()
    assert steps <= 2 * 20 + 2


def test_those_with_the_same_prompt_share_a_prefill():
    core = make_core(slots=2)
    for name in "abcd":
        core.add(ask(name, 50))
    core.add(ask("e", 50, start=1))
    run(core)
    assert calls(core, "begin") == [("a", "b", "c", "d"), ("e",)]
    assert calls(core, "start") == ["a", "b", "c", "d", "e"]


def test_what_waits_for_a_slot_is_bounded():
    """Of the spare memory, one compressed prompt takes 100 bytes here."""
    core = make_core(slots=1, spare=200)
    for name in "abcde":
        core.add(ask(name, 50))
    run(core)
    assert calls(core, "begin") == [("a", "b"), ("c", "d"), ("e",)]


def test_no_memory_for_those_that_wait_is_no_reason_to_fail():
    core = make_core(slots=1)
    core.runner.fails = lambda name: name == "begin" and len(core.runner.done[-1][1]) > 1 and fail(MemoryError())
    for name in "abc":
        core.add(ask(name, 50))
    assert {output.finish_reason for output in run(core).values()} == {"length"}


def fail(error):
    raise error


@pytest.mark.parametrize("place", ["begin", "prefill", "start"])
def test_an_error_around_a_prefill_ends_those_it_was_for(place):
    core = make_core(slots=1)
    left = [RuntimeError("on purpose")]
    core.runner.fails = lambda name: name == place and left and fail(left.pop())
    core.add(ask("one", 30))
    core.add(ask("two", 40))
    ends = run(core)
    assert (ends["one"].finish_reason, ends["one"].error) == ("error", "RuntimeError: on purpose")
    assert ends["two"].finish_reason == "length"


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_what_an_interrupt_leaves(error):
    """What runs ends, and what waits is as it was."""
    core = make_core(slots=2)
    for name in "abcd":
        core.add(ask(name, 30, tokens=50, start=ord(name)))
    while len(core.table.running) < 2:
        core.step()
    core.runner.fails = lambda name: name == "decode" and fail(error())
    with pytest.raises(error):
        core.step()
    core.runner.fails = lambda name: None
    assert [request.request_id for request in core.table.waiting] == ["c", "d"]
    assert [(o.request_id, o.finish_reason) for o in core.take_outputs()] == [("a", "error"), ("b", "error")]
    assert {name: output.finish_reason for name, output in run(core).items()} == {"c": "length", "d": "length"}


def test_names():
    core = make_core()
    core.add(ask("request-0", 5))
    with pytest.raises(RequestError, match="in use"):
        core.add(ask("request-0", 5))
    assert core.new_name() == "request-1"


def check(core):
    """What is true between two steps."""
    table = core.table
    held = [request for request in table.slots if request is not None]
    assert len(set(held)) == len(held)
    assert {*table.waiting, *held} == set(table.requests.values())
    for request in table.requests.values():
        assert (request.slot is None) == (request.phase is Phase.WAITING)
        assert request.slot is None or table.slots[request.slot] is request
    assert {request.slot for request in table.running} == set(core.runner.active)
    for lane, prefill in table.prefills.items():
        assert prefill.job.lane == lane
        assert len(prefill.job.targets) == len(prefill.readers) > 0
    reading = [request for request in held if request.phase is Phase.PREFILL]
    assert set(reading) <= set(table.readers)


def test_whatever_happens_everybody_hears_once():
    """Requests, aborts, discards and errors anywhere, at random."""
    rng = random.Random(0)
    for _ in range(300):
        core = make_core(slots=rng.randrange(1, 4), spare=rng.choice([0, 150, 10**6]), steps=rng.randrange(1, 6))
        chance = rng.choice([0.0, 0.01, 0.05])
        core.runner.fails = lambda name, chance=chance: rng.random() < chance and fail(RuntimeError("on purpose"))
        asked, gone, ends = set(), set(), {}
        for step in range(120):
            if step < 60 and rng.random() < 0.5:
                name = str(step)
                asked.add(name)
                core.add(ask(name, rng.choice([5, 20, 20, 60, 200]), rng.randrange(0, 9)), first=rng.random() < 0.1)
            try:
                if asked and rng.random() < 0.1:
                    name = rng.choice(sorted(asked))
                    if rng.random() < 0.5:
                        core.abort(name)
                    else:
                        gone.add(name)
                        core.discard([name])
                outputs = core.step()
            except RuntimeError:
                outputs = core.take_outputs()
            for output in outputs:
                assert output.request_id not in ends, "told twice"
                if output.finished:
                    ends[output.request_id] = output.finish_reason
            check(core)
        core.runner.fails = lambda name: None
        ends |= {name: output.finish_reason for name, output in run(core).items()}
        assert asked - gone <= set(ends) <= asked
        assert not core.request_ids
        assert not core.runner.active
        if not chance:
            assert "error" not in ends.values()
