"""The cache for transformers versus kvpress and DynamicCache: decode speed and memory.

    python -m benchmarks.transformers_cache

Everything runs through the same greedy loop over the same model, the benchmarks' larger one with random weights; only
the cache (or the press) differs. Accuracy is measured in ``benchmarks/presses.py``. Needs kvpress, which is installed
in a separate environment (``make bench-transformers``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import time

import torch
from kvpress import SnapKVPress
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.model import CONFIG
from benchmarks.transformers_model import decode, read
from snapstream import CacheBudget
from snapstream.integrations.transformers import SnapStreamCache

PRESSED = "kvpress SnapKV, window 32"


def contender(name, model, length, entries):
    """The cache to pass, and the context manager for prefill."""
    if name == "snapstream":
        return SnapStreamCache(model.config, CacheBudget.preset(name, entries)), contextlib.nullcontext()
    if name == PRESSED:
        return DynamicCache(), SnapKVPress(1 - entries / length, window_size=32, kernel_size=7)(model)
    return DynamicCache(), contextlib.nullcontext()


def attention_of(name):
    return "snapstream" if name == "snapstream" else "sdpa"


def random_model(attention, dtype=torch.float32):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(dtype).eval()
    model.set_attn_implementation(attention)
    return model


def bench_speed(context_length, entries, batch, rounds, steps):
    """Decode steps per second versus DynamicCache, measured alternately in one process."""
    names = ["full", PRESSED, "snapstream", "snapstream, compiled step"]
    models = {name: random_model(name) for name in ("sdpa", "snapstream")}
    step = torch.compile(models["snapstream"], fullgraph=True, dynamic=False)
    tokens = torch.randint(3, CONFIG["vocab_size"], (batch, context_length))
    runs = {}
    for name in names:
        plain = name.removesuffix(", compiled step")
        model = models[attention_of(plain)]
        cache, pressed = contender(plain, model, context_length, entries)
        began = time.monotonic()
        logits = read(model, tokens, cache, pressed)
        runs[name] = (step if plain != name else model), logits, cache, time.monotonic() - began
        decode(*runs[name][:3], context_length, 3)
    seconds = {name: [] for name in names}
    at = context_length + 2
    for _ in range(rounds):
        for name in random.sample(names, len(names)):
            began = time.monotonic()
            decode(*runs[name][:3], at, steps)
            seconds[name].append((time.monotonic() - began) / (steps - 1))
        at += steps - 1
    print(
        f"\nDecode, {batch} x {context_length} tokens of context, {entries} entries, {rounds} rounds of {steps} steps\n"
    )
    print("| | steps per second / full | range | cache now | prefill time / full |")
    print("|---|---|---|---|---|")
    for name in names:
        ratios = [full / own for full, own in zip(seconds["full"], seconds[name], strict=True)]
        held = sum(t.nbytes for layer in runs[name][2].layers for t in (layer.keys, layer.values))
        print(
            f"| {name} | {statistics.median(ratios):.2f}x | {min(ratios):.2f}-{max(ratios):.2f} "
            f"| {held / 2**20:.0f} MiB | {runs[name][3] / runs['full'][3]:.2f} |",
            flush=True,
        )


def memory_of(name, context_length, entries):
    """Peak and steady memory of one contender in this process, without the model."""
    model = random_model(attention_of(name))
    tokens = torch.randint(3, CONFIG["vocab_size"], (1, context_length))
    read(model, tokens[:, :64], *contender("full", model, 64, 64))  # libraries allocate memory on first use

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    before = resident()
    cache, context = contender(name, model, context_length, entries)
    logits = read(model, tokens, cache, context)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    decode(model, logits, cache, context_length, 20)
    held = sum(t.untyped_storage().nbytes() for layer in cache.layers for t in (layer.keys, layer.values))
    print(json.dumps({"peak": peak, "cache": held, "resident": resident() - before}))


def bench_memory(context_length, entries):
    """Memory of each contender, in separate processes."""
    print(f"\nMemory beyond the model's, 1 x {context_length} tokens, {entries} entries\n")
    print("| | peak in prefill | steady state | of it cache |")
    print("|---|---|---|---|")
    for name in ("full", PRESSED, "snapstream"):
        command = [sys.executable, "-m", "benchmarks.transformers_cache", "--memory-of", name]
        command += ["--context", str(context_length), "--entries", str(entries)]
        # Freed large blocks are returned to the system, so that resident memory is memory in use.
        environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
        out = json.loads(done.stdout.splitlines()[-1])
        cells = " | ".join(f"{out[part] / 2**20:.0f} MiB" for part in ("peak", "resident", "cache"))
        print(f"| {name} | {cells} |", flush=True)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory-of")
    parser.add_argument("--context", type=int, default=16384)
    parser.add_argument("--entries", type=int, default=4096)
    parser.add_argument("--only", choices=["speed", "memory"])
    arguments = parser.parse_args()
    if arguments.memory_of:
        memory_of(arguments.memory_of, arguments.context, arguments.entries)
        return
    if arguments.only in (None, "memory"):
        bench_memory(arguments.context, arguments.entries)
    if arguments.only in (None, "speed"):
        for batch, share in ((1, 1), (4, 4)):
            bench_speed(arguments.context // share, arguments.entries // share, batch, rounds=7, steps=17)


if __name__ == "__main__":
    main()
