"""Turns files of questions into jobs: which are asked, where they stand, and which caches measure something."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from snapstream.config import CacheBudget
from snapstream.errors import ConfigurationError
from snapstream.evaluation.hosts import Job, Prompts
from snapstream.evaluation.policies import Variant, misfit
from snapstream.evaluation.questions.question import LATE, Question, Text
from snapstream.evaluation.questions.scores import require_rouge
from snapstream.evaluation.tasks import TASKS, Sample, Task

if TYPE_CHECKING:
    from snapstream.evaluation.questions.files import QuestionFile

PLACES = ("with", "after")
"""Where a question stands: at the end of the prompt, so that the cache is compressed with it in view; or after a text
that was compressed before anyone had asked."""
HALVES = ("even", "odd")
"""Halves of a file, by the number of a text in it, or of a question about its only text: settings can be chosen on one
half, and reported on the other."""
TOGETHER = 4
"""Texts with one question each whose jobs are passed to a host together, so that its slots stay busy."""
ASKED_ROOM = 8
"""Tokens with which an endpoint is asked to begin an answer with certain words, besides these words."""
AFTER_ROOM = 64
"""Tokens that a chat template may put around a question that comes after its text."""


@dataclass(frozen=True)
class Asked:
    """A question in its file.

    Attributes:
        text: Index of its text.
        number: Index of the question in the file.
        question: The question.
    """

    text: int
    number: int
    question: Question


class QuestionPlan:
    """All jobs about files of questions, in groups that share a text.

    Attributes:
        tasks: Tasks by name: one per file and place of its questions.
        notes: What is left out, and why.
        longest: Longest prompt plus output, in tokens.
        shares_texts: Whether several questions at the end of the prompt share a text.
        stores_texts: Whether texts are stored before their questions.
    """

    def __init__(
        self,
        files: Sequence[QuestionFile],
        variants: Sequence[Variant],
        prompts: Prompts,
        *,
        samples: int | None = None,
        half: str | None = None,
        places: Sequence[str] = PLACES[:1],
        longest: int | None = None,
        code: bool = False,
    ) -> None:
        """Plan which questions are asked.

        Args:
            files: The files; their names must differ.
            variants: Caches to compare.
            prompts: Tokenizes questions for the model.
            samples: Maximum number of questions per file, spread over its texts; ``None`` for all.
            half: Which half of each file is asked: one of :data:`HALVES`; ``None`` for all.
            places: Where questions stand: some of :data:`PLACES`.
            longest: Longest sequence of the model; questions about longer texts are left out.
            code: Whether answers that are code may be run; otherwise they are left out.

        Raises:
            ConfigurationError: The name of a file is taken, nothing is left, or a package is missing.
        """
        asked = [(file, place == "after") for file in files for place in places]
        names = [f"{LATE}{file.name}" if later else file.name for file, later in asked]
        twice = [name for name, times in Counter(names).items() if times > 1 or name in TASKS]
        if twice:
            raise ConfigurationError(f"questions: the name {twice[0]!r} is taken by another task; rename the file")
        self.tasks: dict[str, Task] = {}
        self.notes: list[str] = []
        self.longest = 0
        self._groups: list[list[Job]] = []
        self.shares_texts = self.stores_texts = False
        for name, (file, later) in zip(names, asked, strict=True):
            self._add(name, file, later, variants, prompts, samples, half, longest, code)
        if not self._groups:
            raise ConfigurationError("; ".join(["questions: nothing is left to ask", *self.notes]))

    def __iter__(self) -> Iterator[list[Job]]:
        """Groups of jobs; those about one text are in one group, those with one prompt follow each other."""
        return iter(self._groups)

    def budgets(self) -> list[CacheBudget | None]:
        """The caches of all jobs; ``None`` for a full one."""
        asked = {(job.variant, job.length) for group in self._groups for job in group}
        return [variant.budget(length) for variant, length in asked]

    def _add(
        self,
        name: str,
        file: QuestionFile,
        later: bool,
        variants: Sequence[Variant],
        prompts: Prompts,
        samples: int | None,
        half: str | None,
        longest: int | None,
        code: bool,
    ) -> None:
        most = max((question.max_tokens for text in file.texts for question in text.questions), default=0)
        self.tasks[name] = task = Task(
            name, "questions", "questions from a file", None, most, False, "context" if later else "none"
        )
        left = Counter(dict(file.left_out))
        skipped: Counter[str] = Counter()
        group: list[Job] = []
        chosen = _spread(file.texts, samples, half)
        if half is not None and not chosen:
            self.notes.append(f"left out of {name}: its {half} half has no question")
        for about, (index, listed) in enumerate(groupby(chosen, lambda asked: asked.text)):
            text, questions = file.texts[index], list(listed)
            for asked in questions:
                question = asked.question
                sample = make_sample(name, asked, text.text, later)
                length, forced = _tokens(prompts, sample, later=later)
                whole = length + forced + question.max_tokens
                reason = _refusal(question, text, later=later, code=code)
                if reason is None and longest is not None and whole > longest:
                    reason = f"that take more than the model's {longest:,} tokens"
                if reason is not None:
                    left[reason] += 1
                    continue
                fitting = []
                for variant in variants:
                    misfits = misfit(variant, length, question.max_tokens, forced + question.max_tokens)
                    if misfits is None and later and variant.policy == "truncated":
                        misfits = "a stored text cannot be truncated for its question"
                    if misfits is None:
                        fitting.append(variant)
                    else:
                        skipped[f"{variant.label} at {variant.size}, {misfits}"] += 1
                self.longest = max(self.longest, whole)
                fitting.sort(key=lambda variant: variant.policy == "truncated")
                group += [Job(task, length, asked.number, None, variant, sample) for variant in fitting]
            self.stores_texts |= later
            self.shares_texts |= not later and len(questions) > 1
            if len(questions) > 1 or about % TOGETHER == TOGETHER - 1:
                self._groups.append(group)
                group = []
        self._groups.append(group)
        self._groups = [group for group in self._groups if group]
        for why, times in left.items():
            self.notes.append(f"left out of {name}: {times} questions {why}")
        for why, times in skipped.items():
            self.notes.append(f"left out of {name}: {why}, for {times} questions")


def _tokens(prompts: Prompts, sample: Sample, *, later: bool) -> tuple[int, int]:
    """Tokens of a prompt, and of what comes after it besides the answer."""
    forced = len(prompts.opening(sample))
    if forced:  # an endpoint is asked for it in words, too
        forced += ASKED_ROOM + forced
    if later:
        forced += AFTER_ROOM + prompts.count(sample.second)
    return len(prompts.first(sample)), forced


def _refusal(question: Question, text: Text, *, later: bool, code: bool) -> str | None:
    """Why a question cannot be asked; ``None`` if it can."""
    if question.scoring.kind == "rouge-l":
        require_rouge()
    if question.scoring.kind == "code" and not code:
        return "whose answers are code; give --run-code to run it"
    if later and not text.text.strip():
        return "without a text to come after"
    return None


def make_sample(name: str, asked: Asked, text: str, later: bool) -> Sample:
    """A question as turns of a conversation, with its text or after it."""
    question = asked.question
    between = "\n\n" if text and question.ask else ""
    return Sample(
        task=name,
        seed=asked.number,
        prompt=text if later else f"{text}{between}{question.ask}",
        lead="",
        reply="",
        second=question.ask if later else "",
        answer=question.scoring.answer,
        parts=(),
        opening=question.opening,
        question=question,
        text=asked.text,
    )


def _spread(texts: Sequence[Text], samples: int | None, half: str | None) -> list[Asked]:
    """The questions that are asked: the first one about every text, then the second ones, until there are enough."""
    every = []
    number = 0
    for index, text in enumerate(texts):
        for place, question in enumerate(text.questions):
            if half is None or (index if len(texts) > 1 else number) % 2 == HALVES.index(half):
                every.append((place, Asked(index, number, question)))
            number += 1
    every.sort(key=lambda one: (one[0], one[1].number))
    return sorted((asked for _, asked in every[:samples]), key=lambda asked: asked.number)
