"""vLLM's n-gram speculation with the plugin: steps and time with and without, and whether answers stay the same.

There are two kinds of text: the output of the task model after its task is done, which repeats a few words over and
over, and the output of a model with random weights, which hardly repeats itself. Engines with and without speculation
run in separate processes and are measured alternately. Prints Markdown.

    python -m benchmarks.vllm_speculation
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from typing import Any

from benchmarks.process import Process, serve, vllm_in_one_process
from benchmarks.ratios import show

PROMPT, TOKENS, SEQUENCES = 1000, 500, 8
TASKS = ("long-decode", "multiquery", "qa")
BUDGETS = {"all of it": 2048, "1/2": 500, "1/4": 250}
GUESSES = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


class Server:
    """One engine, and the measurement on it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(dtype="float32", skip_tokenizer_init=True, enable_prefix_caching=False, **settings)
        self.scheduler = self.llm.llm_engine.engine_core.engine_core.scheduler

    def answer(self, prompts: list[list[int]]) -> dict[str, Any]:
        """Tokens of every answer, seconds to decode them, and steps per token and sequence."""
        from vllm import SamplingParams

        engine = self.llm.llm_engine
        params = SamplingParams(max_tokens=TOKENS, temperature=0, ignore_eos=True, detokenize=False)
        for number, tokens in enumerate(prompts):
            engine.add_request(f"r{number}", {"prompt_token_ids": tokens}, params)
        requests = list(self.scheduler.requests.values())
        while not all(request.num_output_tokens for request in requests):
            engine.step()
        made: dict[int, list[int]] = {}
        at_start, steps = sum(request.num_output_tokens for request in requests), 0
        start = time.perf_counter()
        while engine.has_unfinished_requests():
            steps += len(self.scheduler.running)
            for output in engine.step():
                made[int(output.request_id.split("-")[0][1:])] = list(output.outputs[0].token_ids)
        seconds = time.perf_counter() - start
        answers = [made[number] for number in range(len(prompts))]
        return {"answers": answers, "seconds": seconds, "steps": steps / (len(prompts) * TOKENS - at_start)}


def engine(model: str, budget: int, *, guesses: bool) -> Process:
    settings: dict[str, Any] = {"model": model, "max_model_len": 2048, "max_num_seqs": SEQUENCES}
    settings["speculative_config"] = GUESSES if guesses else None
    environment = vllm_in_one_process(2) | {"SNAPSTREAM_BUDGET": str(budget)}
    name = "with speculation" if guesses else "without"
    return Process(name, [sys.executable, "-m", __spec__.name, "--serve", json.dumps(settings)], environment)


def task_prompts() -> dict[str, list[list[int]]]:
    """Prompts of the accuracy lab, by task."""
    from transformers import AutoTokenizer

    from snapstream.assets import TASK_MODEL
    from snapstream.evaluation.tasks import TASKS as ALL
    from snapstream.evaluation.tasks import make_sample

    tokenizer = AutoTokenizer.from_pretrained(TASK_MODEL)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text)["input_ids"])

    samples = {
        task: [make_sample(ALL[task], PROMPT, seed, lambda text: len(encode(text))) for seed in range(SEQUENCES)]
        for task in TASKS
    }
    return {f"task model, {task}": [encode(one.prompt) for one in some] for task, some in samples.items()}


def random_model(directory: str) -> dict[str, list[list[int]]]:
    """Save a model in the shape of the task model, with random weights; returns its prompts."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    from snapstream.assets import TASK_MODEL

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(TASK_MODEL)
    LlamaForCausalLM(config).save_pretrained(directory)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, config.vocab_size) for _ in range(PROMPT)] for _ in range(SEQUENCES)]
    return {"random weights": prompts}


def compare(model: str, texts: dict[str, list[list[int]]], rounds: int) -> None:
    """Print the rows of one model."""
    for name, budget in BUDGETS.items():
        engines = [engine(model, budget, guesses=guesses) for guesses in (False, True)]
        for text, prompts in texts.items():
            for one in engines:
                one.ask("answer", prompts)
            runs = [[one.ask("answer", prompts) for one in engines] for _ in range(rounds)]
            plain, ours = runs[-1]
            same = [
                next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), TOKENS)
                for a, b in zip(plain["answers"], ours["answers"], strict=True)
            ]
            faster = [a["seconds"] / b["seconds"] for a, b in runs]
            steps, alike = statistics.median(b["steps"] for _, b in runs), same.count(TOKENS)
            until = "" if alike == len(same) else f", others until token {min(same)} or later"
            print(f"| {text} | {name} | {steps:.2f} | {show(faster)}x | {alike} of {len(same)}{until} |", flush=True)
        for one in engines:
            one.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(Server(json.loads(arguments.serve)))
        return
    from snapstream.assets import TASK_MODEL

    print(
        f"\n## {SEQUENCES} sequences of {PROMPT} + {TOKENS} tokens\n\n"
        "| text | cache | steps per token | time of decoding, without / with | answers that stay the same |\n"
        "|---|---|---|---|---|"
    )
    compare(str(TASK_MODEL), task_prompts(), arguments.rounds)
    with tempfile.TemporaryDirectory() as directory:
        compare(directory, random_model(directory), arguments.rounds)


if __name__ == "__main__":
    main()
