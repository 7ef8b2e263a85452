"""Plots of the report, as SVG text: no files, no scripts, nothing to fetch."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any

from snapstream.evaluation.policies import UNSIZED
from snapstream.evaluation.records import Record
from snapstream.evaluation.scoring import interval
from snapstream.evaluation.tables import Results, make_cell

COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#666666", "#000000")
"""Colors that people with color blindness can tell apart (Okabe and Ito)."""
MARKERS = "osD^vPX*"


def accuracy_by_size(results: Results, task: str) -> str:
    """Accuracy against cache size, one panel per length, one line per cache, bars are 95 % intervals."""
    lengths = results.lengths_of(task)
    figure, axes = _figure(len(lengths), width=3.4, height=2.9)
    places = list(range(len(results.sizes)))
    for axis, length in zip(axes, lengths, strict=True):
        for index, label in enumerate(results.labels):
            color = COLORS[index % len(COLORS)]
            if label in UNSIZED:
                cell = results.cell(task, length, label, "")
                if cell is not None:
                    axis.axhline(100 * cell.share, color=color, linestyle="--", linewidth=1, label=label)
                continue
            points = [(place, results.cell(task, length, label, results.sizes[place])) for place in places]
            shown = [(place, cell) for place, cell in points if cell is not None]
            if not shown:
                continue
            shares = [100 * cell.share for _, cell in shown]
            bounds = [interval(cell.right, cell.samples) for _, cell in shown]
            below = [share - 100 * low for share, (low, _) in zip(shares, bounds, strict=True)]
            above = [100 * high - share for share, (_, high) in zip(shares, bounds, strict=True)]
            shift = 0.06 * (index - len(results.labels) / 2)  # so that bars do not hide each other
            axis.errorbar(
                [place + shift for place, _ in shown],
                shares,
                yerr=[[max(0.0, value) for value in below], [max(0.0, value) for value in above]],
                color=color,
                marker=MARKERS[(index + index // len(COLORS)) % len(MARKERS)],
                markersize=4,
                linewidth=1.2,
                elinewidth=0.8,
                label=label,
            )
        axis.set_title(f"{results.tokens(task, length)} tokens", fontsize=9)
        axis.set_xticks(places, results.sizes)
        axis.set_ylim(-4, 104)
        axis.set_xlabel("cache size")
    axes[0].set_ylabel("right, %")
    named = dict(pair[::-1] for axis in axes for pair in zip(*axis.get_legend_handles_labels(), strict=True))
    figure.legend(
        named.values(), named.keys(), loc="outside lower center", ncols=min(4, len(named)), fontsize=8, frameon=False
    )
    return _svg(figure, f"{task}: accuracy by cache size")


def depth_by_length(results: Results, task: str, size: str) -> str | None:
    """Heat maps of accuracy, depth by length, one per cache; ``None`` if depths were not controlled."""
    depths = sorted({r.depth for r in results.records if r.task == task and r.depth is not None})
    lengths = results.lengths_of(task)
    labels = [label for label in results.labels if any(results.of(task, length, label, size) for length in lengths)]
    if len(depths) < 2 or not labels:
        return None
    figure, axes = _figure(len(labels), width=1.1 + 0.5 * len(lengths), height=0.9 + 0.32 * len(depths))
    image = None
    for axis, label in zip(axes, labels, strict=True):
        rows = []
        for depth in depths:
            row = []
            for length in lengths:
                records = [r for r in results.of(task, length, label, size) if r.depth == depth]
                row.append(100 * make_cell(records).share if records else float("nan"))
            rows.append(row)
        image = axis.imshow(rows, vmin=0, vmax=100, cmap="viridis", aspect="auto")
        for y, row in enumerate(rows):
            for x, value in enumerate(row):
                if not math.isnan(value):
                    axis.text(
                        x, y, f"{value:.0f}", ha="center", va="center", fontsize=7, color="w" if value < 60 else "k"
                    )
        axis.set_title(label, fontsize=9)
        axis.set_xticks(range(len(lengths)), [str(length) for length in lengths], fontsize=7, rotation=45)
        axis.set_yticks(range(len(depths)), [f"{100 * depth:.0f} %" for depth in depths], fontsize=7)
        axis.set_xlabel("tokens", fontsize=8)
    axes[0].set_ylabel("depth", fontsize=8)
    figure.colorbar(image, ax=list(axes), label="right, %", shrink=0.8)
    return _svg(figure, f"{task}: accuracy by depth and length")


def kept_tokens(records: Sequence[Record]) -> str:
    """Which parts of one prompt were kept: one strip per cache, rows are layers and KV heads, black is kept."""
    figure, axes = _figure(1, width=8.0, height=0.3 + 0.62 * len(records), rows=len(records))
    for axis, record in zip(axes, records, strict=True):
        rows = [head for layer in record.kept or [] for head in layer]
        axis.imshow(
            rows, vmin=0, vmax=1, cmap="Greys", aspect="auto", extent=(0, 100, len(rows), 0), interpolation="none"
        )
        axis.set_yticks([])
        axis.set_xticks([])
        axis.set_ylabel(record.label, rotation=0, ha="right", va="center", fontsize=8)
        if record.depth is not None:
            axis.axvline(100 * record.depth, color="#d55e00", linewidth=1, linestyle=":")
    axes[-1].set_xticks([0, 25, 50, 75, 100])
    axes[-1].set_xlabel("position in the prompt, %", fontsize=8)
    return _svg(figure, "kept tokens")


def _figure(columns: int, *, width: float, height: float, rows: int = 1) -> tuple[Any, Any]:
    """A figure and its axes in reading order, without any state that is shared with the caller's own plots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False, sharey=rows == 1)
    return figure, axes.flatten()


def _svg(figure: Any, title: str) -> str:
    import matplotlib

    buffer = io.StringIO()
    # Fixed ids and no date: equal results give an equal report.
    with matplotlib.rc_context({"svg.hashsalt": "snapstream", "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Title": title})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
