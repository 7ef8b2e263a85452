"""Answers of caches of equal bytes: more entries of fewer bits, or fewer in bfloat16.

    python -m benchmarks.kv_questions MODEL --questions FILE.jsonl --questions FILE.jsonl --ask with,after

Each type runs with a budget that has about the bytes of ``SIZES`` in bfloat16. Prompts are read once: full caches of
their beginnings are kept in a directory for the other types. A run that was stopped continues.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

from benchmarks.questions import plan_of, question_parser
from snapstream.config import DEFAULT_POLICY, EngineConfig
from snapstream.engine.settings import load_tokenizer
from snapstream.evaluation.engine_host import EngineHost
from snapstream.evaluation.hosts import Prompts
from snapstream.evaluation.lab import run_questions
from snapstream.evaluation.markdown import as_gap, as_lines
from snapstream.evaluation.policies import Variant
from snapstream.evaluation.records import Record, RecordFile, read_records
from snapstream.evaluation.tables import Results, make_cell
from snapstream.models.files import resolve_config
from snapstream.models.weights import load_spec

SIZES = ("1/4", "1/8", "1/16", "1/32")
TIMES = {"bfloat16": Fraction(1), "int8": Fraction(2), "int8/int4": Fraction(5, 2), "int4": Fraction(7, 2)}
"""Entries of each type in the bytes of one in bfloat16."""


def sized(kind: str) -> dict[str, str]:
    """Sizes of a type's caches, by the size in bfloat16 that has as many bytes."""
    return {size: str(Fraction(size) * TIMES[kind]) for size in SIZES}


def answer(arguments: argparse.Namespace, kind: str) -> Path:
    """Ask all questions of caches of one type; returns where the records are."""
    path: Path = arguments.output / kind.replace("/", "-") / "results.jsonl"
    variants = [Variant(DEFAULT_POLICY, size) for size in sized(kind).values()]
    if kind == "bfloat16":
        variants.insert(0, Variant("full"))
    model, longest = arguments.model, load_spec(resolve_config(arguments.model)).max_position
    plan = plan_of(arguments, variants, Prompts(load_tokenizer(model), chat=None), longest)
    host = EngineHost(
        model,
        max_length=plan.longest,
        budgets=list(plan.budgets()),
        config=EngineConfig(
            slots=5,
            kv_dtype=kind,
            sessions=int(plan.stores_texts),
            prefix_cache="1GiB",
            prefix_dir=str(arguments.output / "prefixes"),
            prefix_disk=arguments.disk * 2**30,
        ),
        chat=None,
        return_kept_tokens=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    file = RecordFile(path, {"model": Path(model).name, "kv_dtype": kind})
    run_questions(host, plan, file, lambda what, done, of: print(f"{kind}: {what}, {done} of {of}", flush=True))
    return path


def named(records: Sequence[Record], kind: str) -> list[Record]:
    """The records under the name of the type, and the size in bfloat16."""
    in_bfloat16 = {size: base for base, size in sized(kind).items()}
    return [replace(each, policy=kind, size=in_bfloat16[each.size]) if each.size else each for each in records]


def main() -> None:
    """Ask, and print a table per task."""
    parser = question_parser(__doc__)
    parser.add_argument("--disk", type=int, default=12, help="GiB for prompts that were read")
    parser.add_argument("--output", type=Path, default=Path("kv-questions"))
    arguments = parser.parse_args()
    records: list[Record] = []
    for kind in TIMES:
        records += named(read_records(answer(arguments, kind))[1], kind)
    results = Results(records)
    for task in (*results.tasks, "all"):
        tasks = results.tasks if task == "all" else [task]
        table = [["bytes", "full", *TIMES, *(f"{kind} - bfloat16" for kind in TIMES if kind != "bfloat16")]]
        for size in SIZES:
            cells = []
            for label in ("full", *TIMES):
                cells.append(make_cell([one for each in tasks for one in results.of(each, 0, label, size)]))
            gaps = [results.difference(kind, "bfloat16", tasks, [size]) for kind in TIMES if kind != "bfloat16"]
            table.append([size, *map(str, cells), *("" if gap is None else as_gap(gap) for gap in gaps)])
        print("\n".join(["", f"### {task}", "", *as_lines(table)]))


if __name__ == "__main__":
    main()
