"""Needles: notes hidden in a long text of filler, in the manner of RULER's retrieval tasks.

``Note for falcon: amber river.`` is the needle, ``Recall the note for falcon:`` its question. The question ends with
the words that precede the answer in the text, so that a base model, or a small one, can answer by continuing.
"""

from __future__ import annotations

import random

from snapstream.evaluation.tasks.text import Count, Question, TaskText, TooShortError, depths, hide, others
from snapstream.evaluation.tasks.words import ADJECTIVES, ANIMALS, NOUNS, filler

HEADER = "Notes are hidden in this text. Remember them."
VALUES = 4
"""Notes per key of a multi-value question, and keys per multi-query question."""


def _note(key: str, value: str) -> str:
    return f" Note for {key}: {value}."


def _values(rng: random.Random, number: int) -> list[str]:
    """Draws values of two words; no two begin with the same word."""
    return [f"{first} {rng.choice(NOUNS)}" for first in rng.sample(ADJECTIVES, number)]


def _single(key: str, value: str, values: list[str]) -> Question:
    begins = f"Note for {key}:"
    return Question(f" Recall the note for {key}:", "", f" {value}.", (value,), others(values, (value,)), begins)


def _distractors(room: int) -> int:
    """How many other notes a text of ``room`` tokens gets: one for each 64 tokens, 4 to 32."""
    return min(32, max(4, room // 64))


def single(rng: random.Random, room: int, count: Count, depth: float | None) -> TaskText:
    """One note, without distractors."""
    return notes(rng, room, count, depth, 1)


def multikey(rng: random.Random, room: int, count: Count, depth: float | None) -> TaskText:
    """Asks for one note, among many with other keys."""
    return notes(rng, room, count, depth, 1 + _distractors(room))


def untold(rng: random.Random, room: int, count: Count, depth: float | None) -> TaskText:
    """Asks for a note that is not in the text, which contains many with other keys."""
    return notes(rng, room, count, depth, 1 + _distractors(room), told=True)


def notes(
    rng: random.Random, room: int, count: Count, depth: float | None, number: int, *, told: bool = False
) -> TaskText:
    """A text with notes, and a question about each; with ``told``, the first note is left out, to be told later.

    Raises:
        TooShortError: The notes do not fit, or there are not enough words for them.
    """
    if number > min(len(ANIMALS), len(ADJECTIVES)):
        raise TooShortError(f"{number} notes need more words than there are: {min(len(ANIMALS), len(ADJECTIVES))}")
    keys, values = rng.sample(ANIMALS, number), _values(rng, number)
    questions = tuple(_single(key, value, values) for key, value in zip(keys, values, strict=True))
    hidden = [_note(key, value) for key, value in zip(keys, values, strict=True)]
    asked = max(count(question.ask) for question in questions)
    places = list(zip(depths(rng, number, depth), hidden, strict=True))[int(told) :]
    body = hide(rng, room - count(HEADER) - asked, count, filler, places)
    return TaskText(HEADER + body, questions, hidden[0] if told else "")


def multivalue(rng: random.Random, room: int, count: Count, depth: float | None) -> TaskText:
    """Asks for all notes of one key, among notes with other keys."""
    number = _distractors(room)
    keys, values = rng.sample(ANIMALS, 1 + number), _values(rng, VALUES + number)
    places = sorted(depths(rng, VALUES, depth))
    ask, begins = f" Recall the {VALUES} notes for {keys[0]}:", f"{VALUES} notes for {keys[0]}:"
    hidden = [_note(keys[0], value) for value in values[:VALUES]]
    hidden += [_note(key, value) for key, value in zip(keys[1:], values[VALUES:], strict=True)]
    places += depths(rng, number, None)
    body = hide(rng, room - count(HEADER) - count(ask), count, filler, list(zip(places, hidden, strict=True)))
    wanted = tuple(values[:VALUES])
    question = Question(ask, "", f" {', '.join(wanted)}.", wanted, others(values, wanted), begins)
    return TaskText(HEADER + body, (question,))


def multiquery(rng: random.Random, room: int, count: Count, depth: float | None) -> TaskText:
    """Asks for the notes of several keys at once, among notes with other keys; the first one is at ``depth``."""
    number = VALUES + _distractors(room)
    keys, values = rng.sample(ANIMALS, number), _values(rng, number)
    hidden = [_note(key, value) for key, value in zip(keys, values, strict=True)]
    places = depths(rng, number, depth)
    groups = [list(range(VALUES)), *(rng.sample(range(number), VALUES) for _ in range(2))]
    questions = tuple(_several([(keys[i], values[i]) for i in group], values) for group in groups)
    asked = max(count(question.ask + question.lead) for question in questions)
    body = hide(rng, room - count(HEADER) - asked, count, filler, list(zip(places, hidden, strict=True)))
    return TaskText(HEADER + body, questions)


def _several(pairs: list[tuple[str, str]], values: list[str]) -> Question:
    listed = " ".join(f"{key}:" for key, _ in pairs)
    wanted = tuple(value for _, value in pairs)
    lead, _, answer = ",".join(f" {key}: {value}" for key, value in pairs).partition(":")
    return Question(
        f" Recall the notes for {listed}",
        f" These are the notes,{lead}:",
        f"{answer}.",
        wanted,
        others(values, wanted),
    )
