"""Statistics of records: shares of right answers per task, length and cache, with intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from snapstream.evaluation.policies import ENDPOINT_POLICIES, ENGINE_POLICIES, UNSIZED
from snapstream.evaluation.records import Record
from snapstream.evaluation.scoring import interval, paired_difference
from snapstream.evaluation.tasks import TASKS

_ORDER = {name: place for place, name in enumerate(dict.fromkeys((*ENDPOINT_POLICIES[:1], *ENGINE_POLICIES)))}


@dataclass(frozen=True)
class Cell:
    """Answers to one task at one length under one cache.

    Attributes:
        samples: How many.
        right: How many had every part of the answer; of questions from files, the sum of their scores.
        equal: How many were the answer and nothing else.
        parts: Mean share of parts found.
        mass: Share of attention kept, mean over samples and layers, if known.
    """

    samples: int
    right: float
    equal: int
    parts: float
    mass: float | None

    @property
    def share(self) -> float:
        """Share of right answers."""
        return self.right / self.samples

    def __str__(self) -> str:
        """Percent, with the 95 % interval."""
        low, high = interval(self.right, self.samples)
        return f"{100 * self.share:.0f} ({100 * low:.0f}-{100 * high:.0f})"


def make_cell(records: Sequence[Record]) -> Cell:
    """Aggregate one or more records."""
    masses = [sum(record.mass) / len(record.mass) for record in records if record.mass]
    return Cell(
        samples=len(records),
        right=sum(record.right for record in records),
        equal=sum(record.equal for record in records),
        parts=sum(_parts(record) for record in records) / len(records),
        mass=sum(masses) / len(masses) if masses else None,
    )


def _parts(record: Record) -> float:
    return sum(record.found) / len(record.found) if record.found else record.right


class Results:
    """Records by task, length, label and size, each axis in a fixed order."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.records = list(records)
        found = dict.fromkeys(record.task for record in self.records)
        self.tasks = [*(name for name in TASKS if name in found), *(name for name in found if name not in TASKS)]
        self.lengths = sorted({record.row for record in self.records})
        self.labels = sorted({record.label for record in self.records}, key=_label_order)
        self.sizes = sorted({record.size for record in self.records if record.size}, key=_size_order)
        self._groups: defaultdict[tuple[str, int, str, str], list[Record]] = defaultdict(list)
        for record in self.records:
            self._groups[record.task, record.row, record.label, record.size].append(record)

    def of(self, task: str, length: int, label: str, size: str) -> list[Record]:
        """Records of one cell; may be empty."""
        return self._groups.get((task, length, label, size if label not in UNSIZED else ""), [])

    def groups(self) -> Iterable[list[Record]]:
        """The records of each cell."""
        return self._groups.values()

    def cell(self, task: str, length: int, label: str, size: str) -> Cell | None:
        """One cell, if there are records of it."""
        records = self.of(task, length, label, size)
        return make_cell(records) if records else None

    def lengths_of(self, task: str) -> list[int]:
        """Lengths at which a task was run."""
        return [length for length in self.lengths if any(key[:2] == (task, length) for key in self._groups)]

    def tokens(self, task: str, length: int) -> int:
        """Tokens of a task's prompts: the nominal length, or for a file's questions the mean."""
        if length:
            return length
        lengths = {record.seed: record.length for record in self.records if record.task == task}
        return round(sum(lengths.values()) / len(lengths))

    def most(self, task: str, length: int, size: str) -> int:
        """Number of questions of the cache that was used for the most of them: not every cache fits every text."""
        return max(len(self.of(task, length, label, size)) for label in self.labels)

    def common_lengths(self, task: str, size: str) -> list[int]:
        """Lengths at which every cache that has this size (or none) was run in a task: only these can be compared."""
        labels = [label for label in self.labels if any(self.of(task, length, label, size) for length in self.lengths)]
        return [length for length in self.lengths if all(self.of(task, length, label, size) for label in labels)]

    def over_lengths(self, task: str, label: str, size: str) -> Cell | None:
        """One task under one cache, over all lengths at which every cache of this size was run."""
        records = [r for length in self.common_lengths(task, size) for r in self.of(task, length, label, size)]
        return make_cell(records) if records else None

    def ceiling(self, task: str) -> float | None:
        """Share of right answers with a full cache, or with the endpoint's own cache, over all lengths."""
        for label in UNSIZED:
            records = [record for length in self.lengths for record in self.of(task, length, label, "")]
            if records:
                return make_cell(records).share
        return None

    def kept_mass(self, label: str, size: str) -> float | None:
        """Share of attention kept, over the tasks and lengths at which every cache of this size was run."""
        records = [
            record
            for task in self.tasks
            for length in self.common_lengths(task, size)
            for record in self.of(task, length, label, size)
        ]
        return make_cell(records).mass if records else None

    def difference(
        self, ours: str, theirs: str, tasks: Sequence[str], sizes: Sequence[str] = ()
    ) -> tuple[float, float, float, int] | None:
        """How much more often ``ours`` was right than ``theirs`` on the same questions at the same sizes.

        Args:
            ours: A cache with a size.
            theirs: Another one, or one without a size.
            tasks: Tasks that count.
            sizes: Sizes of ``ours`` that count; all, if none are given.

        Returns:
            The difference, its 95 % interval and the number of questions (texts; their sizes are averaged); ``None`` if
            they have none in common.
        """
        right: dict[object, float] = {}
        for record in self.records:
            if record.label == theirs and record.task in tasks:
                right[record.task, record.length, record.seed, record.depth, record.size] = record.right
        gaps: defaultdict[object, list[float]] = defaultdict(list)
        for record in self.records:
            # A cache that has no size is compared with all sizes of another one.
            size = "" if theirs in UNSIZED else record.size
            key = record.task, record.length, record.seed, record.depth, size
            if record.label == ours and record.size in (sizes or (record.size,)) and key in right:
                gaps[record.cluster].append(record.right - right[key])
        if not gaps:
            return None
        return *paired_difference([sum(gap) / len(gap) for gap in gaps.values()]), len(gaps)


def _label_order(label: str) -> tuple[int, str]:
    return _ORDER.get(label.split(maxsplit=1)[0], len(_ORDER)), label


def _size_order(size: str) -> tuple[int, float]:
    """Shares before numbers, large before small."""
    return (0, -float(Fraction(size))) if "/" in size else (1, -float(size))
