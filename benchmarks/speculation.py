"""Speculative decoding inside fixed caches: the cost of verification steps, and the speedup from draft tokens.

Contenders run alternately over several rounds in one process, and are reported as ratios with their spread. A model
with random weights does not copy from its prompt, so its output is forced. The model does the same work as for any
other token, and the forced text decides which draft tokens are accepted. Prints Markdown.

    python benchmarks/speculation.py                  # about half an hour on 2 cores
    python benchmarks/speculation.py --only step      # or: texts, acceptance, shipped, module
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from collections.abc import Callable, Sequence
from unittest import mock

import torch

from engine import interleaved, make_checkpoint, set_position
from limits import as_the_command_does
from ratios import show
from snapstream import LLM, CacheBudget, SamplingParams
from snapstream.assets import MLA_TASK_MODEL, TASK_MODEL
from snapstream.cache import CompressedSequence
from snapstream.engine.drafters import Drafter, PromptLookup
from snapstream.engine.drafters.draft_length import DraftLength
from snapstream.evaluation.tasks import TASKS, make_sample

SECTIONS = ("step", "texts", "acceptance", "shipped", "module")
CONTEXT, BUDGET, TOKENS = 16384, 4096, 256
BATCHES = (1, 4)
MOST = 7


class Known(Drafter):
    """Drafts the forced tokens, each correct with a given probability."""

    def __init__(self, share: float) -> None:
        self.share, self.random = share, random.Random(0)

    def guess(self, requests, most):
        made = []
        for request, many in zip(requests, most, strict=True):
            coming = request.params.forced[len(request.tokens) :][:many]
            made.append([token if self.random.random() < self.share else (token + 1) % 4096 for token in coming])
        return made


def make_engine(checkpoint: str, batch: int) -> LLM:
    return LLM(
        checkpoint,
        budget=CacheBudget.of(BUDGET),
        max_model_len=CONTEXT + 2 * TOKENS,
        slots=batch,
        sessions=batch,
        speculative="lookup",
        speculative_tokens=MOST,
        prefix_cache=0,
        report_plan=lambda _: None,
    )


def read_once(llm: LLM, tokens: Sequence[int]) -> CompressedSequence:
    """Prefill a prompt; returns the compressed cache that every round decodes from."""
    name = llm.engine.add_request(tokens, SamplingParams(max_tokens=0), keep=True)
    while True:
        for output in llm.engine.step():
            if output.request_id == name and output.finished:
                assert output.saved is not None
                return output.saved


def decode(llm: LLM, drafter: Drafter | None, pasts: Sequence[CompressedSequence], params: Sequence[SamplingParams]):
    """Outputs, and the decoding time in seconds, from the first token on."""
    engine = llm.engine
    engine.runner.drafter = drafter
    names = [engine.add_request([], one, past=past) for past, one in zip(pasts, params, strict=True)]
    outputs = {}
    while len(outputs) < len(names):
        outputs |= {output.request_id: output for output in engine.step()}
    start = time.perf_counter()
    while engine.busy:
        outputs |= {output.request_id: output for output in engine.step()}
    return [outputs[name] for name in names], time.perf_counter() - start


def bench_step(checkpoint: str, rounds: int) -> None:
    print(f"\n## A step of several tokens versus a step of one (cache of {BUDGET}, position {CONTEXT})\n")
    print("| batch | 2 tokens | 4 tokens | 8 tokens |\n|---|---|---|---|", flush=True)
    for batch in BATCHES:
        llm = make_engine(checkpoint, batch)
        slots = llm.engine.model_runner.decoder

        def verify(guesses: int, batch: int = batch, slots=slots) -> None:
            set_position(slots, CacheBudget.of(BUDGET), CONTEXT)
            for _ in range(8):
                slots.verify({slot: [1] * guesses for slot in range(batch)}, greedy=True)
            slots.position.tolist()  # synchronizes with the device

        def single(slots=slots) -> None:
            set_position(slots, CacheBudget.of(BUDGET), CONTEXT)
            for _ in range(8):
                slots.launch(1, greedy=True)
            slots.position.tolist()

        functions: dict[str, Callable[[], object]] = {"1": single}
        functions |= {str(n + 1): lambda n=n, verify=verify: verify(n) for n in (1, 3, 7)}
        times = interleaved(functions, rounds, warm_up=0.5)
        cells = (show([a / b for a, b in zip(times[n], times["1"], strict=True)], 2) for n in ("2", "4", "8"))
        print(f"| {batch} | " + " | ".join(f"{cell}x" for cell in cells) + " |", flush=True)


def compare(llm: LLM, drafters: dict[str, Drafter], pasts, params, rounds: int) -> dict[str, tuple[list[float], float]]:
    """Per drafter, the speedup over decoding without a drafter, and the share of draft tokens that were accepted."""
    speed: dict[str, list[float]] = {name: [] for name in drafters}
    share = {}
    for _ in range(rounds):
        plain, seconds = decode(llm, None, pasts, params)
        for name, drafter in drafters.items():
            outputs, mine = decode(llm, drafter, pasts, params)
            assert [one.token_ids for one in outputs] == [one.token_ids for one in plain]
            speed[name].append(seconds / mine)
            drafted = sum(one.drafted for one in outputs)
            share[name] = sum(one.accepted for one in outputs) / drafted if drafted else float("nan")
    return {name: (speed[name], share[name]) for name in drafters}


def bench_texts(checkpoint: str, rounds: int) -> None:
    print(f"\n## Prompt lookup: tokens per second, with / without (prompts of {CONTEXT}, cache of {BUDGET})\n")
    print("| batch | text | tokens per second | guesses that were right |\n|---|---|---|---|", flush=True)
    rng = random.Random(0)
    for batch in BATCHES:
        llm = make_engine(checkpoint, batch)
        prompts = [[rng.randrange(2, 4096) for _ in range(CONTEXT)] for _ in range(batch)]
        pasts = [read_once(llm, tokens) for tokens in prompts]
        copies, mixed = [], []
        for tokens in prompts:
            text: list[int] = []
            while len(text) < TOKENS:  # half of it passages of the prompt, half of it random tokens
                at = rng.randrange(CONTEXT - 64)
                text += [*tokens[at : at + 32], *(rng.randrange(2, 4096) for _ in range(32))]
            mixed.append(text[:TOKENS])
            at = rng.randrange(CONTEXT - TOKENS)
            copies.append(tokens[at : at + TOKENS])
        fresh = [[rng.randrange(2, 4096) for _ in range(TOKENS)] for _ in range(batch)]
        for name, texts in (("a copy of the prompt", copies), ("half of it a copy", mixed), ("random", fresh)):
            params = [SamplingParams(max_tokens=TOKENS, forced=tuple(text), ignore_eos=True) for text in texts]
            speed, share = compare(llm, {"lookup": PromptLookup()}, pasts, params, rounds)["lookup"]
            right = "none made" if share != share else f"{100 * share:.0f} %"
            print(f"| {batch} | {name} | {show(speed, 2)}x | {right} |", flush=True)


def bench_acceptance(checkpoint: str, rounds: int) -> None:
    print("\n## Tokens per second, with / without draft tokens, by the share of guesses that are right\n")
    print("The paper multiplies its throughput by 2.4 for guesses that are right in 80 % of all cases.\n")
    shares = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
    print("| batch | guesses | " + " | ".join(f"{100 * share:.0f} %" for share in shares) + " |")
    print("|---|---|" + "---|" * len(shares), flush=True)
    rng = random.Random(1)
    for batch in BATCHES:
        llm = make_engine(checkpoint, batch)
        prompts = [[rng.randrange(2, 4096) for _ in range(CONTEXT)] for _ in range(batch)]
        pasts = [read_once(llm, tokens) for tokens in prompts]
        params = [
            SamplingParams(max_tokens=TOKENS, forced=tuple(rng.randrange(4096) for _ in range(TOKENS)), ignore_eos=True)
            for _ in range(batch)
        ]
        for name in (2, 3, f"as many as pay, up to {MOST}"):
            always = mock.patch.object(DraftLength, "most", lambda pace, limit, cost, name=name: min(limit, name))
            with always if isinstance(name, int) else mock.MagicMock():
                found = compare(llm, {str(share): Known(share) for share in shares}, pasts, params, rounds)
            cells = (f"{show(found[str(share)][0], 2)}x" for share in shares)
            print(f"| {batch} | {name} | " + " | ".join(cells) + " |", flush=True)


def bench_shipped(rounds: int) -> None:
    print("\n## The shipped models on the lab's tasks, prompts of 2048, budget of a quarter of that\n")
    print(
        "| model | who guesses | task | tokens per second | guesses that were right |\n|---|---|---|---|---|",
        flush=True,
    )
    for model, speculative in ((TASK_MODEL, "lookup"), (MLA_TASK_MODEL, "lookup"), (MLA_TASK_MODEL, "mtp")):
        llm = LLM(str(model), budget=512, max_model_len=2560, slots=1, sessions=1, speculative=speculative,
                  report_plan=lambda _: None)  # fmt: skip
        encode, drafter = llm.tokenizer.encode, llm.engine.runner.drafter
        for name in ("needle", "multiquery", "kv", "qa", "tracking", "long-decode"):
            samples = [
                make_sample(TASKS[name], 2048, s, lambda text, encode=encode: len(encode(text))) for s in range(6)
            ]
            pasts = [read_once(llm, encode(sample.prompt + sample.lead)) for sample in samples]
            speeds, shares = [], []
            for past in pasts:
                params = [SamplingParams(max_tokens=128, ignore_eos=True)]
                speed, share = compare(llm, {speculative: drafter}, [past], params, rounds)[speculative]
                speeds += speed
                shares.append(share)
            known = [share for share in shares if share == share]
            right = f"{100 * sum(known) / len(known):.0f} %" if known else "none made"
            print(f"| {model.name} | {speculative} | {name} | {show(speeds, 2)}x | {right} |", flush=True)


def bench_module(samples: int = 40) -> None:
    print("\n## The shipped model's own next-token module, prompts of 2048, budget of a quarter of that\n")
    print("Share of guesses that were right, and tokens per step of the model.\n")
    print("| task | 1 guess | 2 guesses | 3 guesses |\n|---|---|---|---|", flush=True)
    llm = LLM(str(MLA_TASK_MODEL), budget=512, max_model_len=2560, slots=4, speculative="mtp", speculative_tokens=3,
              report_plan=lambda _: None)  # fmt: skip
    encode = llm.tokenizer.encode
    for name, task in TASKS.items():
        made = [make_sample(task, 2048, seed, lambda text: len(encode(text)), decode=256) for seed in range(samples)]
        prompts, cells, answers = [encode(sample.prompt + sample.lead) for sample in made], [], None
        for guesses in (1, 2, 3):
            always = mock.patch.object(
                DraftLength, "most", lambda pace, limit, cost, guesses=guesses: min(limit, guesses)
            )
            with always:
                outputs = llm.generate(prompts, SamplingParams(max_tokens=task.max_tokens))
            tokens = [output.token_ids for output in outputs]
            assert tokens == (answers := answers or tokens)
            drafted, accepted = (sum(getattr(output, what) for output in outputs) for what in ("drafted", "accepted"))
            decoded = sum(len(one) - 1 for one in tokens)  # the first comes with the prompt
            cells.append(f"{100 * accepted / drafted:.0f} %, {decoded / (decoded - accepted):.2f}")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


@torch.inference_mode()
def main() -> None:
    """Print the requested tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    wanted = options.only.split(",")
    with tempfile.TemporaryDirectory() as checkpoint:
        make_checkpoint(checkpoint)
        if "step" in wanted:
            bench_step(checkpoint, 2 * options.rounds)
        if "texts" in wanted:
            bench_texts(checkpoint, options.rounds)
        if "acceptance" in wanted:
            bench_acceptance(checkpoint, options.rounds)
    if "shipped" in wanted:
        bench_shipped(options.rounds)
    if "module" in wanted:
        bench_module()


if __name__ == "__main__":
    as_the_command_does()
    main()
