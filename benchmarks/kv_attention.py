"""Decode attention over entries of each type: time of a step's attention, relative to bfloat16.

    python -m benchmarks.kv_attention
    python -m benchmarks.kv_attention --device cuda --batches 1,4,8,64

There are so many layers that no cache stays in the processor's own memory between two steps. Types take turns. On CUDA,
the attention of all layers is one captured graph.
"""

from __future__ import annotations

import argparse
import statistics

import torch

from benchmarks.gpu_model import Clock
from snapstream.attention import choose_backend
from snapstream.attention.sdpa import SdpaAttention
from snapstream.cache import EntryShape, EntryType, QuantizedType
from snapstream.engine.decode.graphs import StaticGraph
from snapstream.kernels import operations as ops
from snapstream.kernels.buffers import BufferView, Slots, StepBuffers

HEADS = {"Qwen2.5 1.5B": (12, 2, 128), "Llama 3 8B": (32, 8, 128), "SmolLM2 135M": (9, 3, 64)}
"""Query heads, KV heads and their size."""
BYTES = {"cpu": 300e6, "cuda": 600e6}
"""Of all caches in bfloat16, at least."""


def types() -> dict[str, EntryType]:
    """The types of entries by name, the one that others are compared with first."""
    named = {name: QuantizedType.named(name, torch.bfloat16) for name in ("int8", "int8/int4", "int4")}
    return {"bfloat16": torch.bfloat16, **{name: kind for name, kind in named.items() if kind is not None}}


def attention(
    entry_type: EntryType, heads: tuple[int, int, int], batch: int, entries: int, layers: int, device: torch.device
) -> StaticGraph:
    """The attention of all layers of a step, over random entries."""
    H, N, D = heads
    shape, caches = EntryShape(N, D, latent=False), []
    some = torch.randn(1, 64, N, D, device=device).to(torch.bfloat16)
    for _ in range(layers):
        cache = shape.empty(batch, entries, entry_type=entry_type, device=device)
        if isinstance(entry_type, QuantizedType):
            cache.tensors[-1].fill_(1)
        for start in range(0, entries, 64):
            place = torch.arange(start, min(start + 64, entries), device=device).expand(batch, -1)
            new = some[:, : place.shape[1]].expand(batch, -1, -1, -1)
            cache.write(place, new, new)
        caches.append(cache)
    query, out = BufferView("query", D, H), BufferView("out", D, H)
    operations = [ops.Attend(query, out, layer, D**-0.5) for layer in range(layers)]
    buffers = {name: torch.randn(batch, H * D, device=device).bfloat16() for name in ("query", "out")}
    slots = Slots.that_see(torch.full((batch,), entries, device=device), entries)
    backend = choose_backend("auto", device, torch.bfloat16, D, D)
    assert not isinstance(backend, SdpaAttention), "there are no kernels here"
    program = backend.program(operations, StepBuffers(buffers, slots, caches, [], torch.bfloat16))
    graph = StaticGraph(program.run, device, captured=True)
    graph.warm_up()
    return graph


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--entries", type=int, default=4096)
    parser.add_argument("--batches", default="1,4,8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--device", default="cpu", choices=BYTES)
    arguments = parser.parse_args()
    device, names = torch.device(arguments.device), list(types())
    clock = Clock(device, arguments.rounds)
    print("| heads | batch | bfloat16, ms per layer | " + " | ".join(names[1:]) + " |")
    print("|---" * (len(names) + 2) + "|")
    for model, heads in HEADS.items():
        for batch in map(int, arguments.batches.split(",")):
            of_layer = batch * heads[1] * heads[2] * arguments.entries * 4
            layers = max(2, int(BYTES[arguments.device] / of_layer))
            given = heads, batch, arguments.entries, layers, device
            runs = {name: attention(kind, *given) for name, kind in types().items()}
            taken: dict[str, list[float]] = {name: [] for name in runs}
            for number in range(arguments.rounds + 1):
                for name, run in runs.items():
                    took = clock.once(run)
                    if number:
                        taken[name].append(took)
            cells = []
            for name in names[1:]:
                ratios = sorted(a / b for a, b in zip(taken["bfloat16"], taken[name], strict=True))
                low, high = ratios[len(ratios) // 10], ratios[-1 - len(ratios) // 10]
                cells.append(f"{statistics.median(ratios):.2f} ({low:.2f}-{high:.2f})x")
            base = statistics.median(taken["bfloat16"]) * 1e3 / layers
            print(f"| {model} | {batch} | {base:.3f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
