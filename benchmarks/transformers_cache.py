"""The cache for transformers beside kvpress and DynamicCache: accuracy, decode speed, memory.

    python -m benchmarks.transformers_cache

Everything runs through the same greedy loop over the same model; only the cache (or the press) differs. Accuracy is
that of the shipped model on the lab's tasks, every contender on the same texts with the same number of entries. Speed
and memory are those of the benchmarks' larger model with random weights. Needs kvpress, which has an environment of its
own (``make bench-transformers``).
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
from kvpress import SnapKVPress, StreamingLLMPress
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM

from benchmarks.model import CONFIG
from snapstream import CacheBudget
from snapstream.assets import TASK_MODEL
from snapstream.evaluation.scoring import found_parts, interval
from snapstream.evaluation.tasks import TASKS, make_sample
from snapstream.integrations.transformers import SnapStreamCache

TASK_NAMES = ("needle", "multikey", "multiquery", "passkey", "number", "kv", "tracking")
CONTENDERS = ("full", "kvpress SnapKV", "kvpress SnapKV, window 32", "kvpress StreamingLLM", "snapstream", "streaming")


def contender(name, model, length, entries):
    """The cache to pass, and the context to read the prompt in."""
    if name in ("snapstream", "streaming"):
        budget = CacheBudget.preset(name, entries)
        return SnapStreamCache(model.config, budget), contextlib.nullcontext()
    ratio = 1 - entries / length
    presses = {
        "kvpress SnapKV": lambda: SnapKVPress(compression_ratio=ratio),
        "kvpress SnapKV, window 32": lambda: SnapKVPress(compression_ratio=ratio, window_size=32, kernel_size=7),
        "kvpress StreamingLLM": lambda: StreamingLLMPress(compression_ratio=ratio, n_sink=4),
    }
    return DynamicCache(), presses[name]()(model) if name in presses else contextlib.nullcontext()


def attention_of(name):
    return "snapstream" if name in ("snapstream", "streaming") else "sdpa"


@torch.no_grad()
def read(model, tokens, cache, context):
    """Read a prompt; returns the logits of its last token."""
    with context:  # kvpress looks for cache positions, which newer versions of transformers do not make any more
        positions = torch.arange(tokens.shape[1])
        out = model(tokens, past_key_values=cache, logits_to_keep=1, cache_position=positions)
    return out.logits[:, -1]


@torch.no_grad()
def decode(model, logits, cache, length, steps):
    """Decode greedily; positions are given, as a pressed DynamicCache does not know them."""
    made = [logits.argmax(-1)]
    for step in range(steps - 1):
        position = torch.full((len(logits), 1), length + step)
        out = model(made[-1][:, None], past_key_values=cache, position_ids=position)
        made.append(out.logits[:, -1].argmax(-1))
    return torch.stack(made, 1)


def bench_accuracy(lengths, shares, samples):
    """Right answers of the shipped model at equal numbers of entries."""
    tokenizer = AutoTokenizer.from_pretrained(TASK_MODEL)
    models = {
        name: AutoModelForCausalLM.from_pretrained(TASK_MODEL, attn_implementation=name)
        for name in ("sdpa", "snapstream")
    }

    def count(text):
        return len(tokenizer.encode(text))

    right = {}
    for task in TASK_NAMES:
        for length in lengths:
            for seed in range(samples):
                sample = make_sample(TASKS[task], length, seed, count)
                tokens = torch.tensor([tokenizer.encode(sample.prompt + sample.lead)])
                for share in shares:
                    for name in CONTENDERS:
                        model, size = models[attention_of(name)], tokens.shape[1]
                        cache, context = contender(name, model, size, int(length * share))
                        logits = read(model, tokens, cache, context)
                        made = decode(model, logits, cache, size, TASKS[task].max_tokens)[0].tolist()
                        end = made.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in made else len(made)
                        parts = found_parts(sample.parts, sample.rivals, tokenizer.decode(made[:end]))
                        right.setdefault((share, task, name), []).append(sum(parts) / len(parts))
    for share in shares:
        asked = samples * len(lengths)
        print(f"\nPercent right with {share:g} of the prompt's entries; 95 % intervals; {asked} questions each\n")
        print(f"| task | {' | '.join(CONTENDERS)} |")
        print(f"|---|{'---|' * len(CONTENDERS)}")
        for task in TASK_NAMES:
            cells = []
            for name in CONTENDERS:
                marks = right[share, task, name]
                low, high = interval(sum(marks), len(marks))
                cells.append(f"{100 * sum(marks) / len(marks):.0f} ({100 * low:.0f}-{100 * high:.0f})")
            print(f"| {task} | {' | '.join(cells)} |", flush=True)


def random_model(attention, dtype=torch.float32):
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(dtype).eval()
    model.set_attn_implementation(attention)
    return model


def bench_speed(context_length, entries, batch, rounds, steps):
    """Decode steps per second beside DynamicCache, in turn, in one process."""
    names = ["full", "kvpress SnapKV, window 32", "snapstream", "snapstream, compiled step"]
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
    """Peak and steady memory of one contender in this process, beyond the model's."""
    model = random_model(attention_of(name))
    tokens = torch.randint(3, CONFIG["vocab_size"], (1, context_length))
    read(model, tokens[:, :64], *contender("full", model, 64, 64))  # whatever libraries allocate at first

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
    """Each contender in a process of its own."""
    print(f"\nMemory beyond the model's, 1 x {context_length} tokens, {entries} entries\n")
    print("| | peak in prefill | steady state | of it cache |")
    print("|---|---|---|---|")
    for name in ("full", "kvpress SnapKV, window 32", "snapstream"):
        command = [sys.executable, "-m", "benchmarks.transformers_cache", "--memory-of", name]
        command += ["--context", str(context_length), "--entries", str(entries)]
        # Large blocks go back to the system when they are freed, so that what is resident is what is in use.
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
    parser.add_argument("--samples", type=int, default=25)
    parser.add_argument("--only", choices=["accuracy", "speed", "memory"])
    arguments = parser.parse_args()
    if arguments.memory_of:
        memory_of(arguments.memory_of, arguments.context, arguments.entries)
        return
    if arguments.only in (None, "memory"):
        bench_memory(arguments.context, arguments.entries)
    if arguments.only in (None, "speed"):
        for batch, share in ((1, 1), (4, 4)):
            bench_speed(arguments.context // share, arguments.entries // share, batch, rounds=7, steps=17)
    if arguments.only in (None, "accuracy"):
        bench_accuracy((1024, 2048, 4096), (0.25, 0.125), arguments.samples)


if __name__ == "__main__":
    main()
