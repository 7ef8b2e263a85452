"""What a question is: how it is asked, and how an answer to it is scored."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "contains", "contains-all", "phrase", "class", "equals", "number", "choice", "f1", "rouge-l", "similarity", "code"
]
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"

CHOICE_OPENING = "The right choice is ("
"""What answers to questions with choices begin with. It is forced, so that the letter behind it is not the first token
of the output: that one comes from prefill, which sees the whole prompt under every policy."""
MAX_TOKENS = {"choice": 8, "number": 256, "rouge-l": 256, "code": 512}
"""Maximum tokens of an answer by kind, if a file does not say; 64 for all others."""
LATE = "late-"
"""Begins the names of tasks whose questions come after their texts were compressed."""


@dataclass(frozen=True)
class Scoring:
    """How an output is scored.

    Attributes:
        kind: :mod:`snapstream.evaluation.questions.scores` has what each kind means.
        answers: Right answers: any of them, or all of them for ``contains-all``; letters for ``choice``.
        choices: Texts of the choices, in the order of their letters; may be empty if the question lists them. For
            ``class``, all classes.
        program: For ``code``: what the output continues, such as imports and the head of a function.
        test: For ``code``: code that is run behind the program, and raises an exception if it is wrong.
    """

    kind: Kind
    answers: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    program: str = ""
    test: str = ""

    @property
    def answer(self) -> str:
        """What records show as the right answer."""
        return (", " if self.kind in ("contains-all", "choice") else " | ").join(self.answers)


@dataclass(frozen=True)
class Question:
    """One question about a text.

    Attributes:
        name: Its name, unique in its file.
        ask: The question.
        scoring: How the output is scored.
        max_tokens: Maximum tokens of the answer, without its opening.
        opening: How the answer begins. These words are decoded like generated ones; the model does not choose them.
        stop: Strings that end the answer.
    """

    name: str
    ask: str
    scoring: Scoring
    max_tokens: int
    opening: str = ""
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Text:
    """A text with questions about it, which are asked separately, but share its prefill.

    Attributes:
        text: The text; empty if the questions are all there is.
        questions: At least one.
    """

    text: str
    questions: tuple[Question, ...]


def make_question(
    name: str,
    ask: str,
    scoring: Scoring,
    *,
    max_tokens: int | None = None,
    opening: str | None = None,
    stop: tuple[str, ...] = (),
) -> Question:
    """A question; what is not given is what its kind of scoring needs."""
    if opening is None:
        opening = CHOICE_OPENING if scoring.kind == "choice" else ""
    return Question(name, ask, scoring, max_tokens or MAX_TOKENS.get(scoring.kind, 64), opening, stop)


def with_choices(question: str, choices: list[str]) -> str:
    """A question with its choices below it, one a line."""
    listed = [f"{letter}. {choice}" for letter, choice in zip(LETTERS, choices, strict=False)]
    return "\n".join([question, *listed])
