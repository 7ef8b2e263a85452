"""Accuracy of cache policies on real models and public questions.

Runs ``snapstream eval`` part by part on every GGUF file of a directory, and prints what all parts have found so far.
A run takes hours on two cores. It can be stopped at any time, and the same command continues. The answers are in a
directory per model and part; ``scores.jsonl`` has the scores of all of them.

    python -m benchmarks.real_models MODELS DATA --output eval-real --parts pairs,topics --samples 100
    python -m benchmarks.real_models MODELS DATA --output eval-real --parts none      # only the tables
    python -m benchmarks.real_results eval-real/scores.jsonl                          # the same tables

Defaults were chosen on texts with even numbers, and on other generated ones. ``--half odd`` asks about the others.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.real_results import pack, render, write_packed
from snapstream.evaluation.policies import ENGINE_POLICIES

POLICIES = tuple(policy for policy in ENGINE_POLICIES if policy != "random")
SIZES = "1/4,1/8,1/16,1/32"
FIRST_SEED = {"even": 0, "odd": 5000}
"""Of generated texts."""


@dataclass(frozen=True)
class Part:
    """A part of the evaluation.

    Attributes:
        files: Patterns of files with questions.
        ask: Where the questions are asked.
        tasks: Generated tasks, instead of files.
        lengths: Their lengths.
        options: Further options.
    """

    files: tuple[str, ...] = ()
    ask: str = "with,after"
    tasks: str = ""
    lengths: str = ""
    options: tuple[str, ...] = ()


PARTS = {
    "pairs": Part(("kv*75*.jsonl*",)),
    "topics": Part(("*topic_retrieval*.jsonl*",)),
    "facts": Part(("*altqa*.jsonl*",)),
    "meetings": Part(("*meetingqa*.jsonl*", "*paperqa*.jsonl*")),
    "documents": Part(("*multidoc_qa*.jsonl*",)),
    "lectures": Part(("*tpo*.jsonl*", "*coursera*.jsonl*")),
    "libraries": Part(("*private_eval*.jsonl*",)),
    "sums": Part(("*gsm*.jsonl*",), ask="with"),
    "ruler": Part(tasks="needle,multikey,tracking,common-words", lengths="4k,8k,16k", options=("--depths", "5")),
    "prose": Part(tasks="phone,phones,room,late-phone", lengths="4k", options=("--depths", "5")),
    "functions": Part(("*humaneval*.jsonl*",), ask="with", options=("--run-code",)),
}


def run(model: Path, part: Part, data: Path, output: Path, samples: int, half: str, rest: Sequence[str]) -> int:
    """Run one part on one model; returns the exit status."""
    files = [str(path) for pattern in part.files for path in sorted(data.glob(pattern))]
    if part.files and not files:
        print(f"left out: no file {' or '.join(part.files)} in {data}", file=sys.stderr)
        return 0
    asked = [option for file in files for option in ("--questions", file)]
    asked += ["--ask", part.ask] if files else ["--tasks", part.tasks, "--lengths", part.lengths]
    if half != "all":
        asked += ["--half", half] if files else ["--seed", str(FIRST_SEED[half])]
    command = [sys.executable, "-m", "snapstream.cli", "eval", str(model), *asked, "--samples", str(samples)]
    command += [
        "--budgets",
        SIZES,
        "--policies",
        ",".join(POLICIES),
        "--no-return-kept-tokens",
        "--output",
        str(output),
    ]
    return subprocess.run([*command, *part.options, *rest], check=False, stdout=subprocess.DEVNULL).returncode


def main() -> None:
    """Run the parts that were chosen, and print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, help="directory of GGUF files")
    parser.add_argument("data", type=Path, help="directory of files with questions")
    parser.add_argument("--output", type=Path, default=Path("eval-real"))
    parser.add_argument("--parts", default=",".join(PARTS), help="parts to run, or none")
    parser.add_argument("--only", default="", help="only models whose name contains this")
    parser.add_argument("--samples", type=int, default=100, help="questions per task and place")
    parser.add_argument("--half", choices=("even", "odd", "all"), default="all", help="about which texts is asked")
    known, rest = parser.parse_known_args()
    chosen = [] if known.parts == "none" else known.parts.split(",")
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; allowed: {', '.join(PARTS)}")
    models = [path for path in sorted(known.models.glob("*.gguf")) if known.only in path.name]
    if "--sweep" in rest:
        parser.error("the tables have no swept settings; compare settings with snapstream eval --sweep")
    if not models:
        parser.error(f"no GGUF file in {known.models}")
    for name in chosen:
        for model in models:
            print(f"{name}: {model.stem}", file=sys.stderr)
            status = run(
                model, PARTS[name], known.data, known.output / model.stem / name, known.samples, known.half, rest
            )
            if status:
                sys.exit(status)
    written = sorted(known.output.glob("*/*/results.jsonl"))
    packed = [line for path in written for line in pack(path)]
    print(render(packed))
    if packed:
        write_packed(packed, known.output / "scores.jsonl")


if __name__ == "__main__":
    main()
