"""Scores of ``snapstream eval`` in a form that is small enough to publish, and their tables.

A packed file has one JSON object per model and task: the run's header, the questions, and for each cache a list of
scores, one per question. What the model wrote is left out. docs/assets/real-models.jsonl is such a file.

    python -m benchmarks.real_results docs/assets/real-models.jsonl     # the tables of docs/accuracy.md
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from snapstream.config import DEFAULT_POLICY
from snapstream.evaluation.markdown import as_gap, as_lines, is_weak, mark, not_told_apart, weakness
from snapstream.evaluation.records import Record, read_records
from snapstream.evaluation.tables import Cell, Results

PAPER = "snapstream"
_QUESTION = ("length", "seed", "depth", "prompt_tokens", "text", "question")
"""Fields of a record that all caches share."""
_LEFT_OUT: dict[str, Any] = {
    "settings": {},
    "entries": None,
    "budget": None,
    "prompt_sha256": "",
    "output": "",
    "answer": "",
    "found": [],
    "equal": False,
    "output_tokens": 0,
    "finish_reason": "",
}


def pack(path: Path) -> Iterator[dict[str, Any]]:
    """The tasks of a results file, without outputs.

    Args:
        path: A file that ``snapstream eval`` wrote.

    Yields:
        For each task and nominal length: ``header``, ``task``, ``questions`` (a list of objects) and ``scores``: a list
        per cache, in the order of the questions; ``null`` is a question that the cache was not asked.

    Raises:
        ValueError: Settings were swept.
    """
    header, records = read_records(path)
    for task, row in dict.fromkeys((record.task, record.row) for record in records):
        chosen = [record for record in records if (record.task, record.row) == (task, row)]
        if any(record.settings for record in chosen):
            raise ValueError(f"{path} has results of swept settings; give results of policies and sizes")
        # The last cache describes a question; `truncated` comes first, because it sees a shorter prompt.
        chosen.sort(key=lambda record: (record.policy != "truncated", record.policy, record.size))
        questions = {_place(record): record for record in chosen}
        order = {place: at for at, place in enumerate(sorted(questions))}
        scores: dict[str, list[float | None]] = {}
        for record in chosen:
            cache = f"{record.policy} {record.size}".strip()
            scores.setdefault(cache, [None] * len(order))[order[_place(record)]] = _short(record.right)
        described = [{name: getattr(questions[place], name) for name in _QUESTION} for place in order]
        yield {"header": header, "task": task, "questions": described, "scores": scores}


def unpack(line: dict[str, Any]) -> Iterator[Record]:
    """The records of one task; outputs and budgets are empty."""
    for cache, scores in line["scores"].items():
        policy, _, size = cache.partition(" ")
        for question, score in zip(line["questions"], scores, strict=True):
            if score is not None:
                yield Record(task=line["task"], policy=policy, size=size, score=score, **question, **_LEFT_OUT)


def write_packed(lines: Iterable[dict[str, Any]], to: Path) -> None:
    """Write packed tasks to a file of JSON lines."""
    to.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines), encoding="utf-8")


def read_packed(path: Path) -> list[dict[str, Any]]:
    """The packed tasks of such a file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def render(lines: Iterable[dict[str, Any]]) -> str:
    """The tables of every model, each below the name of its file."""
    models: dict[str, list[Record]] = {}
    for line in lines:
        models.setdefault(Path(line["header"]["model"]).stem, []).extend(unpack(line))
    return "\n".join(f"\n### {name}\n" + "\n".join(tables(records)) for name, records in models.items()).strip()


def _place(record: Record) -> tuple[int, float]:
    """What tells a question from the others of its task and length."""
    return record.seed, -1.0 if record.depth is None else record.depth


def _short(score: float) -> float:
    return int(score) if score in (0, 1) else round(score, 4)


def tables(records: list[Record]) -> list[str]:
    """A table per size: a row per task, a column per policy; the last rows are about all of them.

    The last column compares the default with the paper's rule. **Bold** cells are significantly below the full cache,
    bold differences significantly unlike 0. Tasks that the model cannot do with a full cache are only named. Tasks in
    which StreamingLLM is not significantly below the full cache are left out of the last rows, and named, too.
    """
    every = Results(records)
    weak = [task for task in every.tasks if is_weak(every, task)]
    alike, left_out, found = not_told_apart(every), set[str](), list[str]()
    for size in every.sizes:
        at_size = {(record.task, record.row) for record in records if record.size == size and record.task not in weak}
        if not at_size:
            continue
        results = Results(record for record in records if (record.task, record.row) in at_size)
        labels = results.labels
        table = [["task", "tokens", "questions", *labels, f"{DEFAULT_POLICY} minus {PAPER}"]]
        for task in results.tasks:
            for length in results.lengths_of(task):
                shown = [_shown(results, task, length, label, size) for label in labels]
                one = Results(record for record in records if (record.task, record.row) == (task, length))
                named = [task, str(results.tokens(task, length)), str(results.most(task, length, size))]
                table.append([*named, *shown, _gap(one, DEFAULT_POLICY, PAPER, size)])
        if any(task not in alike for task in results.tasks):
            left_out |= alike.keys() & set(results.tasks)
            results = Results(record for record in results.records if record.task not in alike)
        if len(results.tasks) > 1:
            table.append(["mean of tasks", "", "", *(_mean(results, label, size) for label in labels), ""])
        gaps = [_gap(results, label, "full", size) for label in labels]
        table.append(["points relative to full", "", "", *gaps, _gap(results, DEFAULT_POLICY, PAPER, size)])
        found += ["", f"**{size} of the prompt**" if "/" in size else f"**{size} entries**", "", *as_lines(table)]
    lines = [f"- {task}: {weakness(every, task)}" for task in weak]
    lines += [f"- Not in the last rows: {line}." for task, line in alike.items() if task in left_out]
    return ["", *lines, *found] if lines else found


def summary(records: Sequence[Record], labels: Sequence[str], sizes: Sequence[str]) -> list[str]:
    """Rows of README's table, without the names of tasks: tokens, questions, the full cache, and all sizes of a policy.

    Args:
        records: Of one model.
        labels: Policies, besides the full cache.
        sizes: Sizes that share a cell.
    """
    results, rows = Results(records), []
    for task in results.tasks:
        for length in results.lengths_of(task):
            full = results.cell(task, length, "full", "")
            assert full is not None
            cells = [f"{results.tokens(task, length):,}", str(full.samples), _percent(full)]
            for label in labels:
                cells.append(" / ".join(_shown(results, task, length, label, size, _percent) for size in sizes))
            rows.append(" | ".join(cells))
    return rows


def _percent(cell: Cell) -> str:
    return f"{100 * cell.share:.0f}"


def _shown(results: Results, task: str, length: int, label: str, size: str, write: Callable[[Cell], str] = str) -> str:
    """A cell, bold if it is significantly below the full cache's."""
    cell = results.cell(task, length, label, size)
    if cell is None:
        return ""
    text = f"{write(cell)}{mark(cell, results.most(task, length, size))}"
    pair = results.of(task, length, label, size) + results.of(task, length, "full", "")
    found = Results(pair).difference(label, "full", [task], [size])
    return f"**{text}**" if found is not None and found[2] < 0 else text


def _mean(results: Results, label: str, size: str) -> str:
    """The mean of all tasks in percent, each with the same weight; empty if a row is missing."""
    of_tasks = []
    for task in results.tasks:
        cells = [results.cell(task, length, label, size) for length in results.lengths_of(task)]
        if None in cells:
            return ""
        of_tasks.append(statistics.mean(cell.share for cell in cells if cell is not None))
    return f"{100 * statistics.mean(of_tasks):.0f}"


def _gap(results: Results, ours: str, theirs: str, size: str) -> str:
    """A difference in points over all tasks, bold if its interval excludes 0; empty if one of the tasks is missing."""
    cells = (results.cell(task, length, ours, size) for task in results.tasks for length in results.lengths_of(task))
    found = results.difference(ours, theirs, results.tasks, [size]) if ours != theirs and all(cells) else None
    if found is None:
        return ""
    text = as_gap(found, digits=0)
    return f"**{text}**" if found[1] > 0 or found[2] < 0 else text


if __name__ == "__main__":
    print(render(read_packed(Path(sys.argv[1]))))
