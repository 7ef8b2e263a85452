"""What each cache policy keeps of the shipped retrieval model's answers. Prints Markdown.

One fact of each document is asked for; documents have seeds the model was never trained on, and facts lie anywhere in
them, so a window over the last quarter holds a quarter of the facts.

    python benchmarks/accuracy.py
"""

from __future__ import annotations

import argparse
import math

from snapstream import LLM, CacheBudget, SamplingParams
from snapstream.assets import RETRIEVAL_MODEL
from snapstream.evaluation.tasks.retrieval import make_document

POLICIES = ("full", "snapstream", "sage-kv", "streaming", "random")


def answers_right(llm: LLM, tokens: int, facts: int, samples: int) -> int:
    """How many of `samples` documents have their question answered exactly, stop included."""
    prompts, want = [], []
    for seed in range(samples):
        document = make_document(tokens, facts, seed=seed)
        fact = document.facts[seed % facts]
        prompts.append(document.prompt(fact.key))
        want.append(document.answer(fact.key))
    outputs = llm.generate(prompts, SamplingParams(max_tokens=8))
    return sum(o.text.strip() == w and o.finish_reason == "stop" for o, w in zip(outputs, want, strict=True))


def interval(right: int, samples: int) -> str:
    """Accuracy in percent with its 95 % Wilson interval."""
    z, p = 1.96, right / samples
    center = (p + z * z / (2 * samples)) / (1 + z * z / samples)
    half = z * math.sqrt(p * (1 - p) / samples + z * z / (4 * samples * samples)) / (1 + z * z / samples)
    return f"{100 * p:.0f} ({100 * max(0.0, center - half):.0f}-{100 * min(1.0, center + half):.0f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=str(RETRIEVAL_MODEL))
    parser.add_argument("--samples", type=int, default=100, help="documents per cell")
    parser.add_argument("--share", type=int, default=4, help="the cache is the document's length divided by this")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16000])
    options = parser.parse_args()
    print(f"| tokens | facts | {' | '.join(POLICIES)} |\n|---|---|{'---|' * len(POLICIES)}")
    for tokens in options.lengths:
        engines = {}
        for policy in POLICIES:
            budget = None if policy == "full" else CacheBudget.preset(policy, tokens // options.share)
            engines[policy] = LLM(
                options.model,
                budget=budget,
                max_model_len=tokens + 32,
                prefill_chunk=1024,
                enforce_eager=True,
                report_plan=lambda _: None,
            )
        for facts in (1, 8, 32):
            cells = [
                interval(answers_right(llm, tokens, facts, options.samples), options.samples)
                for llm in engines.values()
            ]
            print(f"| {tokens} | {facts} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
