"""Kinds of layers beside transformers and llama.cpp, in models with random weights.

``experts`` has the shape of Qwen3-30B-A3B in small: 64 experts, of which a token uses 8. ``states`` has about that of
Qwen3.5-0.8B, with a small vocabulary: three of four layers have a state. Each engine runs in a separate process and
environment (`make bench-experts` and `make bench-states` create them), and all are measured in turn::

    python benchmarks/random_models.py experts|states [--rounds 5]
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
from torch import Tensor
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from peers import Engine, beside
from ratios import show

VOCABULARY = 4096
COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 1024,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}
EXPERTS = COMMON | {
    "intermediate_size": 3072,
    "moe_intermediate_size": 384,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
STATES = COMMON | {
    "intermediate_size": 3584,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
MERGE = ("Ġ", "t")
"""llama.cpp needs one at least."""
LENGTHS = (128, 512, 2048)
CONTEXT, ROOM = 512, 600
KINDS = {"bfloat16": gguf.GGMLQuantizationType.BF16, "Q8_0": gguf.GGMLQuantizationType.Q8_0}


def make_models(shape: str, directory: Path) -> None:
    """Save the same random weights for transformers, and in both types for llama.cpp."""
    torch.manual_seed(0)
    if shape == "experts":
        model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**EXPERTS)).to(torch.bfloat16)
    else:
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**STATES)).to(torch.bfloat16)
    model.save_pretrained(directory / "hf")
    words = {sign: number for number, sign in enumerate(sorted(ByteLevel.alphabet()))}
    words |= {"".join(MERGE): len(words)}
    words |= {f"<{number}>": number for number in range(len(words), VOCABULARY)}
    tokenizer = Tokenizer(BPE(words, [MERGE]))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<300>").save_pretrained(directory / "hf")
    for name, kind in KINDS.items():
        _write(directory / f"{name}.gguf", model, list(words), kind)


def _write(path: Path, model: PreTrainedModel, words: list[str], kind: gguf.GGMLQuantizationType) -> None:
    config, has_states = model.config, isinstance(model, Qwen3_5ForCausalLM)
    writer = gguf.GGUFWriter(path, "qwen35" if has_states else "qwen3moe")
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
    if has_states:
        writer.add_rope_dimension_count(64)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
        writer.add_full_attention_interval(4)
    else:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(words)
    writer.add_token_types([1] * len(words))
    writer.add_token_merges([" ".join(MERGE)])
    writer.add_eos_token_id(300)
    arch = gguf.MODEL_ARCH.QWEN35 if has_states else gguf.MODEL_ARCH.QWEN3MOE
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        for stem, ending, part in _parts(name, tensor, adds=has_states and name.endswith("norm.weight")):
            numbers = np.ascontiguousarray(part.float().numpy())
            is_wide = numbers.ndim == 1 or stem.endswith((".gate", "conv1d"))  # as llama.cpp's converter has it
            stored = gguf.GGMLQuantizationType.F32 if is_wide else kind
            writer.add_tensor(f"{names.get_name(stem)}{ending}", quantize(numbers, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _parts(name: str, tensor: Tensor, *, adds: bool) -> list[tuple[str, str, Tensor]]:
    """Stem of the name, ending, and numbers of what becomes of a tensor in a file."""
    stem, _, own = name.rpartition(".")
    match own:
        case "gate_up_proj":
            gates, ups = tensor.chunk(2, 1)
            return [(f"{stem}.gate_proj", ".weight", gates), (f"{stem}.up_proj", ".weight", ups)]
        case "down_proj":
            return [(name, ".weight", tensor)]
        case "A_log":
            return [(name, "", -tensor.float().exp())]
        case "dt_bias":
            return [(f"{stem}.dt_proj", ".bias", tensor)]
    if stem.endswith("conv1d"):
        tensor = tensor[:, 0]
    return [(stem, ".weight", tensor + 1 if adds and "linear_attn" not in name else tensor)]


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(length)]


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
    parser.add_argument("shape", choices=("experts", "states"))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    rounds = given.rounds
    with tempfile.TemporaryDirectory() as directory:
        make_models(given.shape, Path(directory))
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
