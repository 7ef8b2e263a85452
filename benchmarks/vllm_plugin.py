"""The vLLM plugin versus stock vLLM: concurrent requests, decoding at 16k context, prefill.

Each engine runs in a separate process. They are measured alternately over several rounds, so that both see the same
machine load, and reported as ratios with their spread. Prints Markdown; `--json FILE` saves the raw numbers.

    python benchmarks/vllm_plugin.py               # everything
    python benchmarks/vllm_plugin.py --only pool   # or: decode, prefill
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from model import CONFIG
from process import Process, serve, vllm_in_one_process
from ratios import show
from snapstream.outputs import write_text

SECTIONS = ("pool", "decode", "prefill")
BUDGET = 4096
CONTEXT = 16384
# Prompts of 900 to 1500 tokens, about four times the budget. The small pool holds only a few of them, so the one in
# prefill takes a large share of it; in the larger pool it does not.
POOL_BUDGET, POOL_TOKENS, POOL_BLOCK_SIZE = 320, 100, 32
POOLS = ((160, 20), (640, 60))  # blocks, prompts


class Engine(Process):
    """vLLM in a separate process."""

    def __init__(self, name: str, model: str, budget: int | None, **settings: Any) -> None:
        environment = vllm_in_one_process(3) | {"SNAPSTREAM_BUDGET": "" if budget is None else str(budget)}
        super().__init__(
            name, [sys.executable, __file__, "--serve", json.dumps({"model": model, **settings})], environment
        )


class Server:
    """The other end of the process: one engine, and the measurements on it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(skip_tokenizer_init=True, disable_log_stats=True, enable_prefix_caching=False, **settings)
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.number = 0

    def _add(self, length: int, tokens: int, seed: int) -> None:
        from vllm import SamplingParams

        rng = random.Random(seed)
        prompt = [rng.randrange(3, CONFIG["vocab_size"]) for _ in range(length)]
        params = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        self.engine.add_request(f"r{self.number}", {"prompt_token_ids": prompt}, params)
        self.number += 1

    def pool(self, prompts: int) -> dict[str, float]:
        """Send many long prompts at once through a pool that is too small for them."""
        for index in range(prompts):
            self._add(900 + index * 7 % prompts * 600 // (prompts - 1), POOL_TOKENS, index)
        requests = list(self.scheduler.requests.values())
        running = steps = 0
        start = time.perf_counter()
        while self.engine.has_unfinished_requests():
            self.engine.step()
            running = max(running, len(self.scheduler.running))
            steps += 1
        seconds = time.perf_counter() - start
        preempted = sum(request.num_preemptions for request in requests)
        return {"running": running, "steps": steps, "preempted": preempted, "seconds": seconds}

    def fill(self, batch: int, context: int) -> int:
        """Prefill `batch` prompts; leaves their sequences in the middle of decoding."""
        for index in range(batch):
            self._add(context, 4000, index)
        requests = list(self.scheduler.requests.values())
        while any(request.num_output_tokens < 4 for request in requests):
            self.engine.step()
        return len(self.scheduler.running)

    def decode(self, steps: int) -> float:
        """Seconds per decode step of the sequences added by :meth:`fill`."""
        start = time.perf_counter()
        for _ in range(steps):
            self.engine.step()
        return (time.perf_counter() - start) / steps

    def clear(self) -> int:
        self.engine.abort_request(list(self.engine.output_processor.request_states), internal=True)
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return len(self.scheduler.running)

    def prefill(self, context: int, seed: int) -> float:
        """Seconds to prefill one prompt and generate one token."""
        self._add(context, 1, seed)
        start = time.perf_counter()
        while self.engine.has_unfinished_requests():
            self.engine.step()
        return time.perf_counter() - start


def pool(model: str, rounds: int) -> dict[str, Any]:
    print(
        f"\n## Prompts of 900 to 1500 tokens, {POOL_TOKENS} tokens each, budget {POOL_BUDGET}\n\n"
        f"| pool, blocks of {POOL_BLOCK_SIZE} | prompts | | at once | steps | preemptions | time, stock / this |\n"
        "|---|---|---|---|---|---|---|"
    )
    results = {}
    for blocks, prompts in POOLS:
        settings = {
            "dtype": "bfloat16",
            "max_model_len": 1792,
            "block_size": POOL_BLOCK_SIZE,
            "num_gpu_blocks_override": blocks,
            "max_num_batched_tokens": 2048,
        }
        engines = [Engine("stock", model, None, **settings), Engine("plugin", model, POOL_BUDGET, **settings)]
        measured: dict[str, list[dict[str, float]]] = {engine.name: [] for engine in engines}
        for engine in engines:
            engine.ask("prefill", context=1000, seed=0)
        for _ in range(rounds if prompts < 40 else min(rounds, 3)):
            for engine in engines:
                measured[engine.name].append(engine.ask("pool", prompts=prompts))
        for engine in engines:
            engine.close()
        for name, runs in measured.items():
            faster = [a["seconds"] / b["seconds"] for a, b in zip(measured["stock"], runs, strict=True)]
            first = runs[0]
            counts = f"{first['running']} | {first['steps']} | {first['preempted']}"
            print(f"| {blocks} | {prompts} | {name} | {counts} | {show(faster)}x |", flush=True)
        results[str(blocks)] = measured
    return results


def decode(model: str, rounds: int) -> dict[str, Any]:
    settings = {"dtype": "bfloat16", "max_model_len": CONTEXT + 4352, "max_num_seqs": 8, "max_num_batched_tokens": 2048}
    engines = [Engine("stock", model, None, **settings), Engine("plugin", model, BUDGET, **settings)]
    print(
        f"\n## Decode, {CONTEXT} tokens of context, budget {BUDGET}: time of a step, stock / plugin\n\n"
        "| batch | ratio |\n|---|---|"
    )
    measured: dict[str, Any] = {}
    for batch in (1, 4):
        times: dict[str, list[float]] = {engine.name: [] for engine in engines}
        for engine in engines:
            assert engine.ask("fill", batch=batch, context=CONTEXT) == batch
            engine.ask("decode", steps=10)
        for _ in range(rounds):
            for engine in engines:
                times[engine.name].append(engine.ask("decode", steps=40 // batch))
        for engine in engines:
            assert engine.ask("clear") == 0
        ratios = [a / b for a, b in zip(times["stock"], times["plugin"], strict=True)]
        print(f"| {batch} | {show(ratios)}x |", flush=True)
        measured[str(batch)] = times
    for engine in engines:
        engine.close()
    return measured


def prefill(model: str, rounds: int) -> dict[str, Any]:
    settings = {"dtype": "bfloat16", "max_model_len": CONTEXT + 64, "max_num_seqs": 2, "max_num_batched_tokens": 2048}
    engines = [Engine("stock", model, None, **settings), Engine("plugin", model, BUDGET, **settings)]
    times: dict[str, list[float]] = {engine.name: [] for engine in engines}
    for engine in engines:
        engine.ask("prefill", context=2048, seed=99)
    for seed in range(rounds):
        for engine in engines:
            times[engine.name].append(engine.ask("prefill", context=CONTEXT, seed=seed))
    for engine in engines:
        engine.close()
    ratios = [b / a for a, b in zip(times["stock"], times["plugin"], strict=True)]
    print(f"\n## Prefill of {CONTEXT} tokens and the first token: time, plugin / stock\n\n{show(ratios)}x")
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(Server(json.loads(arguments.serve)))
        return
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    results = {}
    with tempfile.TemporaryDirectory() as model:
        torch.manual_seed(0)
        LlamaForCausalLM(LlamaConfig(**CONFIG)).to(torch.bfloat16).save_pretrained(model)
        for section in (arguments.only,) if arguments.only else SECTIONS:
            rounds = arguments.rounds if section != "prefill" else min(arguments.rounds, 5)
            results[section] = globals()[section](model, rounds)
    if arguments.json:
        write_text(arguments.json, json.dumps(results))


if __name__ == "__main__":
    main()
