"""The report as one self-contained HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from snapstream.errors import missing_extra
from snapstream.evaluation import markdown
from snapstream.evaluation.tables import Results

_TEMPLATE = Path(__file__).with_name("report.html.j2")


def render_html(header: dict[str, Any], results: Results, notes: Sequence[str] = ()) -> str:
    """The whole page.

    Raises:
        ConfigurationError: matplotlib is not installed.
    """
    try:
        from snapstream.evaluation import plots

        import_matplotlib()
    except ImportError as error:
        raise missing_extra("the HTML report needs matplotlib", "eval") from error
    import jinja2

    size = _middle(results)
    tasks = []
    for name in results.tasks:
        weak = markdown.is_weak(results, name)
        tasks.append(
            {
                "name": name,
                "about": markdown.about(name),
                "weakness": markdown.weakness(results, name) if weak else "",
                "curve": plots.accuracy_by_size(results, name) if results.sizes and not weak else "",
                "heat": None if weak else plots.depth_by_length(results, name, size),
                "table": [] if weak else markdown.task_rows(results, name),
                "kept": "" if weak else _kept(results, name, size, plots),
            }
        )
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return page.render(
        header=header,
        description=markdown.describe(header, results),
        notes=list(notes),
        size=size,
        summary=markdown.summary_rows(results, size),
        differences=markdown.difference_rows(results),
        difference_note=markdown.DIFFERENCE_NOTE,
        alike=list(markdown.not_told_apart(results).values()),
        swept=markdown.swept_rows(results),
        swept_note=markdown.SWEPT_NOTE,
        guesses=markdown.guess_rows(results),
        guess_note=markdown.GUESS_NOTE,
        mass=markdown.mass_rows(results),
        mass_note=markdown.MASS_NOTE,
        tasks=tasks,
    )


def import_matplotlib() -> None:
    """Raise ``ImportError`` if plots cannot be drawn."""
    import matplotlib  # noqa: F401


def _middle(results: Results) -> str:
    """The size that the overview and the heat maps show: the second of those given."""
    return results.sizes[min(1, len(results.sizes) - 1)] if results.sizes else ""


def _kept(results: Results, task: str, size: str, plots: Any) -> str:
    """The plot of the tokens kept of one prompt, for the longest length that has one."""
    for length in reversed(results.lengths_of(task)):
        shown = [
            record
            for label in results.labels
            for record in results.of(task, length, label, size)
            if record.kept and record.entries is not None and record.policy != "truncated"
        ]
        if shown:
            return str(plots.kept_tokens(shown))
    return ""
