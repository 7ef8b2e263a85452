"""How long short requests wait while long prompts are being read: ``make bench-waiting MODEL=...``.

Long prompts come two at a time, and a short one every few seconds. All times are from when a request came.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time

from snapstream import LLM, SamplingParams


def run(llm: LLM, long: int, short: int, every: float, tokens: int) -> tuple[list[float], list[float]]:
    """Seconds to the first token of two long prompts, and of the short ones that came until both had theirs."""
    engine, rng = llm.engine, random.Random(0)
    vocabulary = engine.spec.vocab_size - 1000

    def prompt(length: int) -> list[int]:
        return [rng.randrange(100, vocabulary) for _ in range(length)]

    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    came: dict[str, float] = {}
    took: dict[str, float] = {}
    for number in range(2):
        came[f"long-{number}"] = time.perf_counter()
        engine.add_request(prompt(long), params, f"long-{number}")
    coming, shorts = time.perf_counter() + every / 2, 0
    while engine.busy:
        if time.perf_counter() >= coming and not {"long-0", "long-1"} <= set(took):
            came[f"short-{shorts}"] = coming  # steps may take longer than the time between two
            engine.add_request(prompt(short), params, f"short-{shorts}")
            shorts, coming = shorts + 1, coming + every
        for output in engine.step():
            if output.token_count and output.request_id not in took:
                took[output.request_id] = time.perf_counter() - came[output.request_id]
    return [took[f"long-{number}"] for number in range(2)], [took[f"short-{number}"] for number in range(shorts)]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint or a GGUF file")
    parser.add_argument("--long", type=int, default=12_000, help="tokens of long prompts")
    parser.add_argument("--short", type=int, default=200, help="tokens of short prompts")
    parser.add_argument("--every", type=float, default=3.0, help="seconds between short prompts")
    options = parser.parse_args()
    llm = LLM(options.model, budget=2048, max_model_len=options.long + 1000, slots=16, prefix_cache=0)
    alone = run(llm, options.long, options.short, 1e9, 32)[0]
    begin = time.perf_counter()
    llm.generate([list(range(100, 100 + options.short))], SamplingParams(max_tokens=1))
    short_alone = time.perf_counter() - begin
    long, short = run(llm, options.long, options.short, options.every, 32)
    print("| requests | number | median, s | longest, s | alone, s |\n|---|---|---|---|---|")
    for name, seconds, single in ((f"{options.short} tokens", short, short_alone), ("long, first", long[:1], alone[0])):
        print(f"| {name} | {len(seconds)} | {statistics.median(seconds):.2f} | {max(seconds):.2f} | {single:.2f} |")
    print(f"| long, second | 1 | {long[1]:.2f} | {long[1]:.2f} | {alone[1]:.2f} (behind the first) |")


if __name__ == "__main__":
    main()
