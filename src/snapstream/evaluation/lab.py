"""Answers every question that has no record yet, and adds a record for each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from snapstream.errors import ConfigurationError
from snapstream.evaluation.grid import Grid
from snapstream.evaluation.hosts import Answer, Host, Job
from snapstream.evaluation.questions.scores import score
from snapstream.evaluation.records import Key, Record, RecordFile, make_key
from snapstream.evaluation.scoring import equal, found_parts
from snapstream.evaluation.tasks import TASKS, Sample, Task, TooShortError, make_sample

if TYPE_CHECKING:
    from snapstream.evaluation.questions.plan import QuestionPlan

GROUP = 8
"""Samples whose jobs are passed to a host together, so that its slots stay busy."""

Report = Callable[[str, int, int], None]
"""Called with what is being done, how many jobs are done, and how many there are."""


def run_grid(host: Host, grid: Grid, file: RecordFile, report: Report = lambda *_: None) -> list[str]:
    """Answer all generated questions that are not in the file yet.

    Args:
        host: The host that answers.
        grid: The questions.
        file: The file for the records.
        report: See :data:`Report`.

    Returns:
        Notes for the user on what was left out, and why.

    Raises:
        ConfigurationError: The file has results on texts that would be drawn differently now.
    """
    _same_texts(host, grid, file)
    groups, notes = _plan(host, grid)

    def draw(job: Job) -> Sample:
        return _draw(host, grid, job.task, job.length, job.seed, job.depth)

    return notes + _run(host, groups, file, report, draw, grid.pictured)


def run_questions(host: Host, plan: QuestionPlan, file: RecordFile, report: Report = lambda *_: None) -> list[str]:
    """Answer all questions from files that have no record yet; otherwise as :func:`run_grid`.

    Raises:
        ConfigurationError: The file has results on other questions of the same names.
    """
    samples = {(job.task.name, job.seed): job.sample for group in plan for job in group}
    for record in file.records:
        asked = samples.get((record.task, record.seed))
        if record.question is not None and asked is not None and _hash(asked) != record.prompt_sha256:
            raise ConfigurationError(
                f"{file.path} has another question {record.question} of {record.task} than there is now, or one that "
                "is scored differently; give another --output"
            )
    refused = {task.name: reason for task in plan.tasks.values() if (reason := host.refuses(task)) is not None}
    groups = [group for group in plan if group[0].task.name not in refused]
    notes = [f"left out: {name}, {reason}" for name, reason in refused.items()]
    return notes + _run(host, groups, file, report, lambda job: job.sample, None)


def _run(
    host: Host,
    groups: Sequence[list[Job]],
    file: RecordFile,
    report: Report,
    draw: Callable[[Job], Sample],
    pictured: int | None,
) -> list[str]:
    """Answer all jobs without a record; those of one group together."""
    notes: list[str] = []
    total = sum(len(group) for group in groups)
    finished = 0
    for group in groups:
        todo = [job for job in group if _key(job) not in file.done]
        finished += len(group) - len(todo)
        if not todo:
            continue
        what = f"{todo[0].task.name}, {todo[0].length} tokens"
        report(what, finished, total)
        drawn: dict[int, Sample | None] = {}
        for job in todo:
            if job.seed not in drawn:
                try:
                    drawn[job.seed] = draw(job)
                except TooShortError as error:
                    drawn[job.seed] = None
                    notes.append(f"left out: {what}, sample {job.seed}: the text is too short ({error})")
        ready = [replace(job, sample=sample) for job in todo if (sample := drawn[job.seed]) is not None]
        finished += len(todo) - len(ready)
        for job, answer in host.run(ready):
            file.add(_record(job, answer, pictured=job.seed == pictured))
            finished += 1
            report(what, finished, total)
    report("done", finished, total)
    return notes


_NOT_DRAWN = Sample("", 0, "", "", "", "", "", ())


def _plan(host: Host, grid: Grid) -> tuple[list[list[Job]], list[str]]:
    """Groups of jobs for a few samples each, those of one sample adjacent, and notes on what is left out.

    Samples are drawn later.
    """
    groups: list[list[Job]] = []
    notes: list[str] = []
    for task in grid.tasks:
        reason = host.refuses(task)
        if reason is not None:
            notes.append(f"left out: {task.name}, {reason}")
            continue
        for length in grid.lengths:
            variants = grid.variants_of(task, length)
            for first in range(0, grid.samples, GROUP):
                jobs = []
                for index in range(first, min(first + GROUP, grid.samples)):
                    depth = grid.depths[index % len(grid.depths)] if task.has_depth and grid.depths else None
                    jobs += [Job(task, length, grid.seed + index, depth, variant, _NOT_DRAWN) for variant in variants]
                groups.append(jobs)
    return [group for group in groups if group], notes


def _draw(host: Host, grid: Grid, task: Task, length: int, seed: int, depth: float | None) -> Sample:
    room = length - host.overhead
    return make_sample(task, room, seed, host.count, depth=depth, decode=grid.decode, chat=host.chat)


def _same_texts(host: Host, grid: Grid, file: RecordFile) -> None:
    """Refuse to mix texts: another version or tokenizer may draw different ones from the same seeds."""
    seen = set()
    for record in file.records:
        cell = record.task, record.length
        if cell in seen or record.task not in TASKS:
            continue
        seen.add(cell)
        now = _draw(host, grid, TASKS[record.task], record.length, record.seed, record.depth)
        if _hash(now) != record.prompt_sha256:
            raise ConfigurationError(
                f"{file.path} has other texts of {record.task} at {record.length} tokens than would be drawn now; give "
                "another --output"
            )


def _key(job: Job) -> Key:
    variant = job.variant
    return make_key(job.task.name, job.length, job.seed, job.depth, variant.policy, variant.size, variant.settings)


def _hash(sample: Sample) -> str:
    text = "".join((sample.prompt, sample.lead, sample.reply, sample.second, sample.opening, sample.begins))
    if sample.question is not None:  # nor may anything that scores depend on differ
        text += repr(sample.question)
    return hashlib.sha256(text.encode()).hexdigest()


def _record(job: Job, answer: Answer, *, pictured: bool) -> Record:
    sample, variant, question = job.sample, job.variant, job.sample.question
    return Record(
        task=job.task.name,
        length=job.length,
        seed=job.seed,
        depth=job.depth,
        policy=variant.policy,
        size=variant.size,
        settings=dict(variant.settings),
        entries=variant.entries(job.length),
        budget=answer.settings,
        prompt_tokens=answer.prompt_tokens,
        prompt_sha256=_hash(sample),
        output=answer.text,
        answer=sample.answer,
        found=[] if question else found_parts(sample.parts, sample.rivals, answer.text),
        equal=any(equal(one, answer.text) for one in (question.scoring.answers if question else (sample.answer,))),
        output_tokens=answer.output_tokens,
        finish_reason=answer.finish_reason,
        mass=None if answer.mass is None else list(answer.mass),
        kept=answer.kept if pictured else None,
        drafted=answer.drafted,
        accepted=answer.accepted,
        question=question.name if question else None,
        text=sample.text if question else None,
        score=score(question.scoring, answer.text) if question else None,
    )
