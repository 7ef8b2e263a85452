"""Makes docs/kept.svg: which parts of one prompt each policy keeps, as `snapstream eval` draws it in its report.

python -m docs.kept
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from typer.testing import CliRunner

from snapstream.cli import app
from snapstream.evaluation.plots import kept_tokens
from snapstream.evaluation.records import read_records

POLICIES = "streaming,sage-kv,keydiff,local-keydiff,snapstream,mixed,spans"


def main() -> None:
    """Ask one question under every policy, and draw what was kept."""
    with tempfile.TemporaryDirectory() as directory:
        options = ["--tasks", "multikey", "--lengths", "4k", "--budgets", "1/8", "--samples", "1", "--depths", "1"]
        done = CliRunner().invoke(app, ["eval", *options, "--policies", POLICIES, "-o", directory])
        assert done.exit_code == 0, done.output
        records = read_records(Path(directory) / "results.jsonl")[1]
    ordered = sorted(records, key=lambda record: POLICIES.index(record.label))
    (Path(__file__).parent / "kept.svg").write_text(kept_tokens(ordered), encoding="utf-8")


if __name__ == "__main__":
    main()
