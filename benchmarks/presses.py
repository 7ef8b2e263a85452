"""Policies versus kvpress' presses: accuracy on the same questions, with the same number of entries.

    python -m benchmarks.presses
    python -m benchmarks.presses --model smollm2 --tasks phone,phones,room --lengths 1024

Everything runs through the same greedy loop over the same transformers model; only the cache (or the press) differs.
Each question is asked twice: once it is prefilled together with the text, before the cache is compressed; once it comes
afterwards, as for a stored context. Needs kvpress, which is installed in a separate environment (``make
bench-presses``).
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import random
import statistics
import tempfile
import time
import types
from collections import defaultdict
from pathlib import Path

import torch
from kvpress import CompactorPress, KeyDiffPress, KVzipPress, LagKVPress, SnapKVPress, StreamingLLMPress
from kvpress.presses import kvzip_press
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks.transformers_model import decode, model_path, read
from snapstream import CacheBudget
from snapstream.evaluation.hosts import Prompts
from snapstream.evaluation.scoring import found_parts, interval, paired_difference
from snapstream.evaluation.tasks import TASKS
from snapstream.integrations.transformers import SnapStreamCache


class KVzipPerHead(KVzipPress):
    """KVzip's scores with the same number of entries for every KV head, as in caches of a single shape."""

    def compress_post(self, model: torch.nn.Module) -> None:
        """Mask the lowest scores of every head."""
        for layer, scores in zip(model.model.layers, self.score_val, strict=True):
            dropped = scores.topk(int(scores.shape[-1] * self.compression_ratio), largest=False).indices
            rows, heads, _ = torch.ones_like(dropped).nonzero(as_tuple=True)
            layer.self_attn.masked_key_indices = (rows, heads, dropped.flatten())


PRESSES = {
    "kvpress SnapKV": SnapKVPress,
    "kvpress SnapKV of 32": lambda ratio: SnapKVPress(ratio, window_size=32, kernel_size=7),
    "kvpress StreamingLLM": lambda ratio: StreamingLLMPress(ratio, n_sink=4),
    "kvpress KeyDiff": KeyDiffPress,
    "kvpress LagKV": LagKVPress,
    "kvpress Compactor": CompactorPress,
    "kvpress KVzip": lambda ratio: KVzipPress(ratio, layerwise=True),
    "kvpress KVzip per head": KVzipPerHead,
}
POLICIES = ("streaming", "snapstream", "keydiff", "local-keydiff", "multiscale-keydiff", "mixed")
CONTENDERS = ("full", *PRESSES, *POLICIES)
BASELINE = "mixed"
"""The contender that all others are compared with, question by question."""


def give_tokenizer(tokenizer) -> None:
    """Give KVzip the tokenizer, which it would load for every prompt: that is not part of the method."""
    kvzip_press.AutoTokenizer = types.SimpleNamespace(from_pretrained=lambda _: tokenizer)


def split(prompts: Prompts, text: str, ask: str, lead: str) -> tuple[list[int], list[int]]:
    """Tokens before the question, and tokens from the question up to the answer."""
    whole = text + ask + lead
    if prompts.chat:
        user = {"role": "user", "content": text + ask}
        whole = prompts.tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
        whole += lead.lstrip()
    at = whole.rindex(ask)
    special = not prompts.chat
    return (
        prompts.tokenizer.encode(whole[:at], add_special_tokens=special),
        prompts.tokenizer.encode(whole[at:], add_special_tokens=False),
    )


@torch.no_grad()
def answer(models, name, first, then, entries, steps):
    """Greedy tokens after ``then``, which follows once ``first`` is compressed, and the seconds of prefill."""
    model = models["snapstream" if name in POLICIES else "sdpa"]
    cache, context = DynamicCache(), contextlib.nullcontext()
    if name in POLICIES:
        cache = SnapStreamCache(model.config, CacheBudget.preset(name, entries))
    elif name in PRESSES:
        context = PRESSES[name](1 - entries / len(first))(model)
    began = time.perf_counter()
    logits = read(model, torch.tensor([first]), cache, context)
    seconds = time.perf_counter() - began
    for at, token in enumerate(then, len(first)):
        logits = model(torch.tensor([[token]]), past_key_values=cache, position_ids=torch.tensor([[at]])).logits[:, -1]
    return decode(model, logits, cache, len(first) + len(then), steps)[0].tolist(), seconds


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="task-model")
    parser.add_argument("--tasks", default="needle,multikey,multiquery,passkey,number,kv,tracking")
    parser.add_argument("--lengths", default="1024,2048")
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--samples", type=int, default=50, help="questions per task and length")
    parser.add_argument("--contenders", default=",".join(CONTENDERS), help=f"must include full and {BASELINE}")
    parser.add_argument("--when", default="with,after", help="when the question comes: with the text, or after it")
    arguments = parser.parse_args()
    contenders = arguments.contenders.split(",")
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        path = model_path(arguments.model, Path(folder))
        models = {
            name: AutoModelForCausalLM.from_pretrained(path, attn_implementation=name, dtype=torch.float32).eval()
            for name in ("sdpa", "snapstream")
        }
        prompts = Prompts(AutoTokenizer.from_pretrained(path), chat=None)
        give_tokenizer(prompts.tokenizer)
        lengths, times = [int(length) for length in arguments.lengths.split(",")], arguments.when.split(",")
        right, seconds = defaultdict(list), defaultdict(list)
        for task in (TASKS[name] for name in arguments.tasks.split(",")):
            for length in lengths:
                for seed in range(arguments.samples):
                    rng = random.Random(f"{task.name}/{length}/{seed}")
                    made = task.build(rng, length - prompts.overhead, prompts.count, None)
                    asked = made.questions[0]
                    first, then = split(prompts, made.text, asked.ask, asked.lead)
                    for when in times:
                        before, after = (first + then, []) if when == "with" else (first, then)
                        for name in random.sample(contenders, len(contenders)):
                            entries = int(length * arguments.share)
                            tokens, took = answer(models, name, before, after, entries, task.max_tokens)
                            ends = [at for at, token in enumerate(tokens) if token == prompts.tokenizer.eos_token_id]
                            text = prompts.tokenizer.decode(tokens[: min(ends, default=None)])
                            parts = found_parts(asked.parts, asked.rivals, text)
                            right[when, task.name, name].append(sum(parts) / len(parts))
                            seconds[when, length, name].append(took)
        for when in times:
            print_table(right, seconds, when, arguments)


def print_table(right, seconds, when, arguments) -> None:
    """Print percent correct by contender and task, the difference to ``BASELINE``, and the time of prefill."""
    names, lengths = arguments.tasks.split(","), arguments.lengths.split(",")
    print(f"\nThe question comes {when} the text; {arguments.share:g} of the entries; {arguments.lengths} tokens\n")
    columns = [*names, f"all, minus {BASELINE}", *(f"reading {length}, times full's" for length in lengths)]
    print(f"| | {' | '.join(columns)} |")
    print(f"|---|{'---|' * len(columns)}")
    for name in arguments.contenders.split(","):
        cells, gaps = [], []
        for task in names:
            marks = right[when, task, name]
            low, high = interval(sum(marks), len(marks))
            cells.append(f"{100 * sum(marks) / len(marks):.0f} ({100 * low:.0f}-{100 * high:.0f})")
            gaps += [one - base for one, base in zip(marks, right[when, task, BASELINE], strict=True)]
        gap, low, high = (100 * value for value in paired_difference(gaps))
        cells.append("" if name == BASELINE else f"{gap:+.0f} ({low:+.0f} to {high:+.0f})")
        for length in lengths:
            pairs = zip(seconds[when, int(length), name], seconds[when, int(length), "full"], strict=True)
            cells.append(f"{statistics.median(own / full for own, full in pairs):.2f}")
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
