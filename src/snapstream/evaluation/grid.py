"""The grid of an evaluation: every task at every length with every cache that measures something there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from snapstream.config import CacheBudget
from snapstream.errors import ConfigurationError
from snapstream.evaluation.policies import Variant, misfit
from snapstream.evaluation.tasks import Task

_SECOND_TURN = {"none": 0, "late": 64, "long": 96, "told": 128}
"""Maximum forced tokens besides ``decode``: first answer, scored question, end of a sentence, chat template."""


@dataclass(frozen=True)
class Grid:
    """All questions of an evaluation.

    Attributes:
        tasks: Tasks.
        lengths: Prompt lengths in tokens.
        variants: Caches.
        samples: Questions per task, length and variant.
        depths: Depths, which the samples cycle through; drawn if empty.
        decode: Tokens that are decoded before a ``long`` or ``told`` follow-up.
        seed: Seed of the first sample; each further sample adds 1.
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
        """Maximum tokens after a prompt: forced ones and the answer."""
        return max(self.decoded(task) + task.max_tokens for task in self.tasks)

    @property
    def longest(self) -> int:
        """Longest prompt plus output, in tokens."""
        return max(self.lengths) + self.room

    def budgets(self) -> list[CacheBudget | None]:
        """The caches of all questions; ``None`` for a full one."""
        asked = {(v, length) for task in self.tasks for length in self.lengths for v in self.variants_of(task, length)}
        return [variant.budget(length) for variant, length in asked]

    @property
    def pictured(self) -> int:
        """Seed of the sample whose kept tokens the report shows: one with its answer in the middle."""
        return self.seed + min(len(self.depths) // 2, self.samples - 1)

    def decoded(self, task: Task) -> int:
        """Maximum tokens that go through the ring before the scored answer."""
        return (self.decode if task.decodes_filler else 0) + _SECOND_TURN[task.follow_up]

    def misfit(self, variant: Variant, task: Task, length: int) -> str | None:
        """Why a cache measures nothing in a task at some length, or ``None`` if it does."""
        turning = self.decode if task.decodes_filler else 0
        return misfit(variant, length, turning, self.decoded(task) + task.max_tokens)

    def variants_of(self, task: Task, length: int) -> list[Variant]:
        """Caches that measure something; those with the same prompt are adjacent, so that it is prefilled once."""
        fitting = [variant for variant in self.variants if self.misfit(variant, task, length) is None]
        return sorted(fitting, key=lambda variant: variant.policy == "truncated")

    def check(self, max_length: int | None) -> list[str]:
        """Reject what cannot run before anything runs.

        Args:
            max_length: Longest sequence of the model, if known.

        Returns:
            Notes for the user on what will be left out.

        Raises:
            ConfigurationError: A length exceeds the model's, settings are invalid, or a cache measures nothing.
        """
        for length in self.lengths:
            if max_length is not None and length + self.room > max_length:
                raise ConfigurationError(
                    f"lengths: {length} tokens and up to {self.room} after them are more than the model's {max_length}"
                )
        notes = []
        for variant in self.variants:
            reasons: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
            for task in self.tasks:
                for length in self.lengths:
                    reason = self.misfit(variant, task, length)
                    if reason is None:
                        variant.budget(length)  # rejects invalid settings
                    else:
                        reasons[reason].append((task.name, length))
            told = [self._told(reason, cells) for reason, cells in reasons.items()]
            name = f"{variant.label} at {variant.size}"
            if sum(map(len, reasons.values())) == len(self.tasks) * len(self.lengths):
                raise ConfigurationError(f"budgets: {name}: {'; '.join(told)}; leave it out or give longer lengths")
            notes += [f"left out: {name}, {one}" for one in told]
        return notes

    def _told(self, reason: str, cells: list[tuple[str, int]]) -> str:
        tasks = list(dict.fromkeys(task for task, _ in cells))
        lengths = ", ".join(map(str, sorted({length for _, length in cells})))
        where = "" if len(tasks) == len(self.tasks) else f" in {', '.join(tasks)}"
        return f"{reason} for lengths {lengths}{where}"
