"""The cost of selecting tokens by policy: time relative to prefill, and memory.

One prefill is compressed by every policy, so all policies are measured on the same text, immediately after each other.
Prints Markdown.

    python benchmarks/policies.py    # about ten minutes on 2 cores, on a quiet machine
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from engine import CPU, Spread, make_checkpoint, seconds
from limits import as_the_command_does
from prefill import CHUNK, Reader
from snapstream import CacheBudget
from snapstream.engine.prefill.job import PrefillJob, Target
from snapstream.engine.prefill.prefill import Prefill
from snapstream.models import DecoderModel, load_model
from snapstream.models.weights import load_spec

POLICIES = ("streaming", "sage-kv", "snapstream", "keydiff", "local-keydiff", "multiscale-keydiff", "mixed", "spans")
LENGTHS = (2048, 4096, 8192, 32768)


class Compressor(Reader):
    """Prefills prompts, and adds up the time that each policy takes."""

    def __init__(self, model: DecoderModel, length: int) -> None:
        super().__init__(model, length, CHUNK)
        self.budgets = {name: CacheBudget.preset(name, length // 4) for name in POLICIES}
        self.slots = {
            name: [model.spec.entry.empty(1, length // 4, entry_type=torch.bfloat16) for _ in range(model.spec.layers)]
            for name in POLICIES
        }

    def read_for_all(self, tokens: list[int]) -> tuple[float, dict[str, float]]:
        """Seconds of prefill without compression, and of compression by each policy."""
        spent = dict.fromkeys(POLICIES, 0.0)
        compress, job = Prefill.compress_into, PrefillJob(self.model.spec, tokens)
        names = {id(job.add(self.budgets[name], self.slots[name])): name for name in POLICIES}

        def timed(target: Target, of: PrefillJob) -> None:
            spent[names[id(target)]] += seconds(lambda: compress(self.prefill, target, of))

        self.prefill.compress_into = timed  # type: ignore[method-assign]

        def work() -> None:
            while not job.finished:
                self.prefill.advance(job)

        whole = seconds(work)
        return whole - sum(spent.values()), spent

    def most_memory(self, name: str, tokens: list[int]) -> int:
        """Peak number of bytes that the policy allocates in one layer."""
        job = PrefillJob(self.model.spec, tokens)
        target = job.add(self.budgets[name], self.slots[name])
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found, torch.inference_mode():
            Prefill.compress_into(self.prefill, target, job)
        held = most = 0
        for event in sorted(found.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        return most


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="number of measurements")
    rounds = parser.parse_args().rounds
    print("| tokens | policy | percent of the time of reading | more memory, MiB | of the layer's keys and values |")
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as checkpoint:
        make_checkpoint(checkpoint)
        model = load_model(Path(checkpoint), load_spec(Path(checkpoint)), torch.bfloat16, CPU)
        for length in LENGTHS:
            reader, tokens = Compressor(model, length), torch.randint(0, 4096, (length,)).tolist()
            reader.read_for_all(tokens)
            measured = [reader.read_for_all(tokens) for _ in range(rounds)]
            staged = sum(tensor.nbytes for tensor in reader.prefill.lanes[0].caches[0].tensors)
            for name in POLICIES:
                share = Spread([100 * spent[name] / alone for alone, spent in measured])
                memory = reader.most_memory(name, tokens)
                cells = f"{share.show(2)} | {memory / 2**20:.1f} | {100 * memory / staged:.0f} %"
                print(f"| {length} | {name} | {cells} |", flush=True)


if __name__ == "__main__":
    as_the_command_does()
    main()
