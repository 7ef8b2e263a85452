"""Results on disk: one JSON object per line, written as soon as it is known, so that a killed run can go on."""

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

Key = tuple[str, int, int, float | None, str, str, tuple[tuple[str, str], ...]]


def make_key(
    task: str, length: int, seed: int, depth: float | None, policy: str, size: str, settings: Iterable[tuple[str, str]]
) -> Key:
    """What tells one answer from all others; the order of settings does not matter."""
    return task, length, seed, depth, policy, size, tuple(sorted(settings))


@dataclass(frozen=True)
class Record:
    """One answered question, with everything needed to ask it again.

    Attributes:
        task: Name of the task.
        length: Nominal prompt length in tokens.
        seed: Of the sample; task, length, seed and depth give the same text again.
        depth: Of what was asked for, or ``None``.
        policy: Of the cache.
        size: Its size as asked for: entries, a share of the length, or empty.
        settings: Settings that were swept.
        entries: Cache entries, or ``None`` for all.
        budget: All fields of the cache budget, if known.
        prompt_tokens: Length of the prompt as it was read.
        prompt_sha256: Of its text.
        output: What the model wrote.
        answer: The right answer.
        found: Whether each part of it was found.
        equal: Whether the output is the answer and nothing else.
        output_tokens: Tokens written.
        finish_reason: Why writing ended.
        mass: Kept share of attention, per layer, if known.
        kept: Share of tokens kept in each hundredth of the prompt, per layer and KV head; for one seed only.
        drafted: Guesses of tokens that were verified, with speculative decoding.
        accepted: Those that were right.
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

    @property
    def right(self) -> bool:
        """Whether every part of the answer was found."""
        return all(self.found)

    @property
    def key(self) -> Key:
        """What was asked of what; no two records of a file share it."""
        return make_key(self.task, self.length, self.seed, self.depth, self.policy, self.size, self.settings.items())

    @property
    def label(self) -> str:
        """Policy and settings, without the size."""
        return label_of(self.policy, self.settings.items())


class RecordFile:
    """A file of records that one run at a time appends to. Its first line says what model and settings they are of."""

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        """Open or create it.

        Args:
            path: The file.
            header: Model and settings; a file that exists must have the same.

        Raises:
            ConfigurationError: It is of another model or other settings, or no file of this kind.
        """
        self.path = path
        self.records: list[Record] = []
        if path.exists() and path.stat().st_size:
            found, self.records, end = _read(path)
            different = sorted(k for k in found.keys() | header.keys() if found.get(k) != header.get(k))
            if different:
                told = "; ".join(f"{k}: {found.get(k)!r} there, {header.get(k)!r} now" for k in different)
                raise ConfigurationError(f"{path} has results of another run ({told}); give another --output")
            if end < path.stat().st_size:  # a line that was being written when the run was killed
                os.truncate(path, end)
            self._file = path.open("a", encoding="utf-8")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("w", encoding="utf-8")
            self._write({"header": header})
        self.done = {record.key for record in self.records}

    def add(self, record: Record) -> None:
        """Write a record; it is in the file when this returns."""
        fields = {name: value for name, value in asdict(record).items() if name != "kept" or value is not None}
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
        ConfigurationError: It is missing or no file of this kind.
    """
    if not path.is_file():
        raise ConfigurationError(f"{path}: no such file")
    header, records, _ = _read(path)
    return header, records


def _read(path: Path) -> tuple[dict[str, Any], list[Record], int]:
    """Header, records, and the length of what is whole."""
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
                raise ConfigurationError(f"{path}, line {number}, is no result of snapstream eval: {error}") from error
            end += len(line)
    if header is None:
        raise ConfigurationError(f"{path} has no whole first line; remove it, or give another --output")
    return header, records, end
