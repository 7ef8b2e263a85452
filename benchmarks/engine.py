"""The engine against itself with a full cache, against transformers, and against the machine's memory.

Everything that is compared is measured in turn, round after round, in one process, and reported as a ratio with its
spread; single times mean little on a shared machine. Prints Markdown; `--json FILE` keeps the raw numbers.

    python benchmarks/engine.py                      # everything, about half an hour on 2 cores
    python benchmarks/engine.py --only decode        # or: profile, position, memory
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from model import CONFIG
from snapstream import LLM, CacheBudget, SamplingParams
from snapstream.attention import choose_backend
from snapstream.engine.decode import Decode
from snapstream.models import DecoderModel, load_model
from snapstream.models.weights import load_spec

SECTIONS = ("decode", "profile", "position", "memory")
BUDGET = 4096
MEMORY_PROMPT = 8192
CPU = torch.device("cpu")


class Spread:
    """Median and range of repeated measurements."""

    def __init__(self, values: list[float]) -> None:
        self.values = values
        self.median, self.low, self.high = statistics.median(values), min(values), max(values)

    def show(self, digits: int = 1) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def ratio(numerators: list[float], denominators: list[float]) -> Spread:
    """Ratios of measurements taken next to each other."""
    return Spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Time several functions in turn, round after round."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            times[name].append(seconds(function))
    return times


class MemoryReader:
    """Reads a buffer far larger than the caches of the processor; its speed is the floor of everything else."""

    def __init__(self, megabytes: int = 512, passes: int = 8) -> None:
        self.buffer = torch.ones(megabytes * 2**20 // 4)
        self.passes = passes  # about as long as what it is compared with, so that both see the same neighbours
        self.bytes = self.buffer.numel() * 4 * passes

    def __call__(self) -> None:
        for _ in range(self.passes):
            self.buffer.sum()


def filled_decode(model: DecoderModel, batch: int, budget: CacheBudget, context: int) -> Decode:
    """A decoder whose slots are in the middle of sequences of `context` tokens; cache contents are random."""
    spec = model.spec
    backend = choose_backend("auto", CPU, torch.bfloat16, spec.head_dim, spec.value_size)
    decode = Decode(model, backend, capacity=budget.capacity, slots=batch, steps=1, max_logprobs=1, eager=False)
    for cache in decode.layers:
        for tensor in cache.tensors:
            tensor.normal_()
    decode.warm_up()
    set_position(decode, budget, context)
    return decode


def set_position(decode: Decode, budget: CacheBudget, context: int) -> None:
    from snapstream.compression import lay_out

    plan = lay_out(context, budget)
    decode.active.fill_(True)
    decode.token.fill_(1)
    decode.position.fill_(context)
    decode.base.fill_(plan.base)
    decode.count.fill_(plan.count)
    decode.limit.fill_(plan.limit)


def weight_bytes(model: DecoderModel) -> int:
    """Bytes of weights that a decode step reads; of the embedding it reads a few rows."""
    return sum(p.numel() * p.element_size() for n, p in model.named_parameters() if n != "embedding.weight")


def transformers_step(peer: LlamaForCausalLM, batch: int, context: int, steps: int) -> Callable[[], object]:
    """Decode steps of transformers' generate loop: its dynamic cache, one forward call per token."""
    config = peer.config
    cache = DynamicCache(config=config)
    shape = (batch, config.num_key_value_heads, context, config.head_dim)
    for layer in range(config.num_hidden_layers):
        cache.update(torch.randn(shape, dtype=torch.bfloat16), torch.randn(shape, dtype=torch.bfloat16), layer)
    tokens = torch.ones(batch, 1, dtype=torch.int64)

    @torch.inference_mode()
    def run() -> None:
        nonlocal tokens
        for _ in range(steps):
            tokens = peer(tokens, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(-1)

    return run


def bench_decode(model: DecoderModel, peer: LlamaForCausalLM, rounds: int, results: dict) -> None:
    print("\n## Decode: tokens per second\n")
    print("Floor: weights once + valid cache entries of every sequence, at the read bandwidth of the same round.\n")
    print("| context | batch | full cache | cache of 4096 | ratio | full, of floor | 4096, of floor | transformers |")
    print("|---|---|---|---|---|---|---|---|")
    per_token, weights = model.spec.kv_bytes_per_token(torch.bfloat16), weight_bytes(model)
    reader, steps = MemoryReader(), 16
    small = CacheBudget.of(BUDGET)
    rows = results["decode"] = []
    for batch in (1, 4, 8):
        compressed = filled_decode(model, batch, small, 16384)
        for context in (4096, 16384, 32768):
            large = CacheBudget.preset("full", context + 2048)
            full = filled_decode(model, batch, large, context)
            set_position(compressed, small, context)
            functions: dict[str, Callable[[], object]] = {
                "read": reader,
                "full": lambda full=full: full.launch(steps, greedy=True),
                "small": lambda compressed=compressed: compressed.launch(steps, greedy=True),
            }
            if batch < 8:
                functions["peer"] = transformers_step(peer, batch, context, 2)
            for function in functions.values():
                function()
            times = interleaved(functions, rounds)
            bandwidth = [reader.bytes / t for t in times["read"]]
            speed = {name: [batch * steps / t for t in times[name]] for name in ("full", "small")}
            floors = {
                name: [batch / ((weights + batch * entries * per_token) / b) for b in bandwidth]
                for name, entries in (("full", context), ("small", min(context, BUDGET)))
            }
            peer_speed = [batch * 2 / t for t in times["peer"]] if "peer" in times else None
            row = {
                "context": context,
                "batch": batch,
                "full": speed["full"],
                "small": speed["small"],
                "full_floor": floors["full"],
                "small_floor": floors["small"],
                "peer": peer_speed,
                "bandwidth": bandwidth,
            }
            rows.append(row)
            beside = (
                ""
                if peer_speed is None
                else (
                    f"{Spread(peer_speed).show()}; full {ratio(speed['full'], peer_speed).show()}x, "
                    f"4096 {ratio(speed['small'], peer_speed).show()}x"
                )
            )
            print(
                f"| {context} | {batch} | {Spread(speed['full']).show()} | {Spread(speed['small']).show()} "
                f"| {ratio(speed['small'], speed['full']).show(2)}x | {ratio(speed['full'], floors['full']).show(2)} "
                f"| {ratio(speed['small'], floors['small']).show(2)} | {beside} |",
                flush=True,
            )
            del full, functions
            torch._dynamo.reset()
            compressed.warm_up()
            gc.collect()
        del compressed
    every = [b / 1e9 for row in rows for b in row["bandwidth"]]
    print(f"\nRead bandwidth: {Spread(every).show()} GB/s.")


def bench_profile(model: DecoderModel, results: dict) -> None:
    """Where a decode step with a cache of 4096 spends its time, against the floor of each part."""
    print("\n## Where a decode step goes, cache of 4096, position 16384\n")
    print("| batch | matrix products | their floor | attention | its floor | everything else |")
    print("|---|---|---|---|---|---|")
    budget, reader, steps = CacheBudget.of(BUDGET), MemoryReader(), 32
    cache_bytes = BUDGET * model.spec.kv_bytes_per_token(torch.bfloat16)
    rows = results["profile"] = []
    for batch in (1, 4):
        decode = filled_decode(model, batch, budget, 16384)
        decode.launch(steps, greedy=True)
        wall = Spread(
            [seconds(lambda decode=decode: decode.launch(steps, greedy=True)) / steps for _ in range(5)]
        ).median
        bandwidth = reader.bytes / Spread([seconds(reader) for _ in range(5)]).median
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            decode.launch(steps, greedy=True)
        spent = {event.key: event.self_cpu_time_total / 1e6 / steps for event in profile.key_averages()}
        linear, attention = spent["snapstream_cpu::skinny_linear"], spent["snapstream_cpu::decode_attention"]
        parts = [linear, weight_bytes(model) / bandwidth, attention, batch * cache_bytes / bandwidth]
        parts.append(wall - linear - attention)
        rows.append({"batch": batch, "wall": wall, "parts": parts})
        print(f"| {batch} | {' | '.join(f'{100 * part / wall:.0f} %' for part in parts)} |", flush=True)


def bench_position(model: DecoderModel, rounds: int, results: dict) -> None:
    print("\n## Decode: step time against position, cache of 4096, relative to position 4096\n")
    print("| batch | 8192 | 16384 | 32768 | 60000 |\n|---|---|---|---|---|")
    budget = CacheBudget.of(BUDGET)
    rows = results["position"] = []
    for batch in (1, 4):
        decode = filled_decode(model, batch, budget, 4096)
        positions = (4096, 8192, 16384, 32768, 60000)

        def at(position: int, decode: Decode = decode) -> None:
            set_position(decode, budget, position)
            decode.launch(16, greedy=True)

        times = interleaved({str(p): lambda p=p: at(p) for p in positions}, 2 * rounds)
        rows.append({"batch": batch, "times": times})
        cells = (ratio(times[str(p)], times["4096"]).show(2) for p in positions[1:])
        print(f"| {batch} | {' | '.join(cells)} |", flush=True)


def bench_memory(checkpoint: str, results: dict) -> None:
    """Each engine in a process of its own, since a process does not give memory back."""
    print("\n## Memory of the process: 4 prompts of 8192 tokens, 4 slots\n")
    print("| cache | weights | caches of all slots | staging | metadata | measured: steady | measured: peak |")
    print("|---|---|---|---|---|---|---|")
    results["memory"] = []
    for entries in (0, MEMORY_PROMPT // 4):
        command = [sys.executable, __file__, "--memory-child", checkpoint, str(entries)]
        row = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        results["memory"].append(row)
        cells = (
            f"{row[name] / 2**20:.0f} MiB" for name in ("weights", "slots", "staging", "metadata", "steady", "peak")
        )
        print(f"| {entries or f'full, {MEMORY_PROMPT + 256}'} | {' | '.join(cells)} |", flush=True)


def memory_child(checkpoint: str, entries: int) -> None:
    """Run one engine and report what the process holds beyond what it held before."""
    status = Path("/proc/self/status")

    def held(field: str = "VmRSS") -> int:
        return next(int(line.split()[1]) for line in status.read_text().splitlines() if field in line) * 1024

    torch.nn.functional.linear(torch.ones(64, 64), torch.ones(64, 64))
    before = held()
    llm = LLM(
        checkpoint,
        budget=entries or None,
        max_model_len=MEMORY_PROMPT + 256,
        slots=4,
        enforce_eager=True,
        report_plan=lambda _: None,
    )
    Path("/proc/self/clear_refs").write_text("5")  # pages of the checkpoint were mapped while it was loaded
    prompts = [torch.randint(0, 4096, (MEMORY_PROMPT,)).tolist() for _ in range(4)]
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(prompt, SamplingParams(max_tokens=250, ignore_eos=True), request_id=str(i))
    while len(llm.engine.scheduler.running) < 4:
        llm.engine.step()
    llm.engine.step()
    plan = llm.engine.plan
    peak = held("VmHWM")
    row = {"weights": plan.weights, "slots": plan.slots, "staging": plan.staging, "metadata": plan.metadata}
    print(json.dumps(row | {"steady": held() - before, "peak": peak - before}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, action="append")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each figure")
    parser.add_argument("--json", type=Path, help="file for the raw numbers")
    parser.add_argument("--memory-child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_child:
        memory_child(options.memory_child[0], int(options.memory_child[1]))
        return
    wanted = options.only or SECTIONS
    results: dict = {"config": CONFIG, "torch": torch.__version__, "threads": torch.get_num_threads()}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}")
    with tempfile.TemporaryDirectory() as checkpoint:
        make_checkpoint(checkpoint)
        spec = load_spec(Path(checkpoint))
        model = load_model(Path(checkpoint), spec, torch.bfloat16, CPU)
        peer = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
        if "decode" in wanted:
            bench_decode(model, peer, options.rounds, results)
        if "profile" in wanted:
            bench_profile(model, results)
        if "position" in wanted:
            bench_position(model, options.rounds, results)
        if "memory" in wanted:
            del model, peer
            gc.collect()
            bench_memory(checkpoint, results)
    if options.json:
        options.json.write_text(json.dumps(results))


def make_checkpoint(directory: str, **changes: int) -> None:
    """A random model with a tokenizer, as transformers saves it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(CONFIG | changes))).to(torch.bfloat16).save_pretrained(directory)
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(directory)


if __name__ == "__main__":
    main()
