"""The engine versus itself with a full cache, versus transformers, and versus the machine's memory bandwidth.

Contenders are measured alternately, over several rounds in one process, and reported as ratios with their spread.
Individual times mean little on a shared machine. Prints Markdown; `--json FILE` saves the raw numbers.

    python benchmarks/engine.py                      # everything, about half an hour on 2 cores
    python benchmarks/engine.py --only decode        # or: depth, profile, looping, position, memory
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from limits import MemoryReader, as_the_command_does
from model import CONFIG
from snapstream import LLM, CacheBudget, SamplingParams
from snapstream.attention import choose_backend
from snapstream.engine.decode.decode import Decode
from snapstream.engine.settings import Types
from snapstream.kernels.cpu.program import CpuProgram
from snapstream.kernels.operations import Attend, GatedProduct, Norm, Product
from snapstream.models import DecoderModel, load_model
from snapstream.models.weights import load_spec
from snapstream.outputs import write_text

SECTIONS = ("decode", "depth", "profile", "looping", "position", "memory")
BATCHES = (1, 4, 8)
BUDGET = 4096
MEMORY_PROMPT = 8192
CPU = torch.device("cpu")
WARM_UP = 1.0  # seconds of warm-up before each measurement that is bound by memory


class Spread:
    """Median and range of repeated measurements."""

    def __init__(self, values: list[float]) -> None:
        self.values = values
        self.median, self.low, self.high = statistics.median(values), min(values), max(values)

    def show(self, digits: int = 1) -> str:
        return f"{self.median:.{digits}f} ({self.low:.{digits}f}-{self.high:.{digits}f})"


def ratio(numerators: list[float], denominators: list[float]) -> Spread:
    """Ratios of consecutive measurements."""
    return Spread([a / b for a, b in zip(numerators, denominators, strict=True)])


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved(
    functions: dict[str, Callable[[], object]], rounds: int, *, warm_up: float = 0.0
) -> dict[str, list[float]]:
    """Time several functions alternately over several rounds, each after ``warm_up`` seconds of running it.

    A processor cache of hundreds of megabytes needs many passes over the same memory until it is full.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            began = time.perf_counter()
            while time.perf_counter() < began + warm_up:
                function()
            times[name].append(seconds(function))
    return times


def filled_decode(model: DecoderModel, batch: int, budget: CacheBudget, context: int) -> Decode:
    """A decoder whose slots are in sequences of `context` tokens; the contents of the caches are random."""
    spec = model.spec
    backend = choose_backend("auto", CPU, torch.bfloat16, spec.head_dim, spec.value_size)
    decode = Decode(
        model,
        backend,
        types=Types.all(model.dtype),
        capacity=budget.capacity,
        slots=batch,
        steps=8,
        max_logprobs=1,
        eager=True,
    )
    for cache in decode.layers:
        for tensor in cache.tensors:
            tensor.normal_()
    set_position(decode, budget, context)
    return decode


def set_position(decode: Decode, budget: CacheBudget, context: int) -> None:
    from snapstream.compression import lay_out

    plan = lay_out(context, budget)
    decode.active.fill_(True)
    decode.sampling.temperature.fill_(1.0)
    decode.token.fill_(1)
    decode.position.fill_(context)
    decode.base.fill_(plan.base)
    decode.count.fill_(plan.count)
    decode.limit.fill_(plan.limit)


def weight_bytes(model: DecoderModel) -> int:
    """Bytes of weights that a decode step reads, without the embedding, of which it reads only a few rows."""
    return sum(p.numel() * p.element_size() for n, p in model.named_parameters() if not n.startswith("embedding."))


def transformers_step(peer: LlamaForCausalLM, batch: int, context: int, steps: int) -> Callable[[], object]:
    """Decode steps as in transformers' generate loop: a dynamic cache, and one forward call per token."""
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
    print("Floor: repeatedly reading as many bytes as weights and valid entries have, in the same round.\n")
    print("| context | batch | full cache | cache of 4096 | ratio | full, of floor | 4096, of floor | transformers |")
    print("|---|---|---|---|---|---|---|---|")
    per_token, weights = model.spec.kv_bytes_per_token(torch.bfloat16), weight_bytes(model)
    steps = passes = 8
    reader = MemoryReader(weights + max(BATCHES) * 32768 * per_token)
    small = CacheBudget.of(BUDGET)
    rows = results["decode"] = []
    for batch in BATCHES:
        compressed = filled_decode(model, batch, small, 16384)
        for context in (4096, 16384, 32768):
            large = CacheBudget.preset("full", context + 2048)
            full = filled_decode(model, batch, large, context)
            set_position(compressed, small, context)
            sizes = {
                name: weights + batch * entries * per_token
                for name, entries in (("full", context), ("small", min(context, BUDGET)))
            }
            functions: dict[str, Callable[[], object]] = {
                "read small": lambda sizes=sizes: reader(sizes["small"], passes),
                "read full": lambda sizes=sizes: reader(sizes["full"], passes),
                "full": lambda full=full: full.launch(steps, greedy=True),
                "small": lambda compressed=compressed: compressed.launch(steps, greedy=True),
            }
            if batch < 8:
                functions["peer"] = transformers_step(peer, batch, context, 2)
            times = interleaved(functions, rounds, warm_up=WARM_UP)
            speed = {name: [batch * steps / t for t in times[name]] for name in ("full", "small")}
            floors = {name: [batch * passes / t for t in times[f"read {name}"]] for name in sizes}
            bandwidth = [sizes["full"] * passes / t for t in times["read full"]]
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
            gc.collect()
        del compressed
    print("\nRead bandwidth, GB/s, by size of the full cache and the weights:")
    for row in rows:
        size = (weights + row["batch"] * row["context"] * per_token) / 2**20
        print(f"{size:.0f} MiB: {Spread([b / 1e9 for b in row['bandwidth']]).show()}")


def bench_depth(checkpoint: Path, rounds: int, results: dict) -> None:
    print("\n## Decode with a cache of 4096 at position 16384, of floor, by layers\n")
    print("| batch | 12 layers | 30 layers |\n|---|---|---|")
    budget = CacheBudget.of(BUDGET)
    steps = passes = 8
    models = []
    for layers in (12, 30):
        directory = checkpoint / str(layers)
        make_checkpoint(str(directory), num_hidden_layers=layers)
        models.append(load_model(directory, load_spec(directory), torch.bfloat16, CPU))
    sizes = [weight_bytes(m) + max(BATCHES) * BUDGET * m.spec.kv_bytes_per_token(torch.bfloat16) for m in models]
    reader = MemoryReader(max(sizes))
    rows = results["depth"] = []
    for batch in BATCHES:
        functions: dict[str, Callable[[], object]] = {}
        for number, model in enumerate(models):
            size = weight_bytes(model) + batch * BUDGET * model.spec.kv_bytes_per_token(torch.bfloat16)
            decode = filled_decode(model, batch, budget, 16384)
            functions[f"read {number}"] = lambda size=size: reader(size, passes)
            functions[f"decode {number}"] = lambda decode=decode: decode.launch(steps, greedy=True)
        times = interleaved(functions, rounds, warm_up=WARM_UP)
        cells = []
        for number in range(2):
            floor, step = (
                [t / n for t in times[f"{what} {number}"]] for what, n in (("read", passes), ("decode", steps))
            )
            cells.append(ratio(floor, step).show(2))
        print(f"| {batch} | {' | '.join(cells)} |", flush=True)
        rows.append({"batch": batch, "times": times})


def bench_profile(model: DecoderModel, rounds: int, results: dict) -> None:
    """Operations individually, one launch each, and their read bandwidth."""
    print("\n## Where a decode step goes, cache of 4096, position 16384: share of it (GB/s)\n")
    budget = CacheBudget.of(BUDGET)
    cache_bytes = BUDGET * model.spec.kv_bytes_per_token(torch.bfloat16) // model.spec.layers
    rows = results["profile"] = []
    for batch in BATCHES:
        decode = filled_decode(model, batch, budget, 16384)
        loop = decode.program
        assert isinstance(loop, CpuProgram)
        spent: dict[str, list[float]] = {}
        read: dict[str, int] = {}
        for turn in range(rounds):
            for index, operation in enumerate(loop.operations):
                took = seconds(lambda loop=loop, index=index: loop.run(1, index, index + 1))
                name, size = type(operation).__name__, 0
                if isinstance(operation, Attend):
                    size = batch * cache_bytes
                elif isinstance(operation, Product | GatedProduct):
                    name, size = "products", operation.weight.nbytes
                else:
                    name = "norms, rotation, storing, taking"
                spent.setdefault(name, [0.0] * rounds)[turn] += took
                read[name] = read.get(name, 0) + (size if turn == 0 else 0)
            set_position(decode, budget, 16384)
        if not rows:
            print("| batch | " + " | ".join(spent) + " |\n" + "|---" * (1 + len(spent)) + "|")
        parts = {name: statistics.median(times) for name, times in spent.items()}
        whole = sum(parts.values())
        cells = (
            f"{100 * part / whole:.0f} %" + (f" ({read[name] / part / 1e9:.0f})" if read[name] else "")
            for name, part in parts.items()
        )
        print(f"| {batch} | {' | '.join(cells)} |", flush=True)
        rows.append({"batch": batch, "parts": spent, "read": read})


def bench_looping(model: DecoderModel, rounds: int, results: dict) -> None:
    """The same step in more or fewer launches (arXiv 2410.23668), with tokens that are drawn, and drawn by torch."""
    print("\n## Kernel looping: tokens per second by what one launch does, relative to a launch per operation\n")
    budget, steps = CacheBudget.of(BUDGET), 8
    rows = results["looping"] = []
    for batch in BATCHES:
        decode = filled_decode(model, batch, budget, 16384)
        loop = decode.program
        assert isinstance(loop, CpuProgram)
        # A layer starts with the norm before its attention.
        norms = [index for index, operation in enumerate(loop.operations) if isinstance(operation, Norm)]
        layers = [0, *norms[2:-1:2], len(loop.operations)]

        def launches(edges: Sequence[int], loop: CpuProgram = loop) -> Callable[[], None]:
            def run() -> None:
                for _ in range(steps):
                    for first, last in itertools.pairwise(edges):
                        loop.run(1, first, last)

            return run

        decode.sampling.top_k.fill_(20)
        decode.sampling.top_p.fill_(0.8)

        def several(temperature: float, logprobs: bool = False, decode: Decode = decode) -> Callable[[], None]:
            def run() -> None:
                decode.sampling.temperature.fill_(temperature)
                decode.launch(steps, greedy=temperature == 0.0, logprobs=logprobs)

            return run

        functions = {
            "operation": launches(range(len(loop.operations) + 1)),
            "layer": launches(layers),
            "step": launches([0, len(loop.operations)]),
            "eight steps": several(0.0),
            "eight steps, tokens drawn": several(0.7),
            "step, then torch, for log-probabilities": several(0.7, logprobs=True),
        }
        interleaved(functions, 2)
        times = interleaved(functions, 2 * rounds)
        if not rows:
            print("| batch | " + " | ".join(list(functions)[1:]) + " |\n" + "|---" * len(functions) + "|")
        cells = (f"{ratio(times['operation'], times[name]).show(2)}x" for name in list(functions)[1:])
        print(f"| {batch} | {' | '.join(cells)} |", flush=True)
        rows.append({"batch": batch, "times": times})


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
            for _ in range(2):
                decode.launch(8, greedy=True)

        times = interleaved({str(p): lambda p=p: at(p) for p in positions}, 2 * rounds)
        rows.append({"batch": batch, "times": times})
        cells = (ratio(times[str(p)], times["4096"]).show(2) for p in positions[1:])
        print(f"| {batch} | {' | '.join(cells)} |", flush=True)


def bench_memory(checkpoint: str, results: dict) -> None:
    """Memory of each engine, in a separate process because a process does not return memory to the system."""
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
    """Run one engine and report the memory that it adds to the process."""
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
        prefix_cache=0,
        report_plan=lambda _: None,
    )
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak: loading has mapped the checkpoint's pages
    prompts = [torch.randint(0, 4096, (MEMORY_PROMPT,)).tolist() for _ in range(4)]
    for i, prompt in enumerate(prompts):
        llm.engine.add_request(prompt, SamplingParams(max_tokens=250, ignore_eos=True), request_id=str(i))
    while len(llm.engine.table.running) < 4:
        llm.engine.step()
    llm.engine.step()
    plan = llm.engine.plan
    peak = held("VmHWM")
    row = {"weights": plan.weights, "slots": plan.slots, "staging": plan.staging, "metadata": plan.metadata}
    print(json.dumps(row | {"steady": held() - before, "peak": peak - before}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, action="append")
    parser.add_argument("--rounds", type=int, default=9, help="number of measurements")
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
            bench_profile(model, options.rounds, results)
        if "looping" in wanted:
            bench_looping(model, options.rounds, results)
        if "depth" in wanted:
            bench_depth(Path(checkpoint), options.rounds, results)
        if "position" in wanted:
            bench_position(model, options.rounds, results)
        if "memory" in wanted:
            del model, peer
            gc.collect()
            bench_memory(checkpoint, results)
    if options.json:
        write_text(options.json, json.dumps(results))


def make_checkpoint(directory: str, **changes: int) -> None:
    """Save a random model with a tokenizer, in transformers' format."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**(CONFIG | changes))).to(torch.bfloat16).save_pretrained(directory)
    words = Tokenizer(WordLevel({"<unk>": 0, "a": 1}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>").save_pretrained(directory)


if __name__ == "__main__":
    as_the_command_does()
    main()
