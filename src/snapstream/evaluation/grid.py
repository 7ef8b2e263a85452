"""What a run of the lab asks: every task at every length under every cache that measures something there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from snapstream.errors import ConfigurationError
from snapstream.evaluation.policies import Variant, misfit
from snapstream.evaluation.tasks import Task

_SECOND_TURN = {"none": 0, "late": 64, "long": 96, "told": 128}
"""Most forced tokens besides ``decode``: a first answer, the scored question, the end of a sentence, a template."""


@dataclass(frozen=True)
class Grid:
    """What is asked.

    Attributes:
        tasks: Which tasks.
        lengths: Prompt lengths in tokens.
        variants: Caches.
        samples: Questions per task, length and variant.
        depths: Depths, in turn; empty draws them.
        decode: Tokens that are decoded before a ``long`` or ``told`` follow-up.
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
        """Most tokens after a prompt: forced ones and the answer."""
        return max(self.decoded(task) + task.max_tokens for task in self.tasks)

    @property
    def pictured(self) -> int:
        """Seed of the sample of which the report shows what was kept: one whose answer lies in the middle."""
        return self.seed + min(len(self.depths) // 2, self.samples - 1)

    def decoded(self, task: Task) -> int:
        """Most tokens that go through the ring before the scored answer."""
        return (self.decode if task.decodes_filler else 0) + _SECOND_TURN[task.follow_up]

    def misfit(self, variant: Variant, task: Task, length: int) -> str | None:
        """Why a cache measures nothing in a task at some length, or ``None`` if it does."""
        turning = self.decode if task.decodes_filler else 0
        return misfit(variant, length, turning, self.decoded(task) + task.max_tokens)

    def variants_of(self, task: Task, length: int) -> list[Variant]:
        """Caches that measure something; those with the same prompt stand together, so that it is read once."""
        fitting = [variant for variant in self.variants if self.misfit(variant, task, length) is None]
        return sorted(fitting, key=lambda variant: variant.policy == "truncated")

    def check(self, max_length: int | None) -> list[str]:
        """Refuse what cannot be run, before anything is.

        Args:
            max_length: Longest sequence of the model, if known.

        Returns:
            What will be left out, for people.

        Raises:
            ConfigurationError: A length beyond the model's, settings that do not work, a cache that measures nothing.
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
                        variant.budget(length)  # settings that do not work are refused now
                    else:
                        reasons[reason].append((task.name, length))
            told = [self._told(reason, cells) for reason, cells in reasons.items()]
            name = f"{variant.label} at {variant.size}"
            if sum(map(len, reasons.values())) == len(self.tasks) * len(self.lengths):
                raise ConfigurationError(f"budgets: {name} is {'; '.join(told)}; leave it out or give longer lengths")
            notes += [f"left out: {name}, {one}" for one in told]
        return notes

    def _told(self, reason: str, cells: list[tuple[str, int]]) -> str:
        tasks = list(dict.fromkeys(task for task, _ in cells))
        lengths = ", ".join(map(str, sorted({length for _, length in cells})))
        where = "" if len(tasks) == len(self.tasks) else f" in {', '.join(tasks)}"
        return f"{reason} for lengths {lengths}{where}"
