"""Facts hidden in real English prose, with questions as people ask them of models that follow instructions.

``The phone number of Maria is 5831.`` is hidden between two paragraphs of a novel, and ``What is the phone number of
Maria?`` is asked at the end. The other tasks let a base model continue a text. These need an answer to a question, and
their filler is written by people, not drawn from a grammar.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable

from snapstream.assets import PROSE
from snapstream.evaluation.tasks.text import Count, Question, TaskText, depths, hide, others
from snapstream.evaluation.tasks.words import words as _words

HEADER = "Read this text. Then answer the question that follows it."
PEOPLE = _words(
    """Maria Peter Susan Robert Linda Thomas Karen Daniel Laura George Emma Henry Julia Oscar Nina Victor Clara Simon
    Diana Felix Irene Martin Rosa Hugo Ellen Walter Paula Ivan Greta Leon Sophie Bruno Helen Marcus Edith Arthur"""
)
THINGS = _words(
    """passport umbrella guitar camera violin telescope suitcase bicycle compass typewriter ladder lantern"""
)
ROOMS = _words("""cellar attic kitchen garage library bathroom greenhouse chapel stable workshop pantry laundry""")

RECORDS = "Write down every phone number in this text as JSON lines, one line for each person."

Draw = Callable[[random.Random, int], list[tuple[str, str, str]]]
"""Draws a number of facts: the sentence, its question, and the answer."""


@functools.cache
def paragraphs() -> tuple[str, ...]:
    """Prose of *Alice's Adventures in Wonderland*, in order."""
    return tuple(PROSE.read_text("utf-8").splitlines())


def rooms(rng: random.Random, number: int) -> list[tuple[str, str, str]]:
    """``The umbrella was left in the cellar``: things and where they are."""
    things, places = rng.sample(THINGS, number), rng.sample(ROOMS, number)
    return [
        (f"The {thing} was left in the {place}.", f"Where was the {thing} left?", place)
        for thing, place in zip(things, places, strict=True)
    ]


def phones(rng: random.Random, number: int) -> list[tuple[str, str, str]]:
    """``The phone number of Maria is 5831``: people and four digits."""
    values = [f"{value:04d}" for value in rng.sample(range(1000, 10000), number)]
    return [
        (f"The phone number of {who} is {value}.", f"What is the phone number of {who}?", value)
        for who, value in zip(rng.sample(PEOPLE, number), values, strict=True)
    ]


def facts(
    draw: Draw, number: int, *, told: bool = False
) -> Callable[[random.Random, int, Count, float | None], TaskText]:
    """A builder of tasks with ``number`` facts in the text; the first is asked for, at the chosen depth.

    With ``told``, the first fact is left out of the text, to be told later.
    """

    def build(rng: random.Random, room: int, count: Count, depth: float | None) -> TaskText:
        drawn = draw(rng, number)
        values = [value for _, _, value in drawn]
        questions = tuple(
            Question(f"\n\n{question}", "", f" {value}.", (value,), others(values, (value,)))
            for _, question, value in drawn
        )
        asked = max(count(question.ask) for question in questions)
        hidden = [f"\n{sentence}" for sentence, _, _ in drawn]
        places = list(zip(depths(rng, number, depth), hidden, strict=True))[int(told) :]
        novel = _prose_from(rng)
        body = hide(rng, room - count(HEADER) - asked, count, novel, places)
        return TaskText(HEADER + "\n" + body, questions, hidden[0] if told else "", novel)

    return build


def records(number: int) -> Callable[[random.Random, int, Count, float | None], TaskText]:
    """A builder of tasks that need the whole text: the model must write down each of ``number`` phone numbers.

    The first line is given, because a small model would not know the format otherwise; the other numbers are scored.
    """

    def build(rng: random.Random, room: int, count: Count, depth: float | None) -> TaskText:
        drawn = phones(rng, number)
        lines = [_line(sentence, value) for sentence, _, value in drawn]
        values = tuple(value for _, _, value in drawn)
        hidden = [f"\n{sentence}" for sentence, _, _ in drawn]
        places = list(zip(sorted(depths(rng, number, None)), hidden, strict=True))
        body = hide(rng, room - count(HEADER) - count(RECORDS) - count(lines[0]), count, _prose_from(rng), places)
        question = Question(f"\n\n{RECORDS}", lines[0] + "\n", "\n".join(lines[1:]), values[1:])
        return TaskText(HEADER + "\n" + body, (question,))

    return build


def _line(sentence: str, value: str) -> str:
    """A line of the answer: ``{"name": "Maria", "phone": "5831"}``."""
    who = sentence.removeprefix("The phone number of ").partition(" is ")[0]
    return json.dumps({"name": who, "phone": value})


def _prose_from(rng: random.Random) -> Callable[[random.Random], str]:
    """Consecutive paragraphs, from one that is drawn on."""
    prose = paragraphs()
    at = rng.randrange(len(prose))

    def following(_: random.Random) -> str:
        nonlocal at
        at = (at + 1) % len(prose)
        return f"\n{prose[at]}"

    return following
