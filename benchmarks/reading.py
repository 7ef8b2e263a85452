"""Prefill and startup: time and memory of the process, optionally versus another checkout of this repository.

Each version runs in a separate process, mostly through `LLM.generate`. They are measured alternately, and ratios are of
consecutive measurements. Prints Markdown.

    python benchmarks/reading.py                          # this checkout
    git worktree add /tmp/before COMMIT                   # another one, which need not be built or installed
    python benchmarks/reading.py --against /tmp/before    # both
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine import Spread, make_checkpoint, ratio
from model import CONFIG
from process import Process

HERE = Path(__file__).resolve().parent
BUDGET, LONG = 4096, 16384


def start(source: Path, *arguments: str) -> Process:
    """Start one version in a separate process; it is idle until it is called."""
    command = [sys.executable, HERE / "reading_worker.py", *arguments]
    return Process(source.name, command, {"PYTHONPATH": str(source / "src")})


def ask_once(source: Path, what: str, *arguments: str) -> dict:
    """Make one measurement in a process that ends with it."""
    process = start(source, *arguments)
    found: dict = process.ask(what)
    process.close()
    return found


@contextmanager
def workers(sources: dict[str, Path], *arguments: str) -> Iterator[dict[str, Process]]:
    made: dict[str, Process] = {}
    try:
        for name, source in sources.items():
            made[name] = start(source, *arguments)
        yield made
    finally:
        for worker in made.values():
            worker.close()


def bench_times(sources: dict[str, Path], checkpoint: str, rounds: int) -> None:
    print("\n## Time: this checkout / the other, one request (below 1: this checkout is faster)\n")
    print("| what | time, ratio | s |\n|---|---|---|")
    with workers(sources, checkpoint, str(BUDGET), str(LONG + 512), "4") as both:
        jobs = [("prefill", 2048, rounds), ("prefill", LONG, max(3, rounds // 3)), ("decode", 1, rounds)]
        for kind, size, times in (*jobs, ("decode", 4, rounds)):
            measured: dict[str, list[float]] = {name: [] for name in both}
            for turn in range(times + 1):
                for name, worker in both.items():
                    seconds = worker.ask(kind, size)
                    if turn:
                        measured[name].append(seconds)
            beside = ratio(measured["this"], measured["other"]).show(3) if "other" in measured else ""
            label = f"prefill, {size} tokens" if kind == "prefill" else f"a decode step, batch {size}"
            print(f"| {label} | {beside} | {Spread(measured['this']).show(4)} |", flush=True)


def bench_memory(sources: dict[str, Path], checkpoint: str) -> None:
    print(f"\n## Memory: prefill of {LONG} tokens, cache of {BUDGET}, one slot; MiB\n")
    print("| | weights | slot | plan: reading | measured: beyond weights, slot and an empty process | peak / plan |")
    print("|---|---|---|---|---|---|")
    beyond: dict[str, list[float]] = {name: [] for name in sources}
    last: dict[str, dict] = {}
    for _ in range(5):  # the memory that an allocator retains varies between processes
        for name, source in sources.items():
            last[name] = ask_once(source, "memory", checkpoint, str(BUDGET), str(LONG + 64), "1")
            held = last[name]["peak"] - last[name]["empty"]
            beyond[name].append((held - last[name]["weights"] - last[name]["slots"]) / 2**20)
    for name, found in last.items():
        known = found["weights"] + found["slots"]
        cells = [f"{cell / 2**20:.1f}" for cell in (found["weights"], found["slots"], found["planned"])]
        shares = Spread([(known + 2**20 * one) / (known + found["planned"]) for one in beyond[name]])
        print(f"| {name} | {' | '.join(cells)} | {Spread(beyond[name]).show(0)} | {shares.show(2)} |", flush=True)
    if "other" in beyond:
        print(f"\nThis checkout takes {ratio(beyond['this'], beyond['other']).show(2)} times the memory of the other.")


def bench_start(sources: dict[str, Path]) -> None:
    print("\n## From importing the package to a ready engine, one slot: seconds, and MiB of the process\n")
    print(
        "| | 12 layers, s | 30 layers, s | 12 layers, MiB | of it weights, cache and staging |\n|---|---|---|---|---|"
    )
    with tempfile.TemporaryDirectory() as directory:
        for layers in (12, 30):
            make_checkpoint(f"{directory}/{layers}", num_hidden_layers=layers)
        for name, source in sources.items():
            found = {}
            for layers in (12, 30):
                arguments = (f"{directory}/{layers}", str(BUDGET), str(LONG + 64), "1")
                found[layers] = ask_once(source, "start", *arguments)
            cells = (f"{found[layers]['seconds']:.1f}" for layers in (12, 30))
            sizes = (f"{found[12][what] / 2**20:.0f}" for what in ("held", "planned"))
            print(f"| {name} | {' | '.join(cells)} | {' | '.join(sizes)} |", flush=True)


def bench_limit(sources: dict[str, Path]) -> None:
    """A deep, narrow model with a long prompt, in a process with limited memory."""
    length, layers = 32768, 32
    print(f"\n## {layers} layers, {length} tokens of prompt, cache of 1024, under a limit on the process (RLIMIT_AS)\n")
    print("| | limit: what an empty engine has, and MiB | what happens |\n|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
        make_checkpoint(directory, num_hidden_layers=layers, **shape)
        for name, source in sources.items():
            found = ask_once(source, "limit", directory, "1024", str(length + 64), "1")
            print(f"| {name} | {found['mebibytes']} | {found['said']} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--only", choices=("times", "memory", "start", "limit"), action="append")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    sources = {"this": HERE.parent}
    if options.against is not None:
        sources["other"] = options.against
    wanted = options.only or ("times", "memory", "start", "limit")
    with tempfile.TemporaryDirectory() as checkpoint:
        make_checkpoint(checkpoint)
        print(f"model: {CONFIG}")
        if "memory" in wanted:
            bench_memory(sources, checkpoint)
        if "limit" in wanted:
            bench_limit(sources)
        if "times" in wanted:
            bench_times(sources, checkpoint, options.rounds)
    if "start" in wanted:
        bench_start(sources)


if __name__ == "__main__":
    main()
