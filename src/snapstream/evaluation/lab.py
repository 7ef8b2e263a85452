"""The lab: every task at every length under every cache, one record each."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from snapstream.config import MIN_CAPACITY
from snapstream.errors import ConfigurationError
from snapstream.evaluation.hosts import Answer, Host, Job
from snapstream.evaluation.policies import Variant, fits
from snapstream.evaluation.records import Record, RecordFile
from snapstream.evaluation.scoring import equal, found
from snapstream.evaluation.tasks import Sample, Task, TooShortError, make_sample

GROUP = 8
"""Samples whose jobs are given to a host together, so that its slots stay busy."""


@dataclass(frozen=True)
class Grid:
    """What is asked.

    Attributes:
        tasks: Which tasks.
        lengths: Prompt lengths in tokens.
        variants: Caches.
        samples: Questions per task, length and variant.
        depths: Depths, in turn; empty draws them.
        decode: Tokens that are decoded before a ``long`` follow-up.
        seed: The first sample's; the others count up.
    """

    tasks: Sequence[Task]
    lengths: Sequence[int]
    variants: Sequence[Variant]
    samples: int
    depths: Sequence[float]
    decode: int
    seed: int

    @property
    def room(self) -> int:
        """Most tokens after a prompt: forced ones (a sentence more than ``decode`` at most) and the answer."""
        forced = max((_FORCED.get(task.follow_up, 0) for task in self.tasks), default=0)
        long = self.decode if any(task.follow_up == "long" for task in self.tasks) else 0
        return forced + long + max(task.max_tokens for task in self.tasks)

    @property
    def pictured(self) -> int:
        """Seed of the sample of which the report shows what was kept: one whose answer lies in the middle."""
        return self.seed + min(len(self.depths) // 2, self.samples - 1)

    def check(self, max_length: int | None) -> list[str]:
        """Refuse what cannot be run, before anything is.

        Args:
            max_length: Longest sequence of the model, if known.

        Returns:
            What will be left out, for people.

        Raises:
            ConfigurationError: A length beyond the model's, or budgets that are no smaller than every prompt.
        """
        for length in self.lengths:
            if max_length is not None and length + self.room > max_length:
                raise ConfigurationError(
                    f"lengths: {length} tokens and up to {self.room} after them are more than the model's {max_length}"
                )
        notes = []
        for variant in self.variants:
            left_out = [length for length in self.lengths if not fits(variant, length)]
            for length in self.lengths:
                if fits(variant, length):
                    variant.budget(length)  # settings that do not work are refused now
            if not left_out:
                continue
            smallest = variant.entries(left_out[0]) or 0
            reason = "no smaller than the prompt" if smallest >= MIN_CAPACITY else f"fewer than {MIN_CAPACITY} entries"
            told = f"{variant.label} at {variant.size} for lengths {', '.join(map(str, left_out))}: {reason}"
            if len(left_out) == len(self.lengths):
                raise ConfigurationError(f"budgets: {told}; leave it out or give longer lengths")
            notes.append(f"left out: {told}")
        return notes


_FORCED = {"late": 64, "long": 96}


def run_grid(
    host: Host, grid: Grid, file: RecordFile, report: Callable[[str, int, int], None] = lambda *_: None
) -> list[str]:
    """Answer everything that is not in the file yet.

    Args:
        host: Who answers.
        grid: What is asked.
        file: Where records go.
        report: Told what is being done, how many jobs are done, and how many there are.

    Returns:
        What was left out and why, for people.
    """
    notes: list[str] = []
    groups = list(_groups(host, grid, notes))
    total = sum(len(group) for group in groups)
    finished = 0
    for group in groups:
        todo = [job for job in group if _key(job) not in file.done]
        finished += len(group) - len(todo)
        if todo:
            report(f"{todo[0].task.name}, {todo[0].length} tokens", finished, total)
            drawn: dict[int, Sample] = {}
            for job in todo:
                if job.seed not in drawn:
                    drawn[job.seed] = _sample(host, grid, job)
            todo = [replace(job, sample=drawn[job.seed]) for job in todo]
            for job, answer in host.run(todo):
                file.add(_record(job, answer, pictured=job.seed == grid.pictured))
                finished += 1
                report(f"{job.task.name}, {job.length} tokens", finished, total)
    report("done", finished, total)
    return notes


_NO_SAMPLE = Sample("", 0, "", "", "", "", "", ())


def _groups(host: Host, grid: Grid, notes: list[str]) -> Iterator[list[Job]]:
    """Jobs of a few samples at a time; jobs of one sample stand together. Samples are drawn when they are needed."""
    for task in grid.tasks:
        if task.follow_up != "none" and not host.continues:
            notes.append(f"left out: {task.name}, which goes on in a compressed cache; an endpoint cannot")
            continue
        for length in grid.lengths:
            variants = [variant for variant in grid.variants if fits(variant, length)]
            try:
                make_sample(task, length - host.overhead, grid.seed, host.count, decode=1)
            except TooShortError as error:
                notes.append(f"left out: {task.name} at {length} tokens, which are too few ({error})")
                continue
            jobs: list[Job] = []
            for index in range(grid.samples):
                depth = grid.depths[index % len(grid.depths)] if task.has_depth and grid.depths else None
                seed = grid.seed + index
                jobs += [Job(task, length, seed, depth, variant, _NO_SAMPLE) for variant in variants]
                if index % GROUP == GROUP - 1:
                    yield jobs
                    jobs = []
            if jobs:
                yield jobs


def _sample(host: Host, grid: Grid, job: Job) -> Sample:
    length = job.length - host.overhead
    return make_sample(job.task, length, job.seed, host.count, depth=job.depth, decode=grid.decode)


def _key(job: Job) -> object:
    variant = job.variant
    settings = tuple(sorted(variant.settings))
    return job.task.name, job.length, job.seed, job.depth, variant.policy, variant.size, settings


def _record(job: Job, answer: Answer, *, pictured: bool) -> Record:
    sample, variant = job.sample, job.variant
    text = "".join((sample.prompt, sample.lead, sample.reply, sample.second))
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
        prompt_sha256=hashlib.sha256(text.encode()).hexdigest(),
        output=answer.text,
        answer=sample.answer,
        found=[found(part, answer.text) for part in sample.parts],
        equal=equal(sample.answer, answer.text),
        output_tokens=answer.output_tokens,
        finish_reason=answer.finish_reason,
        mass=None if answer.mass is None else list(answer.mass),
        kept=answer.kept if pictured else None,
    )
