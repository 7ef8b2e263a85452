"""What the prefix cache saves in a conversation that is sent again with every turn: ``make bench-turns MODEL=...``.

It grows from 8,000 to 12,000 tokens in ten turns. Three engines get every turn, one after the other: one with a prefix
cache, one without, and one that has the full cache of the turn before, and reads the new part alone. Times are to the
first token.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

from snapstream import LLM, SamplingParams
from snapstream.engine import RequestOutput

TURNS, FIRST, LAST, ANSWER = 10, 8_000, 12_000, 64


def ask(llm: LLM, prompt: list[int], tokens: int, **options: Any) -> tuple[float, RequestOutput]:
    """Seconds to the first output, and the last output."""
    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    begin, seconds = time.perf_counter(), 0.0
    name = llm.engine.add_request(prompt, params, **options)
    while True:
        for output in llm.engine.step_for([name]):
            seconds = seconds or time.perf_counter() - begin
            if output.finished:
                assert output.error is None, output.error
                return seconds, output


def talk(engines: dict[str, LLM], seed: int, rows: list[dict[str, float]], equal: list[bool]) -> None:
    """One conversation."""
    rng, step = random.Random(seed), (LAST - FIRST) // (TURNS - 1)
    prompt = [rng.randrange(1000, 20_000) for _ in range(FIRST)]
    known, past = 0, None
    for turn in range(TURNS):
        row: dict[str, float] = {"turn": turn}
        order = rng.sample(["with", "without"], 2)
        outputs = {}
        for name in order:
            row[name], outputs[name] = ask(engines[name], list(prompt), ANSWER)
        equal.append(outputs["with"].token_ids == outputs["without"].token_ids)
        row["alone"], read = ask(engines["alone"], prompt[known:], 0, past=past, keep=True)
        known, past = len(prompt), read.saved
        row["reused"] = outputs["with"].reused
        rows.append(row)
        new = [rng.randrange(1000, 20_000) for _ in range(step - ANSWER)]
        prompt = [*prompt, *outputs["without"].token_ids, *new]


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f}-{max(values):.2f})"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint or a GGUF file")
    parser.add_argument("--conversations", type=int, default=2)
    options = parser.parse_args()
    common: dict[str, Any] = {"max_model_len": LAST + 1000, "slots": 1, "report_plan": lambda plan: None}
    engines = {
        "with": LLM(options.model, budget=2048, **common),
        "without": LLM(options.model, budget=2048, prefix_cache=0, **common),
        "alone": LLM(options.model, sessions=1, prefix_cache=0, **common),
    }
    for llm in engines.values():  # pages of memory, buffers of libraries
        llm.generate([list(range(1000, 1600))], SamplingParams(max_tokens=2))
    rows: list[dict[str, float]] = []
    equal: list[bool] = []
    for seed in range(options.conversations):
        talk(engines, seed, rows, equal)
    print("| turn | with the prefix cache, s | without, s | the new part alone, s | with / alone | without / with |")
    print("|---|---|---|---|---|---|")
    for name, wanted in (("first", [0]), (f"2 to {TURNS}", range(1, TURNS))):
        some = [row for row in rows if row["turn"] in wanted]
        cells = [spread([row[kind] for row in some]) for kind in ("with", "without", "alone")]
        cells += [spread([row["with"] / row["alone"] for row in some])]
        cells += [spread([row["without"] / row["with"] for row in some])]
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"\nequal answers: {sum(equal)} of {len(equal)}")


if __name__ == "__main__":
    main()
