"""Structured answers: whether they fit their schemas, and how fast they are decoded.

    python -m benchmarks.structured MODEL [--answers 500]

Answers: random schemas (``benchmarks/schemas.py``), half greedy and half at temperature 1, after prompts that are
compressed to a quarter. Speed: tokens per second of one and of four sequences, free and with a schema, in turn; and of
three free sequences beside one with a schema.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Sequence

import jsonschema

from benchmarks.schemas import random_schema
from snapstream import LLM, SamplingParams
from snapstream.assets import PROSE
from snapstream.config import StructuredOutputs

CITY = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 60},
        "population": {"type": "integer"},
        "country": {"type": "string", "maxLength": 40},
        "capital": {"type": "boolean"},
    },
    "required": ["name", "population", "country", "capital"],
    "additionalProperties": False,
}
CITIES = {"type": "array", "minItems": 60, "items": CITY}
TOKENS = 160


def check_answers(llm: LLM, number: int, budget: int) -> None:
    """Generate answers to random schemas, and print how many fit."""
    text, chooser = PROSE.read_text(encoding="utf-8"), random.Random(0)
    schemas = [random_schema(random.Random(seed)) for seed in range(number)]
    prompts, params = [], []
    for seed, schema in enumerate(schemas):
        start = chooser.randrange(len(text) - 4 * budget * 4)
        question = f"{text[start : start + 4 * budget * 4]}\n\nAnswer in JSON, by this schema: {json.dumps(schema)}"
        prompts.append(llm.chat_prompt([{"role": "user", "content": question}]))
        shape = StructuredOutputs(json=schema)
        params.append(SamplingParams(max_tokens=1500, temperature=seed % 2, seed=seed, structured_outputs=shape))
    began = time.monotonic()
    outputs = llm.generate(prompts, params)
    wrong = 0
    for schema, output in zip(schemas, outputs, strict=True):
        try:
            jsonschema.validate(json.loads(output.text), schema)
        except (ValueError, jsonschema.ValidationError) as error:
            wrong += 1
            print(f"WRONG: {output.finish_reason} {output.text[:200]!r} {json.dumps(schema)[:200]} {str(error)[:100]}")
    dropped = sum(output.cache.dropped > 0 for output in outputs if output.cache)
    tokens = sum(output.token_count for output in outputs)
    print(
        f"{number - wrong} of {number} answers fit their schemas; {dropped} prompts were compressed; {tokens} tokens "
        f"in {time.monotonic() - began:.0f} s"
    )


def rate(llm: LLM, params: Sequence[SamplingParams], counted: int) -> float:
    """Tokens per second and sequence of the first ``counted`` ones, from when all are decoded."""
    asked = "List 60 cities as a JSON array, without any other text. An example of one: "
    examples = (
        json.dumps({"name": name, "population": 1000, "country": "Utopia", "capital": False}) for name in "ABCD"
    )
    prompts = [llm.chat_prompt([{"role": "user", "content": asked + example}]) for example in examples]
    names = [llm.engine.add_request(prompt, each) for prompt, each in zip(prompts, params, strict=False)]
    first, last = {}, {}
    while len(last) < len(names):
        for output in llm.engine.step():
            now = time.perf_counter()
            first.setdefault(output.request_id, (now, output.token_count))
            if output.finished:
                last[output.request_id] = (now, output.token_count)
    start = max(first[name][0] for name in names)
    ratios = [(last[name][1] - first[name][1]) / (last[name][0] - start) for name in names[:counted]]
    return statistics.fmean(ratios)


def compare_speed(llm: LLM, rounds: int) -> None:
    """Print speeds with and without a schema, measured in turn."""
    free = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    shaped = SamplingParams(max_tokens=TOKENS, ignore_eos=True, structured_outputs=StructuredOutputs(json=CITIES))
    cases = {
        "1 sequence": ([free], [shaped], 1),
        "4 sequences": ([free] * 4, [shaped] * 4, 4),
        "3 free ones beside 1 with a schema": ([free] * 4, [free] * 3 + [shaped], 3),
    }
    rate(llm, [shaped], 1)
    print("| | tokens/s, free | with a schema | ratio |\n|---|---|---|---|")
    for name, (plain, other, counted) in cases.items():
        pairs = [(rate(llm, plain, counted), rate(llm, other, counted)) for _ in range(rounds)]
        ratios = sorted(second / first for first, second in pairs)
        means = [statistics.median(column) for column in zip(*pairs, strict=True)]
        print(
            f"| {name} | {means[0]:.1f} | {means[1]:.1f} | {statistics.median(ratios):.2f} "
            f"({ratios[0]:.2f}-{ratios[-1]:.2f}) |"
        )


def main() -> None:
    """Run both parts for one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--answers", type=int, default=500, help="number of answers to check; 0 skips this part")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the comparison; 0 skips it")
    parser.add_argument("--budget", type=int, default=256)
    arguments = parser.parse_args()
    for speculative in ("off", "lookup"):
        llm = LLM(
            arguments.model,
            budget=arguments.budget,
            max_model_len=4096,
            slots=4,
            prefix_cache=0,
            speculative=speculative,
        )
        if arguments.rounds:
            print(f"\nspeculative: {speculative}")
            compare_speed(llm, arguments.rounds)
        if arguments.answers and speculative == "off":
            check_answers(llm, arguments.answers, arguments.budget)


if __name__ == "__main__":
    main()
