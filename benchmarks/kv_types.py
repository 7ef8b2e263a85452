"""What fewer bits per number of a cache cost: perplexity of a book's text, decoded from full caches.

    python -m benchmarks.kv_types MODEL --lengths 1024,4096 --passages 16

Every passage is a prompt and the tokens that follow it. Each type of entries gets the same passages. The following
tokens are forced. The first one is left out, because it comes from prefill and is the same for all.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics

from benchmarks.continuations import CONFIDENCE, FORCED, surprise
from snapstream import LLM, SamplingParams
from snapstream.evaluation.tasks.prose import paragraphs

TYPES = ("auto", "int8", "int8/int4", "int4")


def measured(model: str, kv_dtype: str, lengths: list[int], passages: int) -> dict[int, list[float]]:
    """Per length, the surprise of each passage."""
    longest = max(lengths) + FORCED
    llm = LLM(
        model,
        max_model_len=longest,
        slots=min(8, passages),
        kv_dtype=kv_dtype,
        prefix_cache=0,
        report_plan=lambda plan: None,
    )
    book = llm.tokenizer.encode("\n".join(paragraphs()), add_special_tokens=False)
    found = {}
    for length in lengths:
        rng = random.Random(length)
        starts = [rng.randrange(len(book) - longest) for _ in range(passages)]
        forced = [
            SamplingParams(
                max_tokens=FORCED,
                forced=tuple(book[at + length : at + length + FORCED]),
                logprobs=0,
                ignore_eos=True,
            )
            for at in starts
        ]
        outputs = llm.generate([book[at : at + length] for at in starts], forced)
        found[length] = [surprise(output) for output in outputs]
    llm.close()
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--lengths", default="1024,4096")
    parser.add_argument("--passages", type=int, default=16, help="two or more")
    parser.add_argument("--types", default=",".join(TYPES))
    arguments = parser.parse_args()
    lengths = [int(length) for length in arguments.lengths.split(",")]
    first, *others = arguments.types.split(",")
    base = measured(arguments.model, first, lengths, arguments.passages)
    print(f"| prompt | entries | perplexity | times that of {first} |")
    print("|---|---|---|---|")
    for length in lengths:
        print(f"| {length} | {first} | {math.exp(statistics.fmean(base[length])):.3f} | 1 |", flush=True)
    for kv_dtype in others:
        own = measured(arguments.model, kv_dtype, lengths, arguments.passages)
        for length in lengths:
            gaps = [mine - theirs for mine, theirs in zip(own[length], base[length], strict=True)]
            mean, half = statistics.fmean(gaps), CONFIDENCE * statistics.stdev(gaps) / math.sqrt(len(gaps))
            times = f"{math.exp(mean):.4f} ({math.exp(mean - half):.4f}-{math.exp(mean + half):.4f})"
            print(f"| {length} | {kv_dtype} | {math.exp(statistics.fmean(own[length])):.3f} | {times} |", flush=True)


if __name__ == "__main__":
    main()
