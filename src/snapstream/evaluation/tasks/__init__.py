"""Generated tasks by name: what each asks, and how a sample of it is drawn."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from snapstream.errors import ConfigurationError
from snapstream.evaluation.questions.question import Question as FileQuestion
from snapstream.evaluation.tasks import aggregation, needle, number, pairs, prose, reading, tracking
from snapstream.evaluation.tasks.text import Count, Question, TaskText, TooShortError
from snapstream.evaluation.tasks.words import filler

__all__ = ["TASKS", "Count", "Question", "Sample", "Task", "TaskText", "TooShortError", "find_tasks", "make_sample"]

Build = Callable[[random.Random, int, Count, float | None], TaskText]


@dataclass(frozen=True)
class Task:
    """A kind of question about a generated text.

    Attributes:
        name: Name on the command line and in reports.
        family: ``retrieval``, ``tracking``, ``aggregation``, ``reading``, ``continued``, ``prose`` (for models that
            know English), or ``questions`` (from a file).
        about: Description of one line.
        build: Draws a text of a given maximum length in tokens, and questions about it; ``None`` for a file's.
        max_tokens: Maximum tokens of an answer.
        has_depth: Whether the answer is at a single place in the text, which can be chosen.
        follow_up: What happens between the prompt, which is compressed, and the question that is scored. All but
            ``none`` need a host that continues in a compressed cache.

            - ``late``: the prompt ends with another question. Its answer and the scored question form a second turn.
            - ``long``: the prompt ends with the scored question. Thousands of tokens of filler are decoded, and it is
              asked again.
            - ``told``: the prompt ends with another question. The answer to the scored one is in the filler that is
              decoded.
            - ``context``: the prompt is a text alone. The question comes as the next turn of a stored context.
    """

    name: str
    family: str
    about: str
    build: Build | None
    max_tokens: int
    has_depth: bool = True
    follow_up: Literal["none", "late", "long", "told", "context"] = "none"

    @property
    def decodes_filler(self) -> bool:
        """Whether filler is decoded before the scored question, so that the ring wraps around."""
        return self.follow_up in ("long", "told")


@dataclass(frozen=True, slots=True)
class Sample:
    """One question of one task, as turns of a conversation.

    The model processes ``prompt`` and ``lead``, and its cache is compressed. Then it is given ``reply``, ``second`` and
    ``opening`` as if they had been generated and asked, and what it generates next is scored.

    Attributes:
        task: Name of the task.
        seed: Seed that it was drawn with, besides task, length and depth.
        prompt: The text and its question.
        lead: How the answer begins.
        reply: The rest of the first answer, if there is a second question; else empty.
        second: The second question, or empty.
        answer: The right continuation.
        parts: What must be found in the output.
        rivals: What must not be found before them.
        opening: How the scored answer begins, if its beginning is not left to the model.
        question: The question of a file, which says how it is scored; ``None`` for generated ones.
        text: Index of the text in this file.
        begins: How a chat model's answer to the prompt begins; see
            :class:`~snapstream.evaluation.tasks.text.Question`. In a second turn, that is the ``opening``.
    """

    task: str
    seed: int
    prompt: str
    lead: str
    reply: str
    second: str
    answer: str
    parts: tuple[str, ...]
    rivals: tuple[str, ...] = ()
    opening: str = ""
    question: FileQuestion | None = None
    text: int = 0
    begins: str = ""


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        Task("needle", "retrieval", "one note hidden in a text", needle.single, 16),
        Task("multikey", "retrieval", "one of many notes", needle.multikey, 16),
        Task("multivalue", "retrieval", "all four notes of one key", needle.multivalue, 64, False),
        Task("multiquery", "retrieval", "the notes of four keys at once", needle.multiquery, 64, False),
        Task("passkey", "retrieval", "a number of six digits in noise", number.passkey, 16),
        Task("number", "retrieval", "a number of twelve digits with runs in noise", number.number, 32),
        Task("kv", "retrieval", "one value out of a JSON object of random pairs", pairs.key_value, 16),
        Task("tracking", "tracking", "where a number was copied to, over four hops", tracking.variables, 48),
        Task(
            "common-words",
            "aggregation",
            "three words that are ten times as common as the others",
            aggregation.common_words,
            24,
            False,
        ),
        Task("frequent-words", "aggregation", "the three most frequent words", aggregation.frequent_words, 24, False),
        Task("qa", "reading", "who bought what from whom, among similar passages", reading.deals, 16),
        Task("late-question", "continued", "a second turn asks for another note", needle.multikey, 16, True, "late"),
        Task(
            "long-decode", "continued", "a note, after thousands of generated tokens", needle.multikey, 16, True, "long"
        ),
        Task(
            "told-later",
            "continued",
            "a note early in thousands of generated tokens",
            needle.untold,
            16,
            False,
            "told",
        ),
        Task("phone", "prose", "a phone number between the paragraphs of a novel", prose.facts(prose.phones, 1), 24),
        Task("phones", "prose", "one of four phone numbers", prose.facts(prose.phones, 4), 24),
        Task("room", "prose", "where an object was left", prose.facts(prose.rooms, 1), 24),
        Task(
            "late-phone",
            "prose",
            "a second turn asks for another phone number",
            prose.facts(prose.phones, 2),
            24,
            True,
            "late",
        ),
        Task(
            "long-phone",
            "prose",
            "a phone number, after thousands of generated tokens",
            prose.facts(prose.phones, 1),
            24,
            True,
            "long",
        ),
        Task(
            "told-phone",
            "prose",
            "a phone number early in thousands of generated tokens",
            prose.facts(prose.phones, 2, told=True),
            24,
            False,
            "told",
        ),
        Task("records", "prose", "all of eight phone numbers, as JSON lines", prose.records(8), 192, False),
    )
}


def find_tasks(names: list[str]) -> list[Task]:
    """Tasks by name; ``all`` stands for every task with generated text, ``prose`` for every one in English prose.

    Raises:
        ConfigurationError: A task is unknown; the message lists those that exist.
    """
    groups = {
        "all": [task for task in TASKS.values() if task.family != "prose"],
        "prose": [task for task in TASKS.values() if task.family == "prose"],
    }
    unknown = [name for name in names if name not in TASKS and name not in groups]
    if unknown or not names:
        given = ", ".join(unknown) or "none"
        raise ConfigurationError(f"unknown task {given}; allowed: {', '.join([*groups, *TASKS])}")
    found = [task for name in names for task in (groups[name] if name in groups else [TASKS[name]])]
    return list(dict.fromkeys(found))


def make_sample(
    task: Task,
    length: int,
    seed: int,
    count: Count,
    *,
    depth: float | None = None,
    decode: int = 2048,
    chat: bool = False,
) -> Sample:
    """Draw one sample.

    Args:
        task: Its task.
        length: Maximum tokens of the prompt, including its lead; it falls short of this by less than one sentence.
        seed: Equal arguments give equal samples.
        count: Counts tokens of a text.
        depth: Depth of the answer in the text, 0 to 1; drawn if not given.
        decode: Tokens between prompt and question of a ``long`` or ``told`` follow-up.
        chat: Whether it is for a chat model.

    Raises:
        TooShortError: The length is too short for the task.
    """
    assert task.build is not None
    room, over = length, 1
    while over > 0:  # the whole may have more tokens than its pieces
        rng = random.Random(f"{task.name}/{length}/{seed}/{depth}")
        made = task.build(rng, room, count, depth)
        asked = made.questions[0]
        first = made.questions[1] if task.follow_up in ("late", "told") else asked
        prompt = made.text + first.ask
        begins = asked.begins if chat else ""
        over = count(prompt + first.lead) + count(begins) - length
        room -= max(over, 0)
    reply, second = "", ""
    if task.follow_up == "late":
        reply, second = first.answer, asked.ask
    elif task.decodes_filler:
        pieces, size, draw = list[str](), 0, made.filler or filler
        while size < decode:
            pieces.append(draw(rng))
            if made.filler is not None:  # paragraphs are long
                pieces[-1] = _cut(pieces[-1], decode - size, count)
            size += count(pieces[-1])
        if task.follow_up == "told":
            pieces.insert(rng.randrange(len(pieces) // 2 + 1), made.told)
            pieces.insert(0, first.answer)
        reply, second = "".join(pieces), asked.ask
    parts = asked.answer, asked.parts, asked.rivals
    opening, begins = (begins, "") if second else ("", begins)
    return Sample(task.name, seed, prompt, first.lead, reply, second, *parts, opening=opening, begins=begins)


def _cut(text: str, room: int, count: Count) -> str:
    """The first words of a text, as many as fit; at least one."""
    while count(text) > room and " " in text.strip():
        text = text.rpartition(" ")[0]
    return text
