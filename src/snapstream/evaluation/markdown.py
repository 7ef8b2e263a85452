"""The report as Markdown: one table per task, and the share of attention that was kept."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from snapstream.evaluation.policies import UNSIZED
from snapstream.evaluation.questions.question import LATE
from snapstream.evaluation.tables import Cell, Results
from snapstream.evaluation.tasks import TASKS

FLOOR = 0.2
"""Minimum share of right answers with a full cache: below it, the model cannot do the task, and the rest is noise."""


GRADED_FLOOR = 0.05
"""The same for scores between 0 and 1, such as ROUGE-L, which are low for good answers, too."""


def render_markdown(header: dict[str, Any], results: Results, notes: Sequence[str] = ()) -> str:
    """The whole report, including its title."""
    lines = [f"# Accuracy of {header['model']}", "", describe(header, results), ""]
    lines += [f"- {note}" for note in notes]
    for task in results.tasks:
        lines += ["", f"## {task}", "", f"{about(task)[0].upper()}{about(task)[1:]}.", ""]
        lines += [weakness(results, task)] if is_weak(results, task) else as_lines(task_rows(results, task))
    against = difference_rows(results)
    if against:
        lines += ["", "## Compared with the full cache", "", DIFFERENCE_NOTE, "", *as_lines(against)]
    alike = not_told_apart(results)
    if alike:
        lines += ["", "## Tasks that say little about the caches", "", *(f"- {line}" for line in alike.values())]
    swept = swept_rows(results)
    if swept:
        lines += ["", "## Settings", "", SWEPT_NOTE, "", *as_lines(swept)]
    guesses = guess_rows(results)
    if guesses:
        lines += ["", "## Guesses that were right", "", GUESS_NOTE, "", *as_lines(guesses)]
    mass = mass_rows(results)
    if mass:
        lines += ["", "## Attention kept", "", MASS_NOTE, "", *as_lines(mass)]
    return "\n".join(lines) + "\n"


DIFFERENCE_NOTE = (
    "Difference from the full cache in percentage points, on the same questions, with 95 % intervals, over all "
    "tasks that the model can do. Questions about one text count as one."
)

SWEPT_NOTE = (
    "Each setting compared with the first one, on the same questions at the same sizes: the difference in right "
    "answers in percentage points, with its 95 % interval. Tasks that continue in a compressed cache are listed "
    "separately."
)
MASS_NOTE = (
    "Percentage of the attention of the prompt's last tokens that went to kept tokens, averaged over layers, heads, "
    "tasks and samples."
)

GUESS_NOTE = (
    "Percentage of the guesses of speculative decoding that were right, and their number, over all lengths, sizes and "
    "samples. Guesses change how fast an answer is generated, not what it is."
)


def describe(header: dict[str, Any], results: Results) -> str:
    """What was measured, in a paragraph."""
    samples = sorted({len(group) for group in results.groups()})
    count = str(samples[0]) if len(samples) == 1 else f"{samples[0]} to {samples[-1]}"
    where = "the built-in engine" if header.get("host") == "engine" else "an OpenAI-compatible endpoint"
    dtype = f", {header['dtype']}" if "dtype" in header else ""
    return (
        f"Percentage of questions answered correctly, with 95 % intervals; {count} questions per cell, greedy "
        f"decoding, on {where}{dtype}. {_rule(results)}"
        "Sizes are shares of the prompt's length, or entries per layer and KV head; 'full' drops nothing."
    )


def _rule(results: Results) -> str:
    """When an answer is right."""
    rule = ""
    if any(record.question is None for record in results.records):
        rule = "An answer is right if the output names every part of it before any other answer that the text might "
        rule += "suggest. "
    if any(record.question is not None for record in results.records):
        rule += "Questions from files are scored as the file says; scores such as F1 count as parts of a right answer. "
    return rule


def about(task: str) -> str:
    """Description of a task, for its heading."""
    if task in TASKS:
        return TASKS[task].about
    return "questions from a file" + (", asked after the text was compressed" if task.startswith(LATE) else "")


def is_weak(results: Results, task: str) -> bool:
    """Whether the model cannot do a task even with a full cache."""
    ceiling = results.ceiling(task)
    graded = any(record.task == task and record.right not in (0, 1) for record in results.records)
    return ceiling is not None and ceiling < (GRADED_FLOOR if graded else FLOOR)


def weakness(results: Results, task: str) -> str:
    """What the report shows instead of results for a task that the model cannot do."""
    return (
        f"With a full cache, this model answers only {100 * (results.ceiling(task) or 0):.0f} % of the questions "
        "correctly. It cannot do this task, so results with smaller caches would be noise and are left out."
    )


def as_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """A table as Markdown; the first row is its head."""
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return [lines[0], "|" + "---|" * len(rows[0]), *lines[1:]]


def task_rows(results: Results, task: str) -> list[list[str]]:
    """One row per length and cache, one column per size; the first row is the head, as in all tables here."""
    unsized = [label for label in results.labels if label in UNSIZED]
    sized = [label for label in results.labels if label not in UNSIZED]
    table = [["tokens" if results.lengths_of(task) != [0] else "mean tokens", *unsized, "cache", *results.sizes]]
    for length in results.lengths_of(task):
        whole = [str(results.cell(task, length, label, "") or "") for label in unsized]
        rows = [label for label in sized if any(results.cell(task, length, label, size) for size in results.sizes)]
        for place, label in enumerate(rows or [""]):
            cells = [_shown(results, task, length, label, size) for size in results.sizes]
            shown = [str(results.tokens(task, length)), *whole] if place == 0 else [""] * (1 + len(whole))
            table.append([*shown, label, *cells])
    return table


def _shown(results: Results, task: str, length: int, label: str, size: str) -> str:
    cell = results.cell(task, length, label, size)
    return "" if cell is None else f"{cell}{mark(cell, results.most(task, length, size))}"


def mark(cell: Cell, count: int) -> str:
    """The number of questions of a cell, if others have more: not every cache fits every text."""
    return "" if cell.samples == count else f" of {cell.samples}"


def summary_rows(results: Results, size: str) -> list[list[str]]:
    """All tasks that the model can do at one size, all lengths together: a row per task, a column per cache."""
    table = [["task", *results.labels]]
    for task in results.tasks:
        if not is_weak(results, task):
            table.append([task, *(str(results.over_lengths(task, label, size) or "") for label in results.labels)])
    return table


def difference_rows(results: Results) -> list[list[str]]:
    """Every cache at every size beside the full one, over all tasks that the model can do; empty without a full one."""
    if "full" not in results.labels or not results.sizes:
        return []
    tasks = [task for task in results.tasks if not is_weak(results, task)]
    table = [["cache", *results.sizes]]
    for label in results.labels:
        found = [results.difference(label, "full", tasks, [size]) for size in results.sizes]
        if any(found) and label not in UNSIZED:
            table.append([label, *("" if one is None else as_gap(one) for one in found)])
    return table if len(table) > 1 else []


def not_told_apart(results: Results) -> dict[str, str]:
    """Tasks in which StreamingLLM, which drops the middle, is not significantly below a full cache; a line about each.

    They say little about caches: the questions do not need the text, or are too few.
    """
    if not {"full", "streaming"} <= set(results.labels):
        return {}
    lines = {}
    for task in results.tasks:
        sizes = [size for size in results.sizes if any(r.size == size and r.task == task for r in results.records)]
        if is_weak(results, task) or not sizes:
            continue
        found = results.difference("streaming", "full", [task], sizes[-1:])
        if found is not None and found[2] >= 0:
            lines[task] = f"{task} at {sizes[-1]}: StreamingLLM against the full cache {as_gap(found)}"
    return lines


def as_gap(difference: tuple[float, float, float, int], digits: int = 1) -> str:
    """A difference in percentage points, with its interval; see :meth:`Results.difference`."""
    mean, low, high = (f"{100 * share:+.{digits}f}" for share in difference[:3])
    return f"{mean} ({low} to {high})"


def swept_rows(results: Results) -> list[list[str]]:
    """Each swept variant against the first; empty unless there are several."""
    swept = [label for label in results.labels if "=" in label]
    if len(swept) < 2:
        return []
    first = next(record.label for record in results.records if record.label in swept)
    later = [task for task in results.tasks if _continues(task)]
    once = [task for task in results.tasks if task not in later]
    table = [["settings", "tasks", "questions", "right", "difference"]]
    for kind, tasks in (("one prompt", once), ("continued", later)):
        for label in swept:
            found = results.difference(label, first, tasks)
            if found is None:
                continue
            records = [r for r in results.records if r.label == label and r.task in tasks]
            share = f"{100 * sum(r.right for r in records) / len(records):.1f}"
            gap = "" if label == first else as_gap(found)
            table.append([label.partition(" ")[2], kind, str(found[3]), share, gap])
    return table


def _continues(task: str) -> bool:
    """Whether a task's question comes after its text was compressed."""
    return TASKS[task].follow_up != "none" if task in TASKS else task.startswith(LATE)


def guess_rows(results: Results) -> list[list[str]]:
    """Guesses by task and cache, also for tasks that the model cannot do; empty if there were none."""
    table = [["task", *results.labels]]
    for task in results.tasks:
        row = [task]
        for label in results.labels:
            records = [record for record in results.records if (record.task, record.label) == (task, label)]
            drafted = sum(record.drafted for record in records)
            accepted = sum(record.accepted for record in records)
            row.append(f"{100 * accepted / drafted:.0f} of {drafted:,}" if drafted else "")
        table.append(row)
    return table if any(cell for row in table[1:] for cell in row[1:]) else []


def mass_rows(results: Results) -> list[list[str]]:
    """Attention kept, by cache and size; empty if it was not recorded."""
    table = [["cache", *results.sizes]]
    for label in results.labels:
        masses = [
            None if label in (*UNSIZED, "truncated") else results.kept_mass(label, size) for size in results.sizes
        ]
        if any(mass is not None for mass in masses):
            table.append([label, *("" if mass is None else f"{100 * mass:.1f}" for mass in masses)])
    return table if len(table) > 1 else []
