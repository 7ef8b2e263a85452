"""Eviction versus a full cache in host memory whose pages are fetched on demand, with the same memory on the device.

    python -m benchmarks.offload --model smollm2 --tasks phone,phones,records --lengths 1024
    python -m benchmarks.offload --tasks multikey,multivalue,number,tracking --lengths 1024,4096

Everything runs through the same greedy loop over the same transformers model. Fetched entries are counted rather than
timed, because a CPU has no other memory to fetch from.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from benchmarks import host_pages
from benchmarks.transformers_model import decode, model_path, read
from snapstream import CacheBudget
from snapstream.evaluation.hosts import Prompts
from snapstream.evaluation.scoring import found_parts, interval, paired_difference
from snapstream.evaluation.tasks import TASKS, make_sample
from snapstream.integrations.transformers import SnapStreamCache

PAGES = "host pages"
BASELINE = "mixed"


def answers(models, tokens, sizes, policies, steps):
    """Greedy tokens of every contender, and the page counters, by name."""
    prompt, length = torch.tensor([tokens]), len(tokens)
    whole = DynamicCache()
    logits = read(models["sdpa"], prompt, whole)
    made, counted = {}, {}
    for share, entries in sizes.items():
        pages = counted[share] = host_pages.HostPages(entries)
        paged, cache = models[host_pages.ATTENTION], copy.deepcopy(whole)
        made[share, PAGES] = decode(paged, logits, cache, length, steps, host_pages=pages)
        for policy in policies:
            cache = SnapStreamCache(models["snapstream"].config, CacheBudget.preset(policy, entries))
            began = read(models["snapstream"], prompt, cache)
            made[share, policy] = decode(models["snapstream"], began, cache, length, steps)
    made["", "full"] = decode(models["sdpa"], logits, whole, length, steps)
    return {name: tokens[0].tolist() for name, tokens in made.items()}, counted


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="task-model")
    parser.add_argument("--tasks", default="multikey,multivalue,number,tracking")
    parser.add_argument("--lengths", default="1024,2048")
    parser.add_argument("--budgets", default="4,8", help="divisors: a budget of n is 1/n of the prompt")
    parser.add_argument("--samples", type=int, default=50, help="questions per task and length")
    parser.add_argument("--policies", default=f"streaming,snapstream,{BASELINE}", help=f"must include {BASELINE}")
    arguments = parser.parse_args()
    policies = arguments.policies.split(",")
    host_pages.register()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    parts_of = [int(part) for part in arguments.budgets.split(",")]
    marks, fetched = defaultdict(list), defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        path = model_path(arguments.model, Path(folder))
        models = {
            name: AutoModelForCausalLM.from_pretrained(path, attn_implementation=name, dtype=torch.float32).eval()
            for name in ("sdpa", "snapstream", host_pages.ATTENTION)
        }
        prompts = Prompts(AutoTokenizer.from_pretrained(path), chat=None)
        for task in (TASKS[name] for name in arguments.tasks.split(",")):
            for length in lengths:
                sizes = {f"1/{part}": length // part for part in parts_of}
                for seed in range(arguments.samples):
                    sample = make_sample(task, length - prompts.overhead, seed, prompts.count)
                    made, counted = answers(models, prompts.first(sample), sizes, policies, task.max_tokens)
                    for key, tokens in made.items():
                        ends = [at for at, token in enumerate(tokens) if token == prompts.tokenizer.eos_token_id]
                        text = prompts.tokenizer.decode(tokens[: min(ends, default=None)])
                        parts = found_parts(sample.parts, sample.rivals, text)
                        marks[(task.name, *key)].append(sum(parts) / len(parts))
                    for share, pages in counted.items():
                        heads = models["sdpa"].config.num_key_value_heads
                        fetched[task.name, share].append(pages.fetched / pages.steps / heads / sizes[share])
    columns = ["task", "of the prompt", "full", *policies, PAGES, f"pages minus {BASELINE}", "fetched per token"]
    print(f"| {' | '.join(columns)} |")
    print("|---" * len(columns) + "|")
    for task in arguments.tasks.split(","):
        for share in (f"1/{part}" for part in parts_of):
            cells = []
            for key in (("", "full"), *((share, name) for name in (*policies, PAGES))):
                found = marks[(task, *key)]
                low, high = interval(sum(found), len(found))
                cells.append(f"{100 * sum(found) / len(found):.0f} ({100 * low:.0f}-{100 * high:.0f})")
            pairs = zip(marks[task, share, PAGES], marks[task, share, BASELINE], strict=True)
            gap, low, high = (100 * value for value in paired_difference([pages - own for pages, own in pairs]))
            cells.append(f"{gap:+.0f} ({low:+.0f} to {high:+.0f})")
            cells.append(f"{100 * statistics.fmean(fetched[task, share]):.0f} %")
            print(f"| {task} | {share} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
