"""Latent attention and experts: a small cache versus a full one, and the engine versus torch and transformers.

    python benchmarks/deepseek.py

Measured with the same method as benchmarks/engine.py, on a DeepSeek-V3 of 8 layers with random weights.
"""

from __future__ import annotations

import gc
import tempfile
from pathlib import Path

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, DynamicCache

from engine import CPU, filled_decode, interleaved, ratio
from snapstream import CacheBudget
from snapstream.attention import choose_backend
from snapstream.engine.prefill.job import PrefillJob
from snapstream.engine.prefill.prefill import Prefill
from snapstream.engine.settings import Types
from snapstream.kernels import cpu as kernels
from snapstream.kernels.buffers import BufferView, Slots, StepBuffers, allocate_buffers
from snapstream.kernels.operations import ExpertProduct, Product
from snapstream.kernels.products import grouped_linear
from snapstream.kernels.weight import DenseWeight
from snapstream.models import DecoderModel, load_model
from snapstream.models.weights import load_spec

CONFIG = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 384,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "first_k_dense_replace": 1,
    "n_routed_experts": 32,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 1,
    "max_position_embeddings": 65536,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
BUDGET = 4096
CONTEXT = 16384
ROUNDS = 9
MANY = 512  # experts of 2 MiB each: more than the processor's caches hold


def multiply(product: ExpertProduct | Product, x: torch.Tensor, ends: torch.Tensor | None = None) -> None:
    """Run a product of a few rows in the native loop, as a step does."""
    slots = Slots.that_see(torch.ones(len(x), dtype=torch.int64), 1)
    buffers = allocate_buffers(product.parts(), len(x), x.dtype, {"x": x})
    if ends is not None:
        buffers["ends"][0] = ends
    kernels.CpuProgram([product], StepBuffers(buffers, slots, [], [], x.dtype)).run()


def bench_experts(model: DecoderModel) -> None:
    """One matrix product with routed experts, for eight tokens with four experts each."""
    print("\n## Eight tokens, four of 32 experts each\n")
    print("Time of a layer's first product, one row per token and expert, by the number of different experts.\n")
    print("| experts chosen | reading those experts' weights once / this | torch's product per expert / this |")
    print("|---|---|---|")
    weight = model.blocks[1].feed_forward.gate_up.parts[0]
    many = weight.repeat(MANY // len(weight), 1, 1)
    x = torch.randn(32, weight.shape[2], dtype=weight.dtype)
    kernels.available()
    for chosen in (4, 8, 16, 32):
        ends = torch.full((chosen,), 32 // chosen).cumsum(0)
        turns = iter(range(10**9))
        source, target = BufferView("x", x.shape[1]), BufferView("y", weight.shape[1])
        ends_of = BufferView("ends", chosen, dtype=torch.int64)

        def some(chosen=chosen, turns=turns) -> torch.Tensor:
            # Different experts in each call, so that none is in the processor's caches.
            first = next(turns) * chosen % MANY
            return many[first : first + chosen]

        def kernel(some=some, ends=ends, source=source, target=target, ends_of=ends_of) -> None:
            multiply(ExpertProduct(source, target, ends_of, DenseWeight(some()), gated=False), x, ends)

        def stock(some=some, ends=ends) -> None:
            grouped_linear(x, DenseWeight(some()), ends)

        def read(some=some, source=source) -> None:
            together = DenseWeight(some().flatten(0, 1))
            multiply(Product(source, BufferView("y", together.shape[0]), together), x[:1])

        beside = []
        for other in (read, stock):  # not in the same round, because torch's threads keep spinning for a while
            other(), kernel()
            times = interleaved({"other": other, "kernel": kernel}, 200)
            beside.append(ratio(times["other"], times["kernel"]))
        print(f"| {chosen} | {beside[0].show(2)}x | {beside[1].show(2)}x |", flush=True)


def bench_decode(model: DecoderModel, peer: DeepseekV3ForCausalLM, batches: tuple[int, ...] = (1, 4, 8)) -> None:
    """Decode steps with a full cache, with a small cache, and in transformers."""
    print(f"\n## Decode at {CONTEXT} tokens of context, cache of {BUDGET} versus a full one\n")
    print("| sequences | cache of 4096 / full | full / transformers | cache of 4096 / transformers |")
    print("|---|---|---|---|")
    small = CacheBudget.of(BUDGET)
    for batch in batches:
        large = CacheBudget.preset("full", CONTEXT + 1024)
        full = filled_decode(model, batch, large, CONTEXT)
        compressed = filled_decode(model, batch, small, CONTEXT)
        functions = {
            "full": lambda full=full: full.launch(8, greedy=True),
            "small": lambda compressed=compressed: compressed.launch(8, greedy=True),
        }
        if batch == 1:  # transformers expands every latent in every step, which takes seconds
            cache = DynamicCache(config=peer.config)
            for layer in range(CONFIG["num_hidden_layers"]):
                latent = torch.randn(batch, 1, CONTEXT, CONFIG["kv_lora_rank"], dtype=torch.bfloat16)
                cache.update(latent, latent[..., : CONFIG["qk_rope_head_dim"]].clone(), layer)
            token = torch.ones(batch, 1, dtype=torch.int64)
            functions["peer"] = torch.inference_mode()(
                lambda cache=cache, token=token: peer(token, past_key_values=cache)
            )
        for function in functions.values():
            function()
        times = interleaved(functions, ROUNDS)
        steps = {name: [t / (1 if name == "peer" else 8) for t in values] for name, values in times.items()}
        beside = " | | "
        if "peer" in steps:
            beside = (
                f" | {ratio(steps['peer'], steps['full']).show(1)}x | {ratio(steps['peer'], steps['small']).show(1)}x "
            )
        print(f"| {batch} | {ratio(steps['full'], steps['small']).show(2)}x{beside}|", flush=True)
        del full, compressed, functions
        gc.collect()


def bench_prefill(model: DecoderModel, peer: DeepseekV3ForCausalLM) -> None:
    """Prefill in chunks versus one forward pass of transformers."""
    print("\n## Prefill: time relative to one forward pass of transformers\n")
    print("| tokens | chunk | this / transformers |")
    print("|---|---|---|")
    backend = choose_backend("auto", CPU, torch.bfloat16, model.spec.head_dim, model.spec.value_size)
    for length in (1024, 4096):
        tokens = torch.randint(3, CONFIG["vocab_size"], (length,)).tolist()
        budget, spec = CacheBudget.of(1024), model.spec
        prefill = Prefill(
            model, backend, types=Types.all(torch.bfloat16), queries=budget.queries, lanes=[length], chunk=512
        )
        slot = [spec.entry.empty(1, 1024, entry_type=torch.bfloat16) for _ in range(spec.layers)]

        def read(prefill=prefill, tokens=tokens, slot=slot, spec=spec, budget=budget) -> None:
            job = PrefillJob(spec, tokens)
            job.add(budget, slot)
            while not job.finished:
                prefill.advance(job)

        @torch.inference_mode()
        def theirs(tokens=tokens) -> None:
            peer(torch.tensor([tokens]), logits_to_keep=1)

        read()
        theirs()
        times = interleaved({"this": read, "peer": theirs}, 3)
        print(f"| {length} | 512 | {ratio(times['this'], times['peer']).show(2)}x |", flush=True)


def main() -> None:
    """Print the tables."""
    with tempfile.TemporaryDirectory() as directory:
        torch.manual_seed(0)
        peer = DeepseekV3ForCausalLM(DeepseekV3Config(**CONFIG)).to(torch.bfloat16).eval()
        peer.save_pretrained(directory)
        spec = load_spec(Path(directory))
        model = load_model(Path(directory), spec, torch.bfloat16, CPU)
    per_token = spec.kv_bytes_per_token(torch.bfloat16)
    print(
        f"{sum(p.nbytes for p in model.parameters()) / 2**20:.0f} MiB of weights, {per_token / 1024:.1f} KiB per token"
    )
    bench_experts(model)
    bench_decode(model, peer)
    bench_prefill(model, peer)


if __name__ == "__main__":
    main()
