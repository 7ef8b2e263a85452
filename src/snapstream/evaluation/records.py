"""Results on disk: one JSON object per line, written as soon as it is known, so that a run can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from snapstream.errors import ConfigurationError
from snapstream.evaluation.policies import label_of
from snapstream.evaluation.questions.question import LATE

Key = tuple[str, int, int, float | None, str, str, tuple[tuple[str, str], ...]]


def make_key(
    task: str, length: int, seed: int, depth: float | None, policy: str, size: str, settings: Iterable[tuple[str, str]]
) -> Key:
    """The key of an answer, which no other answer has; the order of settings does not matter."""
    return task, length, seed, depth, policy, size, tuple(sorted(settings))


@dataclass(frozen=True)
class Record:
    """One answered question, with everything that is needed to ask it again; besides its file, if it is from one.

    Attributes:
        task: Name of the task.
        length: Nominal prompt length in tokens; of a file's questions, the length itself.
        seed: Seed of the sample; task, length, seed and depth reproduce the text. Of a file, the question's index.
        depth: Depth of the answer in the text, or ``None``.
        policy: Policy of the cache.
        size: Size of the cache as given: entries, a share of the length, or empty.
        settings: Settings that were swept.
        entries: Cache entries, or ``None`` for all.
        budget: All fields of the cache budget, if known.
        prompt_tokens: Length of the prompt as it was processed.
        prompt_sha256: SHA-256 of the prompt's text, and of how a question from a file is scored.
        output: What the model wrote.
        answer: The right answer.
        found: Whether each part of it was found.
        equal: Whether the output is the answer and nothing else.
        output_tokens: Tokens generated.
        finish_reason: Why generation ended.
        mass: Share of attention kept, per layer, if known.
        kept: Share of tokens kept in each hundredth of the prompt, per layer and KV head; for one seed only.
        drafted: Guesses of speculative decoding that were verified.
        accepted: Guesses that were right.
        question: Name of the question, if it is from a file.
        text: Index of its text in this file.
        score: How much of the answer is right, between 0 and 1, for a question from a file.
    """

    task: str
    length: int
    seed: int
    depth: float | None
    policy: str
    size: str
    settings: dict[str, str]
    entries: int | None
    budget: dict[str, Any] | None
    prompt_tokens: int
    prompt_sha256: str
    output: str
    answer: str
    found: list[bool]
    equal: bool
    output_tokens: int
    finish_reason: str
    mass: list[float] | None = None
    kept: list[list[list[float]]] | None = None
    drafted: int = 0
    accepted: int = 0
    question: str | None = None
    text: int | None = None
    score: float | None = None

    @property
    def right(self) -> float:
        """How much of the answer is right, 0 to 1; of a generated task, whether every part of it was found."""
        return float(all(self.found)) if self.score is None else self.score

    @property
    def row(self) -> int:
        """The nominal length; 0 for questions from a file, whose texts have all kinds of lengths."""
        return self.length if self.question is None else 0

    @property
    def cluster(self) -> tuple[object, ...]:
        """What the answer depends on besides the cache: answers about one text of a file stand or fall together."""
        if self.question is None:
            return self.task, self.length, self.seed, self.depth
        return self.task.removeprefix(LATE), self.text

    @property
    def key(self) -> Key:
        """The question and the cache; no two records of a file share it."""
        return make_key(self.task, self.length, self.seed, self.depth, self.policy, self.size, self.settings.items())

    @property
    def label(self) -> str:
        """Policy and settings, without the size."""
        return label_of(self.policy, self.settings.items())


class RecordFile:
    """A file of records, to which one run at a time appends. Its first line holds the model and the settings."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        """Open or create it.

        Args:
            path: The file.
            header: Model and settings; an existing file must have the same.

        Raises:
            ConfigurationError: The file has another model or other settings, or is not a results file.
        """
        self.path = path
        self.records: list[Record] = []
        if path.exists() and path.stat().st_size:
            found, self.records, end = _read(path)
            different = sorted(k for k in found.keys() | header.keys() if found.get(k) != header.get(k))
            if different:
                told = "; ".join(f"{k}: {found.get(k)!r} there, {header.get(k)!r} now" for k in different)
                raise ConfigurationError(f"{path} has results of another run ({told}); give another --output")
            if end < path.stat().st_size:  # a line that was being written when the run was interrupted
                os.truncate(path, end)
            self._file = path.open("a", encoding="utf-8")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
            self._write({"header": header})
        self.done = {record.key for record in self.records}

    def add(self, record: Record) -> None:
        """Write a record to the file, and flush it."""
        optional = ("kept", "question", "text", "score")
        fields = {name: value for name, value in asdict(record).items() if name not in optional or value is not None}
        self._write(fields)
        self.records.append(record)
        self.done.add(record.key)

    def _write(self, fields: dict[str, Any]) -> None:
        self._file.write(json.dumps(fields) + "\n")
        self._file.flush()

    def __enter__(self) -> RecordFile:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()


def read_records(path: Path) -> tuple[dict[str, Any], list[Record]]:
    """Header and records of a file.

    Raises:
        ConfigurationError: It is missing or not a results file.
    """
    if not path.is_file():
        raise ConfigurationError(f"{path}: no such file")
    header, records, _ = _read(path)
    return header, records


def _read(path: Path) -> tuple[dict[str, Any], list[Record], int]:
    """Header, records, and the length of all complete lines in bytes."""
    header: dict[str, Any] | None = None
    records, end = [], 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                break
            try:
                fields = json.loads(line)
                if header is None:
                    header = dict(fields["header"])
                else:
                    records.append(Record(**fields))
            except (ValueError, TypeError, KeyError) as error:
                raise ConfigurationError(
                    f"{path}, line {number}, is not a result of snapstream eval: {error}"
                ) from error
            end += len(line)
    if header is None:
        raise ConfigurationError(f"{path} has no complete first line; remove it, or give another --output")
    return header, records, end
