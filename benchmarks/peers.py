"""The built-in engine versus other engines on a CPU: OpenVINO GenAI, transformers, stock vLLM, llama.cpp.

Each runs in a separate process and environment (`make bench-peers` creates them). All get the same weights in bfloat16
and the same prompts. They are measured alternately over several rounds, and reported as ratios to SnapStream with their
spread. Prints Markdown; `--json FILE` saves the raw numbers.

    python benchmarks/peers.py                      # everything; about two hours on 2 cores, on a quiet machine
    python benchmarks/peers.py --only prefill       # or: start, decode, neighbours
    python benchmarks/peers.py --only prefill --peers openvino vllm --lengths 128 256 1024
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from model import CONFIG
from process import Process
from ratios import show
from snapstream.outputs import write_text

ROOT = Path(__file__).parent.parent
ENVIRONMENTS = {
    "snapstream": ".venv",
    "openvino": ".venv-openvino",
    "transformers": ".venv",
    "vllm": ".venv-vllm",
    "llama.cpp": ".venv-llamacpp",
    "llama.cpp, plain attention": ".venv-llamacpp",
    "llama.cpp, together": ".venv-llamacpp",
}
CONTEXT, BUDGET, ROOM = 16384, 4096, 4608
PROMPTS = (128, 256, 512, 1024, 2048, 4096, CONTEXT, 32768)
PREFILL_PEERS = ("openvino", "transformers", "vllm", "llama.cpp")
PAUSE = 0.5
"""Seconds between measurements: after its work, an engine's threads may keep the processor busy for a while."""
CONTEXTS, BATCHES = (4096, CONTEXT, 32768), (1, 4, 8)
SECTIONS = ("start", "prefill", "decode", "neighbours")


def python(engine: str) -> str:
    return str(ROOT / ENVIRONMENTS[engine] / "bin" / "python")


class Engine(Process):
    """An engine of peer_worker.py."""

    def __init__(self, name: str, model: str, length: int, batch: int, budget: int | None = None) -> None:
        settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_KVCACHE_SPACE": "4"}
        worker = ROOT / "benchmarks" / "peer_worker.py"
        super().__init__(
            name if budget is None else f"{name}, cache of {budget}",
            [python(name), worker, json.dumps([name, model, length, batch, budget])],
            settings | {"HF_HUB_OFFLINE": "1"},
        )


def make_models(directory: Path) -> None:
    """Save the same random weights in the format of each engine."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**CONFIG)).to(torch.bfloat16)
    model.save_pretrained(directory / "hf")
    words = {sign: number for number, sign in enumerate(sorted(ByteLevel.alphabet()))}
    words |= {f"<{number}>": number for number in range(len(words), CONFIG["vocab_size"])}
    tokenizer = Tokenizer(BPE(words, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<300>").save_pretrained(directory / "hf")
    np.savez(directory / "weights.npz", **{name: value.float().numpy() for name, value in model.state_dict().items()})
    script, source = ROOT / "benchmarks" / "peer_gguf.py", directory / "weights.npz"
    subprocess.run([python("llama.cpp"), script, source, directory / "model.gguf"], check=True)
    source.unlink()
    export = ["export", "openvino", "-m", directory / "hf", "--task", "text-generation-with-past"]
    export += ["--weight-format", "fp16", directory / "openvino"]
    command = ROOT / ENVIRONMENTS["openvino"] / "bin" / "optimum-cli"
    subprocess.run([command, *export], check=True, capture_output=True)


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, CONFIG["vocab_size"]) for _ in range(length)] for _ in range(count)]


def beside(numerators: list[float], denominators: list[float]) -> list[float]:
    """Ratios of consecutive measurements."""
    return [a / b for a, b in zip(numerators, denominators, strict=True)]


def prefill(
    model: str, rounds: int, lengths: Sequence[int] = PROMPTS, peers: Sequence[str] = PREFILL_PEERS
) -> dict[str, Any]:
    """Seconds to the first token of one prompt."""
    results: dict[str, Any] = {}
    print("\n## Prefill of one prompt: peer's time / SnapStream's time (above 1: SnapStream is faster)\n")
    room = max(lengths) + ROOM
    engines = [Engine("snapstream", model, room, 1, BUDGET)]
    engines += [Engine(name, model, room, 1, BUDGET if name == "openvino" else None) for name in peers]
    said = {engine.name: engine.ask("say", prompts(1, 300, 0)[0], 5) for engine in engines}
    print("First tokens of one answer, as a check that the weights are the same:", said, "\n")
    print("| tokens | " + " | ".join(engine.name for engine in engines[1:]) + " |")
    print("|---" * len(engines) + "|")
    for length in lengths:
        # A prefill of 16,384 tokens takes llama.cpp minutes, and only increases its ratio.
        measured = [engine for engine in engines if length < CONTEXT or engine.name != "llama.cpp"]
        times: dict[str, list[float]] = {engine.name: [] for engine in measured}
        for engine in measured:
            if engine.name != "llama.cpp":  # warm-up: the first access to memory is slow
                engine.ask("fill", prompts(1, length, rounds))
                engine.ask("clear")
        for seed in range(rounds):
            for engine in measured:
                time.sleep(PAUSE)
                times[engine.name].append(engine.ask("fill", prompts(1, length, seed)))
                engine.ask("clear")
        ours = times[engines[0].name]
        cells = [show(beside(times[engine.name], ours)) + "x" if engine in measured else "" for engine in engines[1:]]
        print(f"| {length} | " + " | ".join(cells) + " |", flush=True)
        results[str(length)] = times
    for engine in engines:
        engine.close()
    return results


def decode(model: str, rounds: int, contexts: Sequence[int] = CONTEXTS) -> dict[str, Any]:
    """Tokens per second after prompts, and the memory of the processes."""
    results: dict[str, Any] = {}
    print("\n## Decode: SnapStream's tokens per second / the peer's (above 1: SnapStream is faster)\n")
    print(
        f"| context | sequences | | SnapStream, full | SnapStream, cache of {BUDGET} | process holds, MiB (at most) |"
    )
    print("|---|---|---|---|---|---|")
    for context, batch in ((context, batch) for context in contexts for batch in BATCHES):
        kinds: list[tuple[str, int | None]] = [("snapstream", None), ("snapstream", BUDGET)]
        kinds += [("openvino", None), ("openvino", BUDGET), ("vllm", None), ("vllm", BUDGET)]
        # It supports one sequence at a time, and takes minutes to prefill 16,384 tokens.
        kinds += [("llama.cpp, plain attention", None)] if batch == 1 and context <= CONTEXT else []
        engines = [Engine(name, model, context + ROOM, batch, budget) for name, budget in kinds]
        speeds: dict[str, list[float]] = {engine.name: [] for engine in engines}
        for engine in engines:
            engine.ask("fill", prompts(batch, context, 1))
            engine.ask("decode", 8)
        for _ in range(rounds):
            for engine in engines:
                speeds[engine.name].append(engine.ask("decode", 48))
        memory = {engine.name: engine.ask("memory") for engine in engines}
        full, small = (speeds[engine.name] for engine in engines[:2])
        for engine in engines:
            held, theirs = memory[engine.name], speeds[engine.name]
            cells = f"{show(beside(full, theirs))}x | {show(beside(small, theirs))}x"
            label = f"| {context} | {batch} | {engine.name} |"
            print(f"{label} {cells} | {held['now']:.0f} ({held['peak']:.0f}) |", flush=True)
            engine.close()
        results[f"{context} {batch}"] = {"speeds": speeds, "memory": memory}
    return results


def start(model: str, rounds: int) -> dict[str, Any]:
    """Seconds from the start of the process until the engine is ready, and its memory then; one sequence."""
    results: dict[str, Any] = {}
    print("\n## Start: seconds until the engine is ready, and memory of its process then, one sequence\n")
    print("| | s | MiB |\n|---|---|---|")
    kinds: list[tuple[str, int | None]] = [("snapstream", BUDGET), ("openvino", None), ("openvino", BUDGET)]
    for name, budget in (*kinds, ("transformers", None), ("vllm", None), ("llama.cpp", None)):
        found = []
        for _ in range(rounds):
            begin = time.perf_counter()
            engine = Engine(name, model, CONTEXT + ROOM, 1, budget)
            found.append((time.perf_counter() - begin, engine.ask("memory")["now"]))
            engine.close()
        seconds, held = ([one[part] for one in found] for part in range(2))
        print(f"| {engine.name} | {show(seconds, 1)} | {show(held, 0)} |", flush=True)
        results[engine.name] = found
    return results


def neighbours(model: str, rounds: int) -> dict[str, Any]:
    """Decoding one sequence while other busy processes compete for the same cores."""
    results: dict[str, Any] = {}
    print("\n## Beside busy processes: tokens per second of one sequence after 2,048 tokens\n")
    print("| busy processes | | median | slowest tenth | its time / that on a quiet machine |\n|---|---|---|---|---|")
    kinds = [("snapstream", BUDGET), ("openvino", BUDGET)]
    engines = [Engine(name, model, CONTEXT + ROOM, 1, budget) for name, budget in kinds]
    quiet: dict[str, float] = {}
    for engine in engines:
        engine.ask("fill", prompts(1, 2048, 0))
        engine.ask("decode", 8)
    for others in (0, 1, 2):
        running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(others)]
        try:
            paces: dict[str, list[float]] = {engine.name: [] for engine in engines}
            for _ in range(2 * rounds):
                for engine in engines:
                    paces[engine.name] += engine.ask("paces", 100)
        finally:
            for process in running:
                process.kill()
                process.wait()
        for name, each in paces.items():
            median, slow = statistics.median(each), statistics.quantiles(each, n=10)[-1]
            quiet.setdefault(name, slow)
            cells = f"{1 / median:.0f} | {1 / slow:.0f} | {slow / quiet[name]:.1f}"
            print(f"| {others} | {name} | {cells} |", flush=True)
        results[str(others)] = paces
    for engine in engines:
        engine.close()
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS)
    parser.add_argument("--contexts", type=int, nargs="+", help="context lengths for decoding", default=CONTEXTS)
    parser.add_argument("--lengths", type=int, nargs="+", help="prompt lengths for prefill", default=PROMPTS)
    parser.add_argument("--peers", nargs="+", choices=PREFILL_PEERS, help="engines for prefill", default=PREFILL_PEERS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    known = [name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {name}" in flags]
    print(f"Processor: {', '.join(known)}; {os.cpu_count()} cores.")
    chosen = {
        "decode": {"contexts": arguments.contexts},
        "prefill": {"lengths": arguments.lengths, "peers": arguments.peers},
    }
    results = {}
    with tempfile.TemporaryDirectory() as directory:
        make_models(Path(directory))
        for section in (arguments.only,) if arguments.only else SECTIONS:
            rounds = arguments.rounds if section in ("decode", "neighbours") else min(arguments.rounds, 3)
            results[section] = globals()[section](directory, rounds, **chosen.get(section, {}))
    if arguments.json:
        write_text(arguments.json, json.dumps(results))


if __name__ == "__main__":
    main()
