"""Prefill speed: the limits of the processor, the share of them that attention reaches, and a profile of the rest.

Everything in a run is measured on the same machine, and contenders are measured alternately. Prints Markdown.

    python benchmarks/prefill.py                     # everything, about 15 minutes on 2 cores, on a quiet machine
    python benchmarks/prefill.py --only attention    # or: products, rows, prompts, profile, neighbours
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import LlamaForCausalLM

from engine import BUDGET, CPU, Spread, interleaved, make_checkpoint, ratio, seconds
from limits import as_the_command_does, multiplications
from model import CONFIG
from snapstream import CacheBudget
from snapstream.attention import choose_backend
from snapstream.engine.prefill.job import PrefillJob
from snapstream.engine.prefill.prefill import Prefill
from snapstream.engine.settings import Types
from snapstream.integrations.transformers import SnapStreamCache
from snapstream.kernels import cpu as kernels
from snapstream.kernels.buffers import BufferView, PromptChunk, Slots, StepBuffers
from snapstream.kernels.operations import Angles, Attend, GatedProduct, Norm, Product, Rotate, Store
from snapstream.kernels.weight import DenseWeight
from snapstream.models import DecoderModel, load_model
from snapstream.models.weights import load_spec

SECTIONS = ("products", "rows", "attention", "prompts", "profile", "neighbours")
LENGTHS = (4096, 16384, 32768)
CHUNK = 2048
FEW = (1, 2, 4, 5, 8, 16, 32)
ROWS = (16, 64, 128, 256, 512, 768, 1024, 1280, 2048)
PARTS = {  # parts of the profile, each with its operations
    "attention": Attend,
    "products, gates": Product | GatedProduct,
    "norms, rotation": Norm | Rotate | Angles,
    "storing": Store,
}


def show_limits(found: dict[str, float]) -> None:
    names = {"portable": "float32", "pairs": "bfloat16, dot products of pairs", "tiles": "bfloat16, tile registers"}
    print("\n## Limits of this machine, in this run: GFLOP/s\n\n| " + " | ".join(names[name] for name in found) + " |")
    print("|---" * len(found) + "|\n| " + " | ".join(f"{rate:.0f}" for rate in found.values()) + " |")


def bench_products(rounds: int) -> None:
    """Products of a prompt's rows: by torch as it is fastest, with a new result each time, and by the native loop."""
    print("\n## Products of bfloat16: GFLOP/s of torch and of the native loop, and torch's time / the loop's\n")
    print("| weights | " + " | ".join(f"{rows} rows" for rows in ROWS) + " |\n" + "|---" * (1 + len(ROWS)) + "|")
    wide, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    for outputs, inputs in ((wide, wide), (2 * inner, wide), (wide, inner), (1536, 8960), (8960, 1536)):
        # So many that they come from memory, as those of a model do.
        weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(max(2, 2**25 // (outputs * inputs)))]
        cells = []
        for rows in ROWS:
            x = torch.randn(rows, inputs).bfloat16()
            source, target = BufferView("x", inputs), BufferView("y", outputs)
            buffers = {"x": x, "y": torch.empty(rows, outputs, dtype=torch.bfloat16)}
            slots = Slots.of_prompt(torch.zeros(1, rows, dtype=torch.int64), rows)
            products = [Product(source, target, DenseWeight(each)) for each in weights]
            program = kernels.CpuProgram(products, PromptChunk(buffers, slots, [], [], torch.bfloat16))

            def by_torch(x: Tensor = x, weights: list[Tensor] = weights) -> None:
                for weight in weights:
                    F.linear(x, weight)

            work = {"torch": by_torch, "loop": program.run}
            interleaved(work, 1)
            times = interleaved(work, rounds)
            flops = 2 * rows * inputs * outputs * len(weights) / 1e9
            rates = [Spread([flops / time for time in times[name]]).median for name in work]
            cells.append(f"{rates[0]:.0f}, {rates[1]:.0f}; {ratio(times['torch'], times['loop']).show(2)}x")
        print(f"| {outputs} x {inputs} | {' | '.join(cells)} |", flush=True)


def bench_few_rows(best: str, rounds: int) -> None:
    """Products of a step's rows: in vectors of float32, and as the loop multiplies."""
    print(
        f"\n## Products of few rows of bfloat16: GB/s of weights that are read, with portable instructions and {best}\n"
    )
    print("| weights | " + " | ".join(f"{rows} rows" for rows in FEW) + " |\n" + "|---" * (1 + len(FEW)) + "|")
    wide, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    for outputs, inputs in ((2 * inner, wide), (wide, inner), (1536, 8960), (8960, 1536)):
        weights = [torch.randn(outputs, inputs).bfloat16() for _ in range(max(2, 2**26 // (outputs * inputs)))]
        products = [Product(BufferView("x", inputs), BufferView("y", outputs), DenseWeight(each)) for each in weights]
        size, cells = sum(weight.nbytes for weight in weights) / 1e9, []
        for rows in FEW:
            buffers = {"x": torch.randn(rows, inputs).bfloat16(), "y": torch.empty(rows, outputs, dtype=torch.bfloat16)}
            slots = Slots.that_see(torch.ones(rows, dtype=torch.int64), 1)
            work = StepBuffers(buffers, slots, [], [], torch.bfloat16)
            programs = {
                name: kernels.CpuProgram(products, work, instructions=kernels.INSTRUCTIONS.index(name)).run
                for name in ("portable", best)
            }
            times = interleaved(programs, rounds, warm_up=0.1)
            cells.append(", ".join(Spread([size / time for time in each]).show() for each in times.values()))
        print(f"| {outputs} x {inputs} | {' | '.join(cells)} |", flush=True)


def torch_attention(query: Tensor, keys: Tensor, values: Tensor, start: int, scale: float) -> Tensor:
    """The same with torch's fused kernel, used in the fastest way: past and chunk separately, and joined afterwards.

    The past is attended to in full, the chunk causally.
    """
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    (T, H, D), N = query.shape, keys.shape[0]
    rows = query.transpose(0, 1)
    own = (part[:, start : start + T].repeat_interleave(H // N, 0)[None] for part in (keys, values))
    out, lse = fused(rows[None], *own, 0.0, True, scale=scale)
    if start:
        grouped = rows.reshape(1, N, H // N * T, D)  # the heads of a group share their keys
        before, before_lse = fused(grouped, keys[None, :, :start], values[None, :, :start], 0.0, False, scale=scale)
        share = torch.sigmoid(lse.reshape(H, T) - before_lse.reshape(H, T))[..., None]
        out = torch.lerp(before.reshape(H, T, D).float(), out.reshape(H, T, D).float(), share)
    return out.reshape(H, T, D).transpose(0, 1).to(query.dtype)


def bench_attention(peaks: dict[str, float], rounds: int) -> None:
    """Attention of the last chunk of a prompt to the whole prompt."""
    print(f"\n## Attention of {CHUNK} tokens to all before them: GFLOP/s (of the limit of the same instructions)\n")
    kinds = [name for name in kernels.INSTRUCTIONS if kernels.has_instructions(name)]
    print("| heads | size | type | tokens | torch | " + " | ".join(kinds) + " | best / torch |")
    print("|---" * (6 + len(kinds)) + "|")
    cases = [(torch.bfloat16, 12, 4, 64, length) for length in LENGTHS]
    cases += [(torch.bfloat16, 32, 8, 128, 16384), (torch.float32, 12, 4, 64, 16384)]
    for dtype, heads, kv_heads, size, length in cases:
        start, scale = length - CHUNK, size**-0.5
        query = torch.randn(CHUNK, heads, size).to(dtype)
        keys, values = torch.randn(2, kv_heads, length, size).to(dtype)
        work: dict[str, Callable[[], object]] = {
            "torch": lambda q=query, k=keys, v=values, s=start, c=scale: torch_attention(q, k, v, s, c)
        }
        at = torch.tensor(start)
        for name in kinds if dtype == torch.bfloat16 else kinds[:1]:
            packed = torch.zeros(kernels.packed_shape(values.shape, name), dtype=dtype)
            options = {"packed": packed, "instructions": name}
            zero = torch.zeros((), dtype=torch.int64)
            kernels.prefill_attention(query, keys, values, at, scale, packed_until=zero, **options)
            work[name] = lambda q=query, k=keys, v=values, a=at, c=scale, o=options: kernels.prefill_attention(
                q, k, v, a, c, packed_until=a, **o
            )
        interleaved(work, 1)  # warm-up
        times = interleaved(work, rounds)
        flops = 4 * heads * size * (CHUNK * start + CHUNK * (CHUNK + 1) / 2)
        rates = {name: Spread([flops / time / 1e9 for time in some]) for name, some in times.items()}
        cells = [
            f"{rates[name].median:.0f} ({100 * rates[name].median / peaks[name]:.0f} %)" if name in rates else ""
            for name in kinds
        ]
        best = ratio(times["torch"], times[max(kinds, key=lambda name: rates[name].median if name in rates else 0)])
        kind = str(dtype).removeprefix("torch.")
        print(
            f"| {heads}/{kv_heads} | {size} | {kind} | {length} | {rates['torch'].median:.0f} | {' | '.join(cells)} "
            f"| {best.show(2)}x |",
            flush=True,
        )


class Reader:
    """Prefills prompts as the engine does, and records the share of time that compression takes."""

    def __init__(self, model: DecoderModel, length: int, chunk: int) -> None:
        self.model, self.budget, self.shares = model, CacheBudget.of(min(BUDGET, length // 2)), list[float]()
        spec = model.spec
        backend = choose_backend("auto", CPU, torch.bfloat16, spec.head_dim, spec.value_size)
        queries, padded = self.budget.queries, -(-length // chunk) * chunk
        self.prefill = Prefill(
            model, backend, types=Types.all(torch.bfloat16), queries=queries, lanes=[padded], chunk=chunk
        )
        self.slot = [spec.entry.empty(1, self.budget.capacity, entry_type=torch.bfloat16) for _ in range(spec.layers)]

    def read(self, tokens: list[int]) -> None:
        spent = 0.0
        compress = Prefill._compress

        def timed(job: PrefillJob) -> None:
            nonlocal spent
            spent += seconds(lambda: compress(self.prefill, job))

        self.prefill._compress = timed  # type: ignore[method-assign]
        job = PrefillJob(self.model.spec, tokens)
        job.add(self.budget, self.slot)

        def work() -> None:
            while not job.finished:
                self.prefill.advance(job)

        total = seconds(work)
        self.shares.append(spent / total)


def bench_prompts(model: DecoderModel, checkpoint: str, rounds: int) -> None:
    print("\n## Whole prompts: time of transformers with SDPA / SnapStream's time (above 1: SnapStream is faster)\n")
    print(
        "| tokens | the engine, chunks of 512 | chunks of 2048 | SnapStreamCache | compression, share of the engine |"
    )
    print("|---|---|---|---|---|")
    peers = {
        name: LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16, attn_implementation=name).eval()
        for name in ("sdpa", "snapstream")
    }
    for length in LENGTHS:
        tokens = torch.randint(0, 4096, (length,)).tolist()
        readers = {chunk: Reader(model, length, chunk) for chunk in (512, CHUNK)}

        @torch.inference_mode()
        def theirs(name: str, tokens: list[int] = tokens) -> None:
            cache = {} if name == "sdpa" else {"past_key_values": SnapStreamCache(peers[name].config, BUDGET)}
            peers[name](torch.tensor([tokens]), use_cache=True, logits_to_keep=1, **cache)

        work: dict[str, Callable[[], object]] = {
            str(chunk): lambda reader=reader, tokens=tokens: reader.read(tokens) for chunk, reader in readers.items()
        }
        work |= {name: lambda name=name, theirs=theirs: theirs(name) for name in peers}
        interleaved(work, 1)
        for reader in readers.values():
            reader.shares.clear()
        times = interleaved(work, rounds)
        cells = (ratio(times["sdpa"], times[name]).show(2) for name in ("512", str(CHUNK), "snapstream"))
        share = Spread([100 * share for share in readers[CHUNK].shares])
        print(f"| {length} | {' | '.join(cells)} | {share.show(1)} % |", flush=True)


def bench_profile(model: DecoderModel) -> None:
    print(f"\n## Where the time of a prompt goes, in chunks of {CHUNK}: percent\n")
    names = [*PARTS, "compression", "all else"]
    print(f"| tokens | {' | '.join(names)} |\n" + "|---" * (1 + len(names)) + "|")
    run = kernels.CpuProgram.run
    for length in (256, 1024, *LENGTHS):
        reader, tokens = Reader(model, length, CHUNK), torch.randint(0, 4096, (length,)).tolist()
        reader.read(tokens)
        reader.shares.clear()
        spent = dict.fromkeys(names, 0.0)

        def one_by_one(program: kernels.CpuProgram, spent: dict[str, float] = spent) -> None:
            for at, operation in enumerate(program.operations):
                part = next((name for name, kinds in PARTS.items() if isinstance(operation, kinds)), "all else")
                spent[part] += seconds(lambda at=at: run(program, 1, at, at + 1))

        with patch.object(kernels.CpuProgram, "run", one_by_one):
            whole = seconds(lambda reader=reader, tokens=tokens: reader.read(tokens))
        spent["compression"] = reader.shares[0] * whole
        spent["all else"] += whole - sum(spent.values())
        print(f"| {length} | {' | '.join(f'{100 * spent[name] / whole:.1f}' for name in names)} |", flush=True)


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Run other processes that compete for the same cores."""
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def bench_neighbours(model: DecoderModel, rounds: int) -> None:
    print("\n## Beside busy processes: time of a prompt / its time on a quiet machine\n")
    print("| tokens | one busy process | two |\n|---|---|---|")
    for length in (CHUNK, LENGTHS[1]):
        reader, tokens = Reader(model, length, CHUNK), torch.randint(0, 4096, (length,)).tolist()
        reader.read(tokens)
        times: dict[int, list[float]] = {}
        for others in (0, 1, 2):
            with busy(others):
                times[others] = interleaved({"": lambda r=reader, t=tokens: r.read(t)}, rounds)[""]
        cells = (ratio(times[others], [Spread(times[0]).median] * len(times[others])).show(2) for others in (1, 2))
        print(f"| {length} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=SECTIONS, action="append")
    parser.add_argument("--rounds", type=int, default=5, help="number of measurements")
    options = parser.parse_args()
    wanted = options.only or SECTIONS
    if not kernels.available():
        raise SystemExit("a C++ compiler is needed")
    best = kernels.prefill_instructions(torch.bfloat16)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; instructions for bfloat16: {best}")
    peaks = multiplications()
    show_limits(peaks)
    if "products" in wanted:
        bench_products(options.rounds)
    if "rows" in wanted:
        bench_few_rows(best, options.rounds)
    if "attention" in wanted:
        bench_attention(peaks, options.rounds)
    with tempfile.TemporaryDirectory() as checkpoint:
        make_checkpoint(checkpoint)
        model = load_model(Path(checkpoint), load_spec(Path(checkpoint)), torch.bfloat16, CPU)
        if "prompts" in wanted:
            bench_prompts(model, checkpoint, max(2, options.rounds // 2))
        if "profile" in wanted:
            bench_profile(model)
        if "neighbours" in wanted:
            bench_neighbours(model, options.rounds)


if __name__ == "__main__":
    as_the_command_does()
    main()
