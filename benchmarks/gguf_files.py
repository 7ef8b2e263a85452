"""GGUF files in the built-in engine and in llama.cpp: the same file, the same prompts, two threads each.

Each engine runs in a separate process and environment (`make bench-gguf` creates them). Both are measured in turn over
several rounds. Prints Markdown: ratios to llama.cpp with their spread; `--json FILE` saves the raw numbers.

    python benchmarks/gguf_files.py FILE.gguf ...                  # everything; half an hour to an hour per file
    python benchmarks/gguf_files.py FILE.gguf --only read decode   # or: start, floor, answers
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from limits import MemoryReader
from peers import Engine, beside
from ratios import show
from snapstream import LLM, SamplingParams
from snapstream.assets import PROSE
from snapstream.engine.settings import load_tokenizer
from snapstream.models.weights import load_spec
from snapstream.outputs import write_text

BUDGET, TOGETHER, ROOM = 2048, 4, 600
LENGTHS = (128, 512, 2048)
LONGEST = 8192
SECTIONS = ("start", "read", "decode", "floor", "answers")
QUESTIONS = (
    "Write a Python function that returns the n-th Fibonacci number.",
    "What is the difference between a process and a thread?",
    "Translate to French: The cat sleeps on the warm roof.",
    "List the planets of the solar system in order.",
    "Write a SQL query that counts the orders of every customer.",
    "Explain in two sentences why the sky is blue.",
    "What is 17 times 23? Show your steps.",
    "Write a haiku about rain.",
    "How do I reverse a linked list in C?",
    "Summarize the plot of Alice's Adventures in Wonderland.",
)


def prose(path: str, length: int, skip: int = 0) -> list[int]:
    """Tokens of a book."""
    tokens: list[int] = load_tokenizer(path).encode(PROSE.read_text())
    while len(tokens) < skip + length:
        tokens += tokens
    return tokens[skip : skip + length]


def longest(path: str) -> int:
    """Tokens of the longest prompt: 8,192, or what the model has positions for."""
    return min(LONGEST, (load_spec(Path(path)).max_position - ROOM) // 1024 * 1024)


def start(path: str, rounds: int) -> dict[str, Any]:
    """Seconds from the start of the process until the engine is ready, and its memory then; one slot."""
    print("\n### Start, with one slot of 2,048\n\n| | seconds | process, MiB |\n|---|---|---|")
    found: dict[str, list[tuple[float, float]]] = {"snapstream": [], "llama.cpp": []}
    for _ in range(rounds):
        for name, each in found.items():
            begin = time.perf_counter()
            engine = Engine(name, path, BUDGET, 1, BUDGET if name == "snapstream" else None)
            each.append((time.perf_counter() - begin, engine.ask("memory")["now"]))
            engine.close()
    for name, each in found.items():
        print(f"| {name} | {show([one[0] for one in each], 1)} | {show([one[1] for one in each], 0)} |", flush=True)
    return found


def read(path: str, rounds: int) -> dict[str, Any]:
    """Seconds to the first token of one prompt."""
    print("\n### Reading: tokens per second\n\n| tokens | llama.cpp | SnapStream | ratio |\n|---|---|---|---|")
    length = longest(path) + ROOM
    ours, theirs = Engine("snapstream", path, length, 1, BUDGET), Engine("llama.cpp", path, length, 1)
    results = {}
    for tokens in (*(each for each in LENGTHS if each < longest(path)), longest(path)):
        times: dict[str, list[float]] = {"ours": [], "theirs": []}
        for round_number in range(1 + (rounds if tokens < 4096 else min(rounds, 2))):
            for name, engine in (("theirs", theirs), ("ours", ours)):
                if tokens >= 4096 and not round_number:
                    continue  # the shorter prompts have warmed up both
                taken = engine.ask("fill", [prose(path, tokens, round_number)])
                engine.ask("clear")
                if round_number:
                    times[name].append(taken)
        speeds = {name: [tokens / taken for taken in each] for name, each in times.items()}
        ratio = show(beside(speeds["ours"], speeds["theirs"]))
        print(f"| {tokens} | {show(speeds['theirs'], 0)} | {show(speeds['ours'], 0)} | {ratio}x |", flush=True)
        results[str(tokens)] = times
    ours.close()
    theirs.close()
    return results


def decode(path: str, rounds: int) -> dict[str, Any]:
    """Tokens per second after prompts."""
    print("\n### Decoding: tokens per second of all sequences\n")
    print("| after | sequences | cache | llama.cpp | SnapStream | ratio |\n|---|---|---|---|---|---|")
    results: dict[str, Any] = {}
    long = longest(path)
    for context, batch, budgets in ((512, 1, (None,)), (long, 1, (None, BUDGET)), (long, TOGETHER, (BUDGET,))):
        length = context + ROOM
        # Which of its two ways to attend decodes faster depends on the context.
        names = ("llama.cpp", "llama.cpp, plain attention") if batch == 1 else ("llama.cpp, together",)
        peers = [Engine(name, path, length, batch) for name in names]
        engines = [*peers, *(Engine("snapstream", path, length, batch, budget) for budget in budgets)]
        speeds: list[list[float]] = [[] for _ in engines]
        for engine in engines:
            engine.ask("fill", [prose(path, context, 1000 * number) for number in range(batch)])
            engine.ask("decode", 8)
        for _ in range(rounds):
            for engine, each in zip(engines, speeds, strict=True):
                each.append(engine.ask("decode", 40))
        best = max(speeds[: len(peers)], key=statistics.median)
        for budget, each in zip(budgets, speeds[len(peers) :], strict=True):
            cells = f"{show(best, 1)} | {show(each, 1)} | {show(beside(each, best))}x"
            print(f"| {context} | {batch} | {budget or 'full'} | {cells} |", flush=True)
        results[f"{context} {batch}"] = {"budgets": budgets, "speeds": speeds}
        for engine in engines:
            engine.close()
    return results


def floor(path: str, rounds: int) -> dict[str, Any]:
    """Decoding after 512 tokens beside reading as many bytes: weights without the embedding, and valid entries."""
    llm = LLM(path, max_model_len=1024, slots=1, dtype="bfloat16", prefix_cache=0, report_plan=lambda _: None)
    model = llm.engine.model_runner.prefiller.model
    skipped = {} if llm.engine.spec.tied_embeddings else {id(part) for part in model.embedding.parts}
    weights = sum(part.nbytes for part in model.parameters() if id(part) not in skipped)
    size = weights + (512 + 128) * llm.engine.plan.bytes_per_token
    reader = MemoryReader(size)
    llm.engine.add_request(prose(path, 512), SamplingParams(max_tokens=400, ignore_eos=True))
    while not (outputs := llm.engine.step()) or outputs[0].token_count < 8:
        pass
    found = []
    for _ in range(rounds):
        begin, before = time.perf_counter(), outputs[0].token_count
        for _ in range(10):
            outputs = llm.engine.step()
        middle = time.perf_counter()
        tokens = outputs[0].token_count - before
        reader(size, tokens)
        found.append((tokens / (middle - begin), tokens / (time.perf_counter() - middle)))
    shares = [ours / bound for ours, bound in found]
    print(
        f"\n### The bandwidth bound\n\nA token needs {size / 2**20:.0f} MiB ({llm.engine.plan.weight_formats}). ",
        end="",
    )
    print(f"Tokens per second: {show([one[0] for one in found], 1)}, {show(shares)} of the bound.", flush=True)
    return {"found": found}


def answers(path: str, rounds: int, count: int = 64) -> dict[str, Any]:
    """Greedy answers of both: equal tokens, and what each thought where they part."""
    print(f"\n### Greedy answers of {count} tokens: where they part\n")
    print("| question | equal tokens | llama.cpp's first and second choice | SnapStream's |\n|---|---|---|---|")
    tokenizer = load_tokenizer(path)
    ours, theirs = Engine("snapstream", path, 1024, 1), Engine("llama.cpp", path, 1024, 1)
    results, parted = [], []
    for question in QUESTIONS:
        text = question
        if tokenizer.chat_template:  # otherwise it is a model that continues texts
            message = [{"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text)
        both = [engine.ask("likelihoods", prompt, count) for engine in (theirs, ours)]
        equal = next((at for at, (a, b) in enumerate(zip(*both, strict=True)) if a[0] != b[0]), count)
        cells = "|  |  |" if equal == count else ""
        if equal < count:
            parted.append(max(first[1][1] - first[2][1] for first in (both[0][equal], both[1][equal])))
            for each in both:
                choices = (f"{tokenizer.decode([token])!r} {value:.2f}" for token, value in each[equal][1:])
                cells += f"| `{', '.join(choices)}` "
            cells += "|"
        print(f"| {question} | {equal} {cells}", flush=True)
        results.append({"question": question, "answers": both})
    if parted:
        print(f"\nWhere they part, the first choice leads the second by {max(parted):.2f} at most.")
    ours.close()
    theirs.close()
    return {"answers": results}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    for file in arguments.files:
        print(f"\n## {file.stem}")
        results[file.stem] = {
            section: globals()[section](str(file.resolve()), arguments.rounds) for section in arguments.only
        }
    if arguments.json:
        write_text(arguments.json, json.dumps(results))


if __name__ == "__main__":
    main()
