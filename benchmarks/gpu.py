"""The engine on a GPU: bandwidth, decode, the paper's tables 4 and 5, prefill, position, speculation, memory.

It needs torch, triton, transformers and safetensors, but neither a checkpoint nor a network: random weights in the
shape of Llama-3.1-8B are generated on the device. From a bare checkout::

    PYTHONPATH=src python -m benchmarks.gpu --json gpu.json                     # all parts
    PYTHONPATH=src python -m benchmarks.gpu --only decode,table5 --json gpu.json
    PYTHONPATH=src python -m benchmarks.gpu --weights q4_k --only decode,table5 --json q4.json  # blocks as stored
    PYTHONPATH=src python -m benchmarks.gpu --show gpu.json                     # as Markdown, for docs/gpu.md
    PYTHONPATH=src python -m benchmarks.gpu --device cpu --tiny                 # a dry run of all parts without a GPU

Parts write their results to the file as they run, and keep the results of other parts in it. Each part takes less than
ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from snapstream.config.engine import QUANTIZED
from snapstream.outputs import write_text


def main() -> int:
    arguments = _arguments()
    if arguments.show is not None:
        print(show(json.loads(arguments.show.read_text())))
        return 0
    if arguments.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

    import torch

    from benchmarks.gpu_model import DRY, FULL
    from benchmarks.gpu_parts import Bench

    device = torch.device(arguments.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("There is no CUDA device here; use --device cpu --tiny for a dry run without one.")
        return 2
    if device.type == "cpu" and not arguments.tiny:
        print("Without a GPU the full size would take days; give --tiny, too.")
        return 2
    bench = Bench(device, DRY if arguments.tiny else FULL, arguments.weights)
    found: dict[str, Any] = {}
    if arguments.json is not None and arguments.json.exists():
        found = json.loads(arguments.json.read_text())
    machine = _machine(device) | {"tiny": arguments.tiny, "weights": arguments.weights}
    if found.get("machine", machine) != machine:
        print(f"{arguments.json} is from {found['machine']}, not from {machine}; give another file.")
        return 2
    found["machine"] = machine
    failed = False
    for part in arguments.only:
        start, rows = time.perf_counter(), []
        found[part] = rows
        try:
            for row in getattr(bench, part)():
                rows.append(row)
                _write(found, arguments.json)
                print(json.dumps({part: row}), flush=True)
        except Exception as error:  # the next part may still work, unless the device has failed
            traceback.print_exc()
            rows.append({"error": f"{type(error).__name__}: {error}".splitlines()[0]})
            failed = True
        _write(found, arguments.json)
        if failed and device.type == "cuda" and not _still_works(torch):
            print("The device no longer works in this process; run the other parts with --only.")
            return 1
        print(f"# {part}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    print(show(found))
    return int(failed)


def show(found: dict[str, Any]) -> str:
    """Format the results as Markdown."""
    machine = found["machine"]
    lines = [f"{machine['device']}, torch {machine['torch']}, CUDA {machine['cuda']}, triton {machine['triton']}."]
    for part in PARTS:
        rows = found.get(part, [])
        errors = [row["error"] for row in rows if "error" in row]
        rows = [row for row in rows if "error" not in row]
        if rows or errors:
            lines += ["", *_TABLES[part](rows), *(f"Failed: {error}" for error in errors)]
    return "\n".join(lines)


def _bandwidth(rows: list[Any]) -> list[str]:
    return [f"Bandwidth of a copy, read and write: {row['bytes_per_second'] / 1e9:.0f} GB/s." for row in rows]


def _decode(rows: list[Any]) -> list[str]:
    lines = ["| slots | entries | valid | tokens/s | share of bandwidth | step, ms |", "|---|---|---|---|---|---|"]
    for row in rows:
        lines.append(
            f"| {row['slots']} | {row['entries']} | {row['valid']} | {row['tokens_per_second']:.0f} "
            f"| {row['share_of_bandwidth']:.2f} | {_spread(row['step_seconds'])} |"
        )
    return lines


def _entries(rows: list[Any]) -> list[str]:
    return _compared(rows, "int8", "int8/int4", "int4", ratio=lambda first, other: first / other)


def _compared(rows: list[Any], *others: str, ratio: Callable[[float, float], float]) -> list[str]:
    """Steps by their number of slots, beside a first kind of step."""
    lines = [f"| slots | a step, ms | {' | '.join(others)} |", "|---" * (2 + len(others)) + "|"]
    for row in rows:
        first, *more = row["step_seconds"].values()
        ratios = (f"{ratio(first['median'], each['median']):.2f}x" for each in more)
        lines.append(f"| {row['slots']} | {_spread(first)} | {' | '.join(ratios)} |")
    return lines


def _table5(rows: list[Any]) -> list[str]:
    lines = [
        "| length | cache | slots, full | slots | tokens/s, full | tokens/s | times as many |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        full, ours = row["full"], row["compressed"]
        lines.append(
            f"| {row['length']} | {row['cache']} | {full['slots']} | {ours['slots']} "
            f"| {full['tokens_per_second']:.0f} | {ours['tokens_per_second']:.0f} | {row['ratio']:.2f}x |"
        )
    return lines


def _table4(rows: list[Any]) -> list[str]:
    lines = []
    for row in rows:
        lines += [f"| a layer's prefill, {row['length']} tokens | ms | share |", "|---|---|---|"]
        parts = {name: each for name, each in row.items() if isinstance(each, dict)}
        lines += [f"| {name} | {p['seconds'] * 1e3:.2f} | {100 * p['share']:.1f} % |" for name, p in parts.items()]
    return lines


def _prefill(rows: list[Any]) -> list[str]:
    lines = ["| tokens | layers | ours, s | transformers, s | times as fast |", "|---|---|---|---|---|"]
    for row in rows:
        ours, theirs = (f"{row[name]:.3f}" for name in ("ours", "transformers"))
        lines.append(f"| {row['length']} | {row['layers']} | {ours} | {theirs} | {row['times_as_fast']:.2f}x |")
    return lines


def _widening(rows: list[Any]) -> list[str]:
    lines = ["| tokens | format | as stored, ms | widened, ms | times as fast |", "|---|---|---|---|---|"]
    for row in rows:
        times = f"{_spread(row['stored'])} | {_spread(row['widened'])} | {row['times_as_fast']:.2f}x"
        lines.append(f"| {row['tokens']} | {row['format']} | {times} |")
    return lines


def _position(rows: list[Any]) -> list[str]:
    lines = ["| position | compressed, ms | full, ms |", "|---|---|---|"]
    return lines + [f"| {r['position']} | {_spread(r['compressed'])} | {_spread(r['full'])} |" for r in rows]


def _speculation(rows: list[Any]) -> list[str]:
    return _compared(rows, "of 2 tokens", "of 4", "of 8", ratio=lambda first, other: other / first)


def _memory(rows: list[Any]) -> list[str]:
    lines = ["| tokens | slots | plan, GiB | peak, GiB | peak / plan |", "|---|---|---|---|---|"]
    for row in rows:
        peak = f"{row['peak'] / 2**30:.2f} | {row['peak_by_plan']:.3f}" if "peak" in row else "not measured |"
        lines.append(f"| {row['length']} | {row['slots']} | {row['plan'] / 2**30:.2f} | {peak} |")
    return lines


_TABLES = {
    "bandwidth": _bandwidth,
    "decode": _decode,
    "entries": _entries,
    "table5": _table5,
    "table4": _table4,
    "prefill": _prefill,
    "widening": _widening,
    "position": _position,
    "speculation": _speculation,
    "memory": _memory,
}
PARTS = tuple(_TABLES)


def _spread(seconds: dict[str, float]) -> str:
    return f"{seconds['median'] * 1e3:.2f} ({seconds['least'] * 1e3:.2f}-{seconds['most'] * 1e3:.2f})"


def _machine(device: Any) -> dict[str, Any]:
    import torch
    import transformers
    import triton

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"no GPU ({platform.machine()})"
    versions = {"torch": torch.__version__, "triton": triton.__version__, "transformers": transformers.__version__}
    return {"device": name, "cuda": torch.version.cuda, "python": platform.python_version()} | versions


def _still_works(torch: Any) -> bool:
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def _write(found: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        write_text(path, json.dumps(found, indent=1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"Parts, separated by commas: {', '.join(PARTS)}.")
    parser.add_argument("--json", type=Path, help="File to write to; results of other parts in it are kept.")
    parser.add_argument("--show", type=Path, metavar="FILE", help="Print such a file as Markdown; measure nothing.")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument(
        "--weights", default="bfloat16", choices=("bfloat16", *QUANTIZED), help="Format of the weights."
    )
    parser.add_argument("--tiny", action="store_true", help="A tiny model and short prompts, as a smoke test.")
    arguments = parser.parse_args()
    arguments.only = arguments.only.split(",")
    unknown = sorted(set(arguments.only) - set(PARTS))
    if unknown:
        parser.error(f"unknown part {', '.join(unknown)}; allowed: {', '.join(PARTS)}")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
