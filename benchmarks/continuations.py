"""How a real model continues a novel from smaller caches: perplexity of the book's text, and greedy continuations.

    python -m benchmarks.continuations --model smollm2

Each passage is a prompt and the tokens that follow it in the book. Every cache gets the same prompts, and each prompt
is prefilled once for all caches. The following tokens are forced, and their perplexity is measured while decoding from
the compressed cache. The first one is left out, because it comes from prefill and is the same for every cache. Then
each cache decodes greedily, and its tokens are compared with those of the full cache.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Sequence

from snapstream import LLM, CacheBudget, SamplingParams
from snapstream.engine import RequestOutput
from snapstream.evaluation.tasks.prose import paragraphs

FORCED, GREEDY = 256, 64
CONFIDENCE = 1.96


def caches(length: int) -> dict[str, CacheBudget | None]:
    """Budgets by name; ``None`` is a full cache."""
    found: dict[str, CacheBudget | None] = {"full": None}
    for share in (4, 8):
        for policy in ("mixed", "snapstream", "local-keydiff", "keydiff", "sage-kv", "streaming", "random"):
            found[f"{policy}, 1/{share}"] = CacheBudget.preset(policy, length // share)
    return found


def surprise(output: RequestOutput) -> float:
    """Mean negative log-probability of the forced tokens, in nats, without the first token."""
    return -statistics.fmean(step.logprob for step in (output.logprobs or ())[1:])


def agreed(one: Sequence[int], other: Sequence[int]) -> int:
    """Number of tokens before the first difference."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--lengths", default="1024,2048")
    parser.add_argument("--passages", type=int, default=30)
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    longest = max(lengths) + FORCED
    llm = LLM(arguments.model, max_model_len=longest, slots=13, prefix_cache=0, report_plan=lambda plan: None)
    book = llm.tokenizer.encode("\n".join(paragraphs()), add_special_tokens=False)
    print("| prompt | cache | perplexity | times the full cache's | greedy words before the first difference |")
    print("|---|---|---|---|---|")
    for length in lengths:
        rng, asked = random.Random(length), caches(length)
        nats: dict[str, list[float]] = {name: [] for name in asked}
        equal: dict[str, list[int]] = {name: [] for name in asked}
        for _ in range(arguments.passages):
            at = rng.randrange(len(book) - longest)
            prompt, following = book[at : at + length], tuple(book[at + length : at + length + FORCED])
            forced = [
                SamplingParams(max_tokens=FORCED, forced=following, logprobs=0, ignore_eos=True, kv_budget=budget)
                for budget in asked.values()
            ]
            for name, output in zip(asked, llm.generate([prompt] * len(asked), forced), strict=True):
                nats[name].append(surprise(output))
            free = [SamplingParams(max_tokens=GREEDY, ignore_eos=True, kv_budget=budget) for budget in asked.values()]
            outputs = dict(zip(asked, llm.generate([prompt] * len(asked), free), strict=True))
            for name, output in outputs.items():
                equal[name].append(agreed(output.token_ids, outputs["full"].token_ids))
        for name, values in nats.items():
            gaps = [value - whole for value, whole in zip(values, nats["full"], strict=True)]
            mean, half = statistics.fmean(gaps), CONFIDENCE * statistics.stdev(gaps) / math.sqrt(len(gaps))
            times = f"{math.exp(mean):.3f} ({math.exp(mean - half):.3f}-{math.exp(mean + half):.3f})"
            words = f"{statistics.median(equal[name]):g} of {GREEDY} ({min(equal[name])}-{max(equal[name])})"
            whole = name == "full"
            print(
                f"| {length} | {name} | {math.exp(statistics.fmean(values)):.2f} | {'' if whole else times} | "
                f"{'' if whole else words} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
