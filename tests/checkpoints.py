"""Tiny random checkpoints of every supported family, saved by transformers itself."""

import json
import random
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3DecoderLayer, DeepseekV3RMSNorm

SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.25,  # large enough that greedy choices are not near ties
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 512,
}
GROUPED = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3-gqa": ("Llama", {"rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}),
    "llama-biases": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 32}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 32}),
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 40.0,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.5,
    "original_max_position_embeddings": 64,
}
# One dense layer, one with experts.
DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 96,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 32,
    "v_head_dim": 48,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
V3 = DEEPSEEK | {
    "topk_method": "noaux_tc",  # vLLM reads these two from the config, transformers takes them for granted
    "scoring_func": "sigmoid",
}
V2_LITE = DEEPSEEK | {"q_lora_rank": None, "topk_method": "greedy", "n_shared_experts": 2, "num_experts_per_tok": 3}
LATENT = {
    # Latents of the size that vLLM's CPU kernel knows.
    "deepseek-v3": (
        "DeepseekV3",
        V3 | {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "v_head_dim": 32},
    ),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        V3 | {"rope_parameters": YARN, "attention_bias": True, "n_group": 4, "topk_group": 2, "norm_topk_prob": False},
    ),
    "deepseek-v3-halves": ("DeepseekV3", V3 | {"rope_interleave": False, "n_group": 1}),
    "deepseek-v2": (
        "DeepseekV2",
        DEEPSEEK | {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, "rope_parameters": YARN},
    ),
    "deepseek-v2-lite": ("DeepseekV2", V2_LITE),
    "mistral4": (
        "Mistral4",
        DEEPSEEK
        | {
            "n_group": 1,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
            "pad_token_id": 0,
            "rope_parameters": YARN | {"llama_4_scaling_beta": 0.3},
        },
    ),
}
# Layers with a window, beside layers without; in Qwen3 here they rotate by other angles, too.
WINDOWED = {
    "mistral-windows": ("Mistral", {"sliding_window": 20, "head_dim": 32}),
    "qwen2-windows": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 13, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen3-windows": (
        "Qwen3",
        {
            "head_dim": 32,
            "num_hidden_layers": 3,
            "use_sliding_window": True,
            "sliding_window": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
}
HALF = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "original_max_position_embeddings": 64,
    "short_factor": [1.0 + 0.1 * number for number in range(12)],
    "long_factor": [1.5 + 0.4 * number for number in range(12)],
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.2,
    "logits_scaling": 2.0,
}
# Like Llama, but for norms, factors, or what is rotated.
NEAR = {
    "phi3": (
        "Phi3",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "original_max_position_embeddings": 64,
            "rope_parameters": LONG_ROPE,
            "pad_token_id": 0,
        },
    ),
    "granite": ("Granite", MULTIPLIERS | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "granite-dense": (
        "GraniteMoeHybrid",
        MULTIPLIERS
        | {
            "num_local_experts": 0,
            "shared_intermediate_size": 96,
            "layer_types": ["full_attention"] * 2,
            "position_embedding_type": "rope",
        },
    ),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0], "pad_token_id": 0}),
    "olmo2": ("Olmo2", {"attention_bias": True}),
    "olmo3": (
        "Olmo3",
        {"head_dim": 32, "sliding_window": 20, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "ministral3": (
        "Ministral3",
        {"head_dim": 32, "pad_token_id": 0, "rope_parameters": YARN | {"llama_4_scaling_beta": 0.3}},
    ),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 20,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 20.0,
            "attn_implementation": "eager",  # the others have no cap
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 32,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 24,
        },
    ),
    "muse": (
        "MuseGlimmer",
        {
            "head_dim": 32,
            "sliding_window": 20,
            "qk_scale_factor": 2.5,
            "output_multiplier": 0.4,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    "glm": ("Glm", {"head_dim": 32, "rope_parameters": HALF, "attention_bias": True, "pad_token_id": 0}),
    "glm4": ("Glm4", {"head_dim": 32, "rope_parameters": HALF, "attention_bias": True, "pad_token_id": 0}),
}
# Heads of two sizes, and in the first two values from keys; experts in one, shared caches in the other.
PAIR = ["sliding_attention", "full_attention"]
GEMMA4 = {
    "head_dim": 32,
    "global_head_dim": 64,
    "sliding_window": 20,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 96,
    "layer_types": PAIR,
    "final_logit_softcapping": 20.0,
    "tie_word_embeddings": True,
}
NEAR |= {
    "gemma4": ("Gemma4", GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1}),
    "gemma4-moe": (
        "Gemma4",
        GEMMA4
        | {
            "attention_k_eq_v": True,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 64,
        },
    ),
    "gemma4-shared": (
        "Gemma4",
        GEMMA4
        | {
            "hidden_size_per_layer_input": 32,
            "num_hidden_layers": 6,
            "num_kv_shared_layers": 4,
            "use_double_wide_mlp": True,
            "layer_types": [*PAIR, *PAIR[::-1], *PAIR],
        },
    ),
}
# Experts in some or all layers.
EXPERTS = {
    "mixtral": (
        "Mixtral",
        {"head_dim": 32, "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
    ),
    "gpt-oss": (
        "GptOss",
        {
            "head_dim": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "intermediate_size": 64,
            "sliding_window": 20,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 32.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "truncate": False,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "head_dim": 32,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 64,
            "norm_topk_prob": True,
            "mlp_only_layers": [0],
        },
    ),
    "olmoe": (
        "Olmoe",
        {
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "norm_topk_prob": False,
        },
    ),
    "glm4-moe": (
        "Glm4Moe",
        {
            "head_dim": 32,
            "rope_parameters": HALF,
            "attention_bias": True,
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "moe_intermediate_size": 64,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.5,
        },
    ),
}
STATE = {
    "head_dim": 32,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": HALF,
}
MOE = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
}
# Layers with a state instead of a cache, around one with full attention and a gate.
HYBRIDS = {
    "qwen3-next": ("Qwen3Next", STATE | MOE | {"norm_topk_prob": False, "mlp_only_layers": [1]}),
    "qwen3.5": (
        "Qwen3_5",
        STATE
        | {
            "linear_num_value_heads": 6,
            "linear_value_head_dim": 64,
            "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "qwen3.5-moe": ("Qwen3_5Moe", STATE | MOE | {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 3}),
}
FAMILIES = GROUPED | LATENT | WINDOWED | NEAR | EXPERTS | HYBRIDS
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
OTHER_THETA = 70.0
"""Base of the rotation of Qwen3's layers with a window."""


def load_peer(directory: Path, **how):
    """A checkpoint as transformers has it; AutoModelForCausalLM does not know those only used within others."""
    (name,) = json.loads((directory / "config.json").read_text())["architectures"]
    return getattr(transformers, name).from_pretrained(directory, **how)


def make_model(family: str, seed: int = 0, **changes):
    name, settings = FAMILIES[family]
    torch.manual_seed(seed)
    is_part = name in ("Gemma3", "Gemma4", "MuseGlimmer", "Qwen3_5", "Qwen3_5Moe")
    kind = f"{name}TextConfig" if is_part else f"{name}Config"
    config = getattr(transformers, kind)(**(SMALL | settings | changes))
    made = getattr(transformers, f"{name}ForCausalLM", None)
    if made is None:  # only within a model of texts and images
        config = getattr(transformers, f"{name}Config")(text_config=config.to_dict(), vision_config=VISION)
        made = getattr(transformers, f"{name}ForConditionalGeneration")
    model = made(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1 or name.endswith("bias"):  # they start at 0 or 1, where a mistake would not show
                parameter.add_(torch.randn_like(parameter) * 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.add_(torch.randn_like(buffer) * 0.2)
    return model


def save_checkpoint(directory: Path, family: str = "llama3-gqa", **kwargs):
    """Save a tiny checkpoint; returns the transformers model."""
    shard = kwargs.pop("max_shard_size", "5GB")
    dtype = kwargs.pop("dtype", torch.float32)
    model = make_model(family, **kwargs).to(dtype)
    model.save_pretrained(directory, max_shard_size=shard)
    if family == "qwen3-windows":
        _rotate_apart(directory, model)
    return model


def _rotate_apart(directory: Path, model) -> None:
    """Give layers with a window a rotation of their own; transformers' Qwen3 has one for all, so hooks replace it."""
    config = json.loads((directory / "config.json").read_text())
    theta, size = config["rope_parameters"]["rope_theta"], config["head_dim"]
    thetas = {"full_attention": theta, "sliding_attention": OTHER_THETA}
    config["rope_parameters"] = {kind: {"rope_type": "default", "rope_theta": each} for kind, each in thetas.items()}
    (directory / "config.json").write_text(json.dumps(config))
    try:
        transformers.AutoConfig.from_pretrained(directory)
    except AttributeError:  # 5.17, for one
        pytest.skip("this version of transformers knows no Qwen3 whose layers rotate differently")
    frequencies = 1 / OTHER_THETA ** (torch.arange(0, size, 2) / size)

    def replace(layer, args, kwargs):
        cosine = kwargs["position_embeddings"][0]
        angles = kwargs["position_ids"][..., None].float() * frequencies
        both = (torch.cat((part, part), -1).to(cosine.dtype) for part in (angles.cos(), angles.sin()))
        return args, kwargs | {"position_embeddings": tuple(both)}

    for layer, kind in zip(model.model.layers, model.config.layer_types, strict=True):
        if kind == "sliding_attention":
            layer.register_forward_pre_hook(replace, with_kwargs=True)


class NextToken(DeepseekV3DecoderLayer):
    """DeepSeek-V3's module for multi-token prediction, on the layer that transformers has."""

    def __init__(self, config):
        super().__init__(config, config.num_hidden_layers)
        size = config.hidden_size
        self.enorm, self.hnorm, self.norm = (DeepseekV3RMSNorm(size, config.rms_norm_eps) for _ in range(3))
        self.eh_proj = torch.nn.Linear(2 * size, size, bias=False)


def save_next_token(directory: Path, config, seed: int = 0) -> NextToken:
    """Add a random module to a checkpoint, with DeepSeek's names, and with the copies that are not needed."""
    torch.manual_seed(seed)
    config._attn_implementation, config._experts_implementation = "snapstream_oracle", "eager"  # see tests/peers.py
    module = NextToken(config).eval().requires_grad_(False)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        if tensor.dim() > 1:
            tensor.normal_(std=config.initializer_range)
        else:
            tensor.copy_(torch.randn_like(tensor) * 0.2 + ("norm" in name))
    size, tensors = config.hidden_size, {}
    for name, tensor in module.state_dict().items():
        if ".experts." not in name:
            tensors[name.replace("norm.weight", "shared_head.norm.weight") if name == "norm.weight" else name] = tensor
            continue
        for expert, each in enumerate(tensor):
            halves = {"gate_proj": each[: len(each) // 2], "up_proj": each[len(each) // 2 :]}
            parts = halves if "gate_up" in name else {"down_proj": each}
            tensors |= {f"mlp.experts.{expert}.{part}.weight": half for part, half in parts.items()}
    for name in ("embed_tokens", "shared_head.head"):
        tensors[f"{name}.weight"] = torch.zeros(config.vocab_size, size)
    file = directory / "model.safetensors"
    named = {f"model.layers.{config.num_hidden_layers}.{name}": each.contiguous() for name, each in tensors.items()}
    save_file(load_file(file) | named, file, metadata={"format": "pt"})
    return module


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random tokens that every checkpoint here knows, none of them special."""
    rng = random.Random(seed)
    return [rng.randrange(3, SMALL["vocab_size"]) for _ in range(length)]


def prompt_before_words(generate, length, count):
    """A prompt behind which a model's first tokens are words, none of them special, whatever the policy keeps.

    Args:
        generate: Makes token ids of a prompt.
        length: Tokens of the prompt.
        count: So many first ones.
    """
    prompts = (prompt(length, seed) for seed in range(100))
    return next(one for one in prompts if min(generate(one)[:count]) > 2)
