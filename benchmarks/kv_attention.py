"""Decode attention over entries of each type, on a CPU: time of a step's attention, relative to bfloat16.

    python -m benchmarks.kv_attention

There are so many layers that no cache stays in the processor's own memory between two steps. Types take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from snapstream.cache import EntryShape, EntryType, QuantizedType
from snapstream.kernels import cpu
from snapstream.kernels import operations as ops
from snapstream.kernels.buffers import BufferView, Slots, StepBuffers
from snapstream.kernels.cpu.program import CpuProgram

HEADS = {"Qwen2.5 1.5B": (12, 2, 128), "Llama 3 8B": (32, 8, 128), "SmolLM2 135M": (9, 3, 64)}
"""Query heads, KV heads and their size."""
BYTES = 300e6
"""Of all caches in bfloat16, at least."""


def types() -> dict[str, EntryType]:
    """The types of entries by name, the one that others are compared with first."""
    named = {name: QuantizedType.named(name, torch.bfloat16) for name in ("int8", "int8/int4", "int4")}
    return {"bfloat16": torch.bfloat16, **{name: kind for name, kind in named.items() if kind is not None}}


def program(entry_type: EntryType, heads: tuple[int, int, int], batch: int, entries: int, layers: int) -> CpuProgram:
    """The attention of all layers of a step, over random entries."""
    H, N, D = heads
    shape, caches = EntryShape(N, D, latent=False), []
    some = torch.randn(1, 64, N, D)
    for _ in range(layers):
        cache = shape.empty(batch, entries, entry_type=entry_type)
        if isinstance(entry_type, QuantizedType):
            cache.tensors[-1].fill_(1)
        for start in range(0, entries, 64):
            place = torch.arange(start, min(start + 64, entries)).expand(batch, -1)
            new = some[:, : place.shape[1]].expand(batch, -1, -1, -1).to(torch.bfloat16)
            cache.write(place, new, new)
        caches.append(cache)
    query, out = BufferView("query", D, H), BufferView("out", D, H)
    operations = [ops.Attend(query, out, layer, D**-0.5) for layer in range(layers)]
    buffers = {"query": torch.randn(batch, H * D).bfloat16(), "out": torch.zeros(batch, H * D).bfloat16()}
    slots = Slots.that_see(torch.full((batch,), entries), entries)
    return CpuProgram(operations, StepBuffers(buffers, slots, caches, [], torch.bfloat16))


def seconds(each: CpuProgram) -> float:
    """Time of one run."""
    start = time.perf_counter()
    each.run()
    return time.perf_counter() - start


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=4096)
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    assert cpu.available()
    names = list(types())
    print("| heads | batch | bfloat16, ms per layer | " + " | ".join(names[1:]) + " |")
    print("|---" * (len(names) + 2) + "|")
    for model, heads in HEADS.items():
        for batch in map(int, arguments.batches.split(",")):
            layers = max(2, int(BYTES / (batch * heads[1] * heads[2] * arguments.entries * 4)))
            runs = {name: program(kind, heads, batch, arguments.entries, layers) for name, kind in types().items()}
            taken: dict[str, list[float]] = {name: [] for name in runs}
            for number in range(arguments.rounds + 1):
                for name, run in runs.items():
                    took = seconds(run)
                    if number:
                        taken[name].append(took)
            cells = []
            for name in names[1:]:
                ratios = sorted(a / b for a, b in zip(taken["bfloat16"], taken[name], strict=True))
                low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
                cells.append(f"{statistics.median(ratios):.2f} ({low:.2f}-{high:.2f})x")
            base = statistics.median(taken["bfloat16"]) * 1000 / layers
            print(f"| {model} | {batch} | {base:.2f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
