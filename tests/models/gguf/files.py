"""GGUF files of tiny random models, written as llama.cpp's converter writes them."""

import itertools

import numpy
import torch
from gguf import (
    MODEL_ARCH_NAMES,
    ExpertGatingFuncType,
    GGMLQuantizationType,
    GGUFWriter,
    RopeScalingType,
    get_tensor_name_map,
)
from gguf.quants import dequantize, quantize

from snapstream.kernels.formats import FORMATS, Format
from tests.blocks import random_rows
from tests.checkpoints import make_model

NAMES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
    "phi3": "phi3",
    "granite": "granite",
    "smollm3": "smollm3",
    "olmo2": "olmo2",
    "olmoe": "olmoe",
    "gemma2": "gemma2",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
}
"""Architectures in files, by ``model_type``."""
IN_PAIRS = ("llama", "granite", "smollm3")
"""Architectures whose converter reorders rows of queries and keys."""
# Byte-level tokens of a byte each, then words that merges make.
MERGES = ["Ġ t", "h e", "Ġt he", "1 2"]


# What the gguf package reads but does not write.
MADE_UP = {GGMLQuantizationType[name.upper()]: FORMATS[name] for name in ("q4_k", "q5_k", "q6_k")}
MADE_UP[GGMLQuantizationType.IQ4_NL] = Format("iq4_nl", GGMLQuantizationType.IQ4_NL, 32, ((1, 2), (16, 1)))


def byte_tokens():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    return [*bytes_to_unicode().values(), *("".join(merge.split()) for merge in MERGES)]


# What quantised rows need, and a vocabulary for all bytes.
SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32, "vocab_size": 288}


def stored(tensor, kind):
    """A tensor as it is in a file, and as it comes back."""
    data = tensor.float().numpy()
    if data.ndim == 1:  # llama.cpp never quantises these
        return data, GGMLQuantizationType.F32, tensor.float()
    if data.shape[-1] < 256:  # the router of a random model
        kind = GGMLQuantizationType.F32
    packed = made_up(tensor, MADE_UP[kind]) if kind in MADE_UP else quantize(data, kind)
    return packed, kind, torch.from_numpy(dequantize(packed, kind))


def made_up(tensor, kind):
    """Random blocks about as large as a tensor, in a format that the gguf package only reads."""
    generator = torch.Generator().manual_seed(len(tensor))
    rows = random_rows(kind, tensor[..., 0].numel(), tensor.shape[-1], generator)
    numbers = torch.from_numpy(dequantize(rows.numpy(), GGMLQuantizationType(kind.number)))
    middle = float(numbers.mean())
    assert abs(middle) < float(numbers.std())
    at = 0
    for count, width in kind.fields:  # scaled by scaling the factors
        if width == 2:
            for block in range(at, rows.shape[1], kind.nbytes):
                factor = rows[:, block : block + 2].contiguous().view(torch.float16).float()
                rows[:, block : block + 2] = (factor * tensor.std() / numbers.std()).half().view(torch.uint8)
        at += count * width
    return rows.numpy().reshape(*tensor.shape[:-1], -1)


def in_pairs(tensor, heads):
    """llama.cpp's order of rows that are rotated: neighbours turn together."""
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)


def describe(writer, name, config, head):
    """What an architecture has besides sizes."""
    rope = config.rope_parameters
    if "full_attention" in rope:
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope["rope_theta"])
    rotated = int(head * (rope.get("partial_rotary_factor") or 1.0))
    writer.add_rope_dimension_count(rotated)
    if rope["rope_type"] == "longrope":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        factor = config.max_position_embeddings / rope["original_max_position_embeddings"]
        log = numpy.log(factor) / numpy.log(rope["original_max_position_embeddings"])
        writer.add_rope_scaling_attn_factors(float(numpy.sqrt(1 + log)))
        for kind in ("long", "short"):
            factors = numpy.array(rope[f"{kind}_factor"], dtype=numpy.float32)
            writer.add_tensor(f"rope_factors_{kind}.weight", factors)
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if name in ("gemma2", "gpt-oss"):
        writer.add_sliding_window(config.sliding_window)
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if name == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    count = next((value for key in EXPERT_COUNTS if (value := getattr(config, key, None))), None)
    if count:
        writer.add_expert_count(count)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if name == "glm4moe":
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
        writer.add_expert_gating_func(ExpertGatingFuncType.SIGMOID)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)


EXPERT_COUNTS = ("n_routed_experts", "num_experts", "num_local_experts")


def split_experts(tensors):
    """A state with gates and ups of experts as tensors of their own, all views of the state's."""
    made = {}
    in_turn = any(key.endswith("gate_up_proj_bias") for key in tensors)  # gpt-oss: transposed, and with biases
    for key, tensor in tensors.items():
        stem, joined, _ = key.partition("experts.gate_up_proj")
        kind = "bias" if key.endswith("proj_bias") else "weight"
        if in_turn and ".experts." in key:
            whole = tensor if kind == "bias" else tensor.transpose(1, 2)
            if joined:
                made[f"{stem}experts.gate_proj.{kind}"] = whole[:, 0::2]
                made[f"{stem}experts.up_proj.{kind}"] = whole[:, 1::2]
            else:
                made[key.removesuffix("_bias") + f".{kind}"] = whole
        elif joined:
            gates, ups = tensor.chunk(2, 1)
            made |= {f"{stem}experts.gate_proj.weight": gates, f"{stem}experts.up_proj.weight": ups}
        else:
            made[key + ".weight" if key.endswith("experts.down_proj") else key] = tensor
    return made


def write(path, family, kinds=GGMLQuantizationType.F32, *, change=None, tokens=True, named=(), unmarked=(), **changes):
    """Write a file; returns transformers' model with the very same weights.

    kinds: How matrices are stored: one way, or several, which they take in turn.
    change: Called with the writer before it is closed.
    named: Names of more special tokens; they come before the last two.
    unmarked: The same, but the file says that they are ordinary ones.
    """
    model = make_model(family, **(SIZES | changes))
    config = model.config
    name = NAMES[config.model_type]
    writer = GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    describe(writer, name, config, head)
    if tokens:
        every = byte_tokens()
        last = [*named, *unmarked, "<|end|>", "<|turn|>"]
        every += [f"<unused{n}>" for n in range(config.vocab_size - len(every) - len(last))] + last
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("smollm")
        writer.add_token_list(every)
        writer.add_token_types(
            [3 if token[0] == "<" and len(token) > 1 and token not in unmarked else 1 for token in every]
        )
        writer.add_token_merges(MERGES)
        writer.add_eos_token_id(len(every) - 2)
        writer.add_eot_token_id(len(every) - 1)
        writer.add_chat_template("{% for message in messages %}{{ message['content'] }}<|turn|>{% endfor %}")
    kept, kinds = split_experts(model.state_dict()), itertools.cycle(kinds if isinstance(kinds, list) else [kinds])
    numbers = {arch: number for number, arch in MODEL_ARCH_NAMES.items()}
    names = get_tensor_name_map(numbers.get(name, numbers["llama"]), config.num_hidden_layers)
    with torch.no_grad():
        for key, tensor in kept.items():
            if key == "lm_head.weight" and config.tie_word_embeddings:
                continue
            rotated = name in IN_PAIRS and (".q_proj." in key or ".k_proj." in key)
            heads = config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads
            offset = 1.0 if name in ("gemma2", "gemma3") and "norm" in key else 0.0
            kind = GGMLQuantizationType.F32 if key.endswith("bias") else next(kinds)
            packed, as_kind, back = stored(in_pairs(tensor, heads) if rotated else tensor + offset, kind)
            renamed = key.replace("correction_bias", "correction.bias").replace(".sinks", ".sinks.weight")
            stem, _, ending = renamed.rpartition(".")
            writer.add_tensor(f"{names.get_name(stem)}.{ending}", numpy.ascontiguousarray(packed), raw_dtype=as_kind)
            back = back - offset
            if rotated:  # and back to halves
                back = back.reshape(heads, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
            tensor.copy_(back)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
