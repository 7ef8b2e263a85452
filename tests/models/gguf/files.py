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
from snapstream.models.names import name_within
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
    "olmo3": "olmo2",
    "ministral3": "mistral3",
    "olmoe": "olmoe",
    "gemma2": "gemma2",
    "gpt_oss": "gpt-oss",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "muse_glimmer_text": "muse-glimmer",
    "glm4": "glm4",
    "glm4_moe": "glm4moe",
    "qwen3_next": "qwen3next",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
}
"""Architectures in files, by ``model_type``."""
IN_PAIRS = ("llama", "granite", "smollm3", "muse-glimmer", "mistral3")
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
    if name in ("gemma4", "muse-glimmer"):
        writer.add_sliding_window(config.sliding_window)
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if name == "muse-glimmer":
        writer.add_logit_scale(config.output_multiplier)
        for layer in range(config.num_hidden_layers):
            for part, factor in (("q", config.qk_scale_factor), ("k", 1.0)):
                writer.add_tensor(f"blk.{layer}.attn_{part}_norm.weight", numpy.full(head, factor, numpy.float32))
    if name == "gemma4":
        describe_gemma4(writer, config)
        return
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
    if name == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
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


def describe_gemma4(writer, config):
    """Heads of two sizes, and which part of the larger ones is not rotated."""
    full, slid = (config.per_layer_config[kind] for kind in ("full_attention", "sliding_attention"))
    rope, head = config.rope_parameters, full.head_dim
    writer.add_rope_freq_base(rope["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    writer.add_rope_dimension_count(head)
    writer.add_rope_dimension_count_swa(slid.head_dim)
    writer.add_key_length_swa(slid.head_dim)
    writer.add_value_length_swa(slid.head_dim)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input)
    rotated = int(head * rope["full_attention"]["partial_rotary_factor"]) // 2
    divisors = [1.0] * rotated + [1e30] * (head // 2 - rotated)
    writer.add_tensor("rope_freqs.weight", numpy.array(divisors, dtype=numpy.float32))
    if config.enable_moe_block:
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.top_k_experts)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)


def described_sizes(name, config):
    """Heads and widths; of each layer, if they differ."""
    inner, heads = getattr(config, "intermediate_size", None), config.num_key_value_heads
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if name != "gemma4":
        return head, inner, heads
    first = config.num_hidden_layers - config.num_kv_shared_layers
    layers = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    wide = [inner * (2 if config.use_double_wide_mlp and layer >= first else 1) for layer in range(len(layers))]
    full = config.per_layer_config["full_attention"]
    return full.head_dim, wide, [each.num_key_value_heads for each in layers]


def describe_states(writer, name, config):
    """What layers with a state have."""
    writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
    writer.add_ssm_state_size(config.linear_key_head_dim)
    writer.add_ssm_group_count(config.linear_num_key_heads)
    writer.add_ssm_time_step_rank(config.linear_num_value_heads)
    writer.add_ssm_inner_size(config.linear_num_value_heads * config.linear_value_head_dim)
    writer.add_full_attention_interval(config.layer_types.index("full_attention") + 1)
    if name != "qwen3next":
        rotated = int(config.head_dim * config.rope_parameters["partial_rotary_factor"]) // 2
        writer.add_rope_dimension_sections([rotated - 2 * (rotated // 3), rotated // 3, rotated // 3, 0])
    if name != "qwen35":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def split_states(tensors, name, config):
    """A state with the tensors of layers with a state as files have them.

    Also, of those that are no views, the tensor that each comes from, and where in it each of its numbers was.
    """
    made, moved, heads, shared = {}, {}, config.linear_num_value_heads, config.linear_num_key_heads
    key, value = config.linear_key_head_dim, config.linear_value_head_dim
    share = heads // shared

    def in_turn(tensor, size, axis=0):
        """Value heads in the order in which they take key heads in turn."""
        parts = tensor.unflatten(axis, (shared, share, size))
        return parts.transpose(axis, axis + 1).flatten(axis, axis + 2)

    def values_in_turn(tensor):
        return torch.cat((tensor[: 2 * shared * key], in_turn(tensor[2 * shared * key :], value)))

    def parts_of_head(tensor):
        parts = tensor.unflatten(0, (shared, -1)).split([key, key, share * value, share * value], 1)
        return torch.cat([part.flatten(0, 1) for part in parts])

    changes = {
        "in_proj_z.weight": lambda x: in_turn(x, value),
        "in_proj_a.weight": lambda x: in_turn(x, 1),
        "in_proj_b.weight": lambda x: in_turn(x, 1),
        "dt_bias": lambda x: in_turn(x, 1),
        "A_log": lambda x: in_turn(x, 1),
        "in_proj_qkv.weight": values_in_turn,
        "conv1d.weight": lambda x: values_in_turn(x[:, 0]),
        "out_proj.weight": lambda x: in_turn(x, value, 1),
    }
    if name == "qwen3next":
        changes = {"conv1d.weight": lambda x: x[:, 0], "in_proj_qkvz.weight": parts_of_head}
    channels = 2 * shared * key + heads * value
    for each, tensor in tensors.items():
        stem, _, own = each.partition("linear_attn.")
        if own not in changes:
            made[each] = tensor
            continue
        places = changes[own](torch.arange(tensor.numel()).view(tensor.shape))
        parts = {own: places}
        if own == "in_proj_qkvz.weight":
            parts = {"in_proj_qkv.weight": places[:channels], "in_proj_z.weight": places[channels:]}
        for part, at in parts.items():
            made[f"{stem}linear_attn.{part}"] = tensor.flatten()[at]
            moved[f"{stem}linear_attn.{part}"] = tensor, at
    return made, moved


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
    config = getattr(model.config, "text_config", model.config)
    if config.model_type == "gemma4_text":
        config.allow_global_per_layer_attribute_access = True
    name = NAMES[config.model_type]
    writer = GGUFWriter(path, name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    head, inner, kv_heads = described_sizes(name, config)
    if inner is not None:
        writer.add_feed_forward_length(inner)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head)
    writer.add_value_length(head)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    describe(writer, name, config, head)
    has_states = name in ("qwen3next", "qwen35", "qwen35moe")
    if has_states:
        describe_states(writer, name, config)
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
    state = {within: tensor for key, tensor in model.state_dict().items() if (within := name_within(key))}
    joined = name == "gemma4"  # its experts stay together
    kept, kinds = (
        state if joined else split_experts(state),
        itertools.cycle(kinds if isinstance(kinds, list) else [kinds]),
    )
    moved = {}
    if has_states:
        kept, moved = split_states(kept, name, config)
    numbers = {arch: number for number, arch in MODEL_ARCH_NAMES.items()}
    known = "afmoe" if name == "muse-glimmer" else name
    names = get_tensor_name_map(numbers.get(known, numbers["llama"]), config.num_hidden_layers)
    with torch.no_grad():
        for key, tensor in kept.items():
            if key == "lm_head.weight" and config.tie_word_embeddings:
                continue
            rotated = name in IN_PAIRS and (".q_proj." in key or ".k_proj." in key)
            heads = config.num_attention_heads if ".q_proj." in key else config.num_key_value_heads
            adds = name in ("gemma2", "gemma3") or (has_states and "linear_attn" not in key)
            adds = adds or (name == "muse-glimmer" and "layernorm" in key)
            offset = 1.0 if adds and "norm" in key else 0.0
            if key.endswith(("router.scale", "router.per_expert_scale")):
                product = "router.proj" if key.endswith("router.scale") else "experts.down_proj"
                owner = names.get_name(f"{key.partition('router')[0]}{product}")
                writer.add_tensor(f"{owner}.scale", tensor.numpy())
                continue
            if key.endswith("A_log"):
                writer.add_tensor(f"{names.get_name(key)}", (-tensor.exp()).numpy())
                continue
            if key.endswith("shared_expert_gate.weight"):
                tensor = tensor[0]  # noqa: PLW2901
            kind = GGMLQuantizationType.F32 if key.endswith("bias") else next(kinds)
            packed, as_kind, back = stored(in_pairs(tensor, heads) if rotated else tensor + offset, kind)
            renamed = key.replace("correction_bias", "correction.bias").replace(".sinks", ".sinks.weight")
            renamed = renamed.replace(".dt_bias", ".dt_proj.bias").replace("layer_scalar", "layer_scalar.weight")
            renamed += ".weight" if joined and renamed.endswith(("experts.gate_up_proj", "experts.down_proj")) else ""
            stem, _, ending = renamed.rpartition(".")
            writer.add_tensor(f"{names.get_name(stem)}.{ending}", numpy.ascontiguousarray(packed), raw_dtype=as_kind)
            back = back - offset
            if rotated:  # and back to halves
                back = back.reshape(heads, -1, 2, *tensor.shape[1:]).swapaxes(1, 2).reshape(tensor.shape)
            if key in moved:
                whole, places = moved[key]
                whole.view(-1)[places.flatten()] = back.flatten()
            else:
                tensor.copy_(back)
    if change is not None:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model
