"""The parts of every generated task: a text of a given number of tokens, and questions about it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

Count = Callable[[str], int]
"""Number of tokens of a piece of text, with the tokenizer of the model that will process it."""


class TooShortError(ValueError):
    """The text is too short for what the task hides in it."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question about a text.

    Attributes:
        ask: The question, to be appended to the text.
        lead: How the answer begins. It is given to the model: base models need it, and chat models cope with it.
        answer: The right continuation of text, question and lead, for training and for reading.
        parts: What must be found in the model's output, each as a whole word or number, for it to be right.
        rivals: Other answers that the text might suggest. Of the parts and rivals in the output, the parts must come
            first, so an output that copies half of the text is not right.
        begins: How the answer of a chat model begins. The question ends with these words, too, for base models to
            continue; without them, chat models answer that they cannot help.
    """

    ask: str
    lead: str
    answer: str
    parts: tuple[str, ...]
    rivals: tuple[str, ...] = ()
    begins: str = ""


@dataclass(frozen=True, slots=True)
class TaskText:
    """A text and questions about it; each question is asked separately.

    Attributes:
        text: From its instruction to its last sentence.
        questions: The answer to the first one is at the depth that was requested.
        told: The answer to the first question, if it is not in the text but told later.
        filler: Draws text that continues this one; ``None`` for sentences of the generated tasks.
    """

    text: str
    questions: tuple[Question, ...]
    told: str = ""
    filler: Callable[[random.Random], str] | None = None


def hide(
    rng: random.Random,
    room: int,
    count: Count,
    filler: Callable[[random.Random], str],
    hidden: Sequence[tuple[float, str]],
) -> str:
    """Fill ``room`` tokens with filler and put sentences into it.

    Args:
        rng: Source of all choices.
        room: Maximum tokens of the result; it falls short of this by less than one sentence.
        count: Counts tokens.
        filler: Draws one piece of filler, which begins with a space.
        hidden: Sentences and their depths (0 is the beginning, 1 the end); each goes to the boundary nearest to its
            depth.

    Raises:
        TooShortError: The sentences alone are longer than ``room``.
    """
    left = room - sum(count(sentence) for _, sentence in hidden)
    if left < 0:
        raise TooShortError(f"{len(hidden)} hidden sentences do not fit into {room} tokens")
    pieces, ends, misses = list[str](), [0], 0
    while misses < 8:  # a shorter sentence may still fit where a long one did not
        piece = filler(rng)
        size = count(piece)
        if ends[-1] + size > left:
            misses += 1
            continue
        pieces.append(piece)
        ends.append(ends[-1] + size)
    result, at = list[str](), 0
    for depth, sentence in sorted(hidden, key=lambda item: item[0]):
        target = depth * ends[-1]
        while at < len(pieces) and (ends[at] + ends[at + 1]) / 2 < target:
            result.append(pieces[at])
            at += 1
        result.append(sentence)
    return "".join([*result, *pieces[at:]])


def others(names: Sequence[str], parts: Sequence[str]) -> tuple[str, ...]:
    """Those of ``names`` that are not among ``parts``, each once."""
    return tuple(name for name in dict.fromkeys(names) if name not in parts)


def depths(rng: random.Random, number: int, first: float | None) -> list[float]:
    """Draws ``number`` depths; the first is ``first`` if given."""
    drawn = [rng.random() for _ in range(number)]
    if first is not None:
        drawn[0] = first
    return drawn
