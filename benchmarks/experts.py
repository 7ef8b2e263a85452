"""A mixture of experts with grouped attention beside transformers and llama.cpp: a Qwen3-MoE with random weights.

The shape is that of Qwen3-30B-A3B in small: 64 experts, of which a token uses 8. Each engine runs in a separate process
and environment (`make bench-experts` creates them), and all are measured in turn::

    python benchmarks/experts.py [--rounds 5]
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import quantize
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from peers import Engine, beside
from ratios import show

CONFIG = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
MERGE = ("Ġ", "t")
"""llama.cpp needs one at least."""
LENGTHS = (128, 512, 2048)
CONTEXT, ROOM = 512, 600
KINDS = {"bfloat16": gguf.GGMLQuantizationType.BF16, "Q8_0": gguf.GGMLQuantizationType.Q8_0}


def make_models(directory: Path) -> None:
    """Save the same random weights for transformers, and in both types for llama.cpp."""
    torch.manual_seed(0)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**CONFIG)).to(torch.bfloat16)
    model.save_pretrained(directory / "hf")
    words = {sign: number for number, sign in enumerate(sorted(ByteLevel.alphabet()))}
    words |= {"".join(MERGE): len(words)}
    words |= {f"<{number}>": number for number in range(len(words), CONFIG["vocab_size"])}
    tokenizer = Tokenizer(BPE(words, [MERGE]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<300>").save_pretrained(directory / "hf")
    for name, kind in KINDS.items():
        _write(directory / f"{name}.gguf", model, list(words), kind)


def _write(path: Path, model: Qwen3MoeForCausalLM, words: list[str], kind: gguf.GGMLQuantizationType) -> None:
    config = model.config
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_expert_count(config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges([" ".join(MERGE)])
    writer.add_eos_token_id(300)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        parts = {name.removesuffix(".weight"): tensor}
        if name.endswith("experts.gate_up_proj"):
            stem = name.removesuffix("gate_up_proj")
            parts = dict(zip((f"{stem}gate_proj", f"{stem}up_proj"), tensor.chunk(2, 1), strict=True))
        for stem, part in parts.items():
            numbers = np.ascontiguousarray(part.float().numpy())
            is_wide = numbers.ndim == 1 or stem.endswith(".gate")  # as llama.cpp's converter has it
            stored = gguf.GGMLQuantizationType.F32 if is_wide else kind
            writer.add_tensor(f"{names.get_name(stem)}.weight", quantize(numbers, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, CONFIG["vocab_size"]) for _ in range(length)]


def compare(title: str, engines: dict[str, Engine], rounds: int) -> None:
    """Tokens per second of prompts and of decoding after one."""
    ours, others = "snapstream", [name for name in engines if name != "snapstream"]
    print(
        f"\n## {title}: tokens per second\n\n| | SnapStream | "
        + " | ".join(f"{name} | ratio" for name in others)
        + " |"
    )
    print("|---" * (2 + 2 * len(others)) + "|")
    for length in (*LENGTHS, 0):
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        for engine in engines.values():
            engine.ask("fill", [prompt(length or CONTEXT, 0)])
            engine.ask("decode", 8)
        for number in range(rounds):
            for name, engine in engines.items():
                if length:
                    engine.ask("clear")
                    speeds[name].append(length / engine.ask("fill", [prompt(length, 1 + number)]))
                else:
                    speeds[name].append(engine.ask("decode", 40))
        for engine in engines.values():
            engine.ask("clear")
        cells = "".join(f" {show(speeds[each], 0)} | {show(beside(speeds[ours], speeds[each]))}x |" for each in others)
        label = f"prefill of {length}" if length else f"decoding after {CONTEXT}"
        print(f"| {label} | {show(speeds[ours], 0)} |{cells}", flush=True)
    for engine in engines.values():
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as directory:
        make_models(Path(directory))
        length = LENGTHS[-1] + ROOM
        for kind in KINDS:
            file = f"{directory}/{kind}.gguf"
            engines = {
                "snapstream": Engine("snapstream", directory if kind == "bfloat16" else file, length, 1),
                "llama.cpp": Engine("llama.cpp", file, length, 1),
            }
            if kind == "bfloat16":
                engines["transformers"] = Engine("transformers", directory, length, 1)
            compare(kind, engines, rounds)


if __name__ == "__main__":
    main()
