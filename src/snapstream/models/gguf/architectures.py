"""The architectures of GGUF files: which ``transformers`` configuration each has, and where its settings are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy

from snapstream.errors import CheckpointError
from snapstream.models.gguf.container import Container


@dataclass(frozen=True)
class Metadata:
    """The metadata whose keys begin with the architecture's name."""

    file: Container
    name: str

    def value(self, key: str, *otherwise: Any) -> Any:
        """The value of a key, which must exist if there is no other."""
        name = f"{self.name}.{key}"
        return self.file.metadata.get(name, *otherwise) if otherwise else self.file.require(name)

    def number(self, key: str, *otherwise: int, layer: int | None = None) -> int:
        """A positive number; also one that is stated for each layer, if it is the same for all, or of one ``layer``."""
        value = self.value(key, *otherwise)
        if isinstance(value, list) and layer is not None and layer < len(value):
            value = value[layer]
        if isinstance(value, list) and len(set(value)) == 1:
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            raise CheckpointError(f"{self.file.path}: {self.name}.{key} is {value!r}; it must be a positive number")
        return value

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor."""
        return tensor in self.file.tensors


_SIGMOID = 2
_GELU = {"hidden_act": "gelu_pytorch_tanh"}
_DIVISORS = "rope_freqs.weight"
_FULL, _SLIDING = "full_attention", "sliding_attention"
_Settings = Callable[[Metadata, dict[str, Any]], dict[str, Any]]


@dataclass(frozen=True)
class Architecture:
    """How files of one architecture are read.

    Attributes:
        config: Class of the configuration.
        model: Name of the model in ``config.json``.
        reordered: Whether files store query and key rows in the order for rotating neighboring pairs, not halves.
        partial: Whether a part of each head may be rotated.
        by_layer: Whether heads and widths may differ between layers; common settings are those of the first.
        names: The architecture whose names its tensors have, if the gguf package does not know its own.
        windowed: Whether the window, if there is one, is that of all layers.
        sections: Whether rotation may be by several positions, which are one and the same for texts.
        settings: Given the metadata and the settings that all have in common, the other ones.
    """

    config: str
    model: str
    reordered: bool = False
    partial: bool = False
    windowed: bool = False
    sections: bool = False
    by_layer: bool = False
    names: str | None = None
    settings: _Settings = lambda about, common: {}


def _experts(about: Metadata, inner: str = "expert_feed_forward_length") -> dict[str, Any]:
    return {
        "num_experts": about.number("expert_count"),
        "num_local_experts": about.number("expert_count"),
        "num_experts_per_tok": about.number("expert_used_count"),
        "moe_intermediate_size": about.number(inner),
    }


def _types(about: Metadata, common: dict[str, Any], period: int) -> list[str]:
    """Types of the layers: stated for each, or full attention in every so many, by default in each ``period``."""
    pattern, layers = about.value("attention.sliding_window_pattern", period), common["num_hidden_layers"]
    slides = pattern if isinstance(pattern, list) else [(layer + 1) % pattern != 0 for layer in range(layers)]
    if len(slides) < layers:
        raise CheckpointError(
            f"{about.file.path} is damaged: it lists sliding windows for {len(slides)} of {layers} layers"
        )
    return [_SLIDING if each else _FULL for each in slides]


def _ministral(about: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    """Queries of Ministral 3 grow with their position; those of Mistral Small 3.1, which has the same files, do not."""
    beta = about.value("attention.temperature_scale", None)
    return {"rope_parameters": common["rope_parameters"] | ({"llama_4_scaling_beta": float(beta)} if beta else {})}


def _olmo(about: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    """OLMo 3: windows in three of four layers, whose rotation is not scaled."""
    window = about.value("attention.sliding_window", None)
    if not window:
        return {}
    rope = common["rope_parameters"]
    return {
        "sliding_window": int(window),
        "layer_types": _types(about, common, 4),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": {"rope_type": "default", "rope_theta": rope["rope_theta"]},
        },
    }


def _granite(about: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    if not about.value("rope.scaling.finetuned", True):  # where this says whether there is any rotation
        raise CheckpointError(f"{about.file.path}: a Granite without rotation is not supported in GGUF")
    return {
        "embedding_multiplier": float(about.value("embedding_scale", 1.0)),
        "residual_multiplier": float(about.value("residual_scale", 1.0)),
        "logits_scaling": float(about.value("logit_scale", 1.0)),
        "attention_multiplier": float(about.value("attention.scale", common["head_dim"] ** -0.5)),
    }


def _gemma_scalar(common: dict[str, Any], largest: int) -> int:
    """As llama.cpp decides it: the largest model, of so many layers, has another factor on attention logits."""
    is_largest = common["num_hidden_layers"] == largest
    scalar: int = common["hidden_size"] // common["num_attention_heads"] if is_largest else common["head_dim"]
    return scalar


def _gemma2(about: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return _GELU | {
        "sliding_window": about.number("attention.sliding_window", 4096),
        "layer_types": _types(about, common, 2),
        "query_pre_attn_scalar": _gemma_scalar(common, 46),
        "attn_logit_softcapping": float(about.value("attn_logit_softcapping", 50.0)),
        "final_logit_softcapping": float(about.value("final_logit_softcapping", 30.0)),
    }


def _gemma(about: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    own = {"rope_type": "default", "rope_theta": float(about.value("rope.freq_base_swa", 10000.0))}
    return _GELU | {
        "rope_parameters": {"full_attention": common["rope_parameters"], "sliding_attention": own},
        "sliding_window": about.number("attention.sliding_window"),
        "layer_types": _types(about, common, 6),
        "query_pre_attn_scalar": _gemma_scalar(common, 62),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": about.value("final_logit_softcapping", None) or None,
    }


def _gemma4(about: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    """Divisors in the file say which part of a head is not rotated in layers with full attention."""
    layers, types = common["num_hidden_layers"], _types(about, common, 6)
    if not about.has(_DIVISORS) or len(types) != layers or _FULL not in types:
        raise CheckpointError(f"{about.file.path} is damaged: {_DIVISORS} or the pattern of windows is wrong")
    full, slid = types.index(_FULL), types.index(_SLIDING) if _SLIDING in types else 0
    own = {"rope_type": "default", "rope_theta": float(about.value("rope.freq_base_swa", 10000.0))}
    inner = [about.number("feed_forward_length", layer=layer) for layer in (0, layers - 1)]
    settings = _GELU | {
        "rope_parameters": {
            "full_attention": common["rope_parameters"] | {"rope_type": "proportional", "partial_rotary_factor": 1.0},
            "sliding_attention": own,
        },
        "sliding_window": about.number("attention.sliding_window"),
        "layer_types": types,
        "head_dim": about.number("attention.key_length_swa"),
        "global_head_dim": about.number("attention.key_length"),
        "num_key_value_heads": about.number("attention.head_count_kv", layer=slid),
        "num_global_key_value_heads": about.number("attention.head_count_kv", layer=full),
        "attention_k_eq_v": not about.has(f"blk.{full}.attn_v.weight"),
        "num_kv_shared_layers": int(about.value("attention.shared_kv_layers", 0)),
        "use_double_wide_mlp": inner[1] == 2 * inner[0],
        "hidden_size_per_layer_input": int(about.value("embedding_length_per_layer_input", 0)),
        "vocab_size_per_layer_input": common["vocab_size"],
        "final_logit_softcapping": about.value("final_logit_softcapping", None) or None,
    }
    if about.value("expert_count", 0):
        experts = _experts(about)
        settings |= experts | {"enable_moe_block": True, "top_k_experts": experts["num_experts_per_tok"]}
    return settings


def _muse(about: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    """The factor on queries is in the weights of their norms, which all are the same."""
    types = _types(about, common, 4)
    factors = {float(each) for each in about.file.rows("blk.0.attn_q_norm.weight", numpy.arange(1))[0]}
    if len(factors) != 1:
        raise CheckpointError(f"{about.file.path}: norms of queries with weights are not supported")
    theta = common["rope_parameters"]["rope_theta"]
    return {
        "sliding_window": about.number("attention.sliding_window"),
        "layer_types": types,
        "layer_rope_theta": [theta if each == _SLIDING else 0 for each in types],
        "qk_scale_factor": factors.pop(),
        "post_norm_eps": 1e-8,
        "output_multiplier": float(about.value("logit_scale")),
        "final_logit_softcapping": float(about.value("final_logit_softcapping", 0.0)),
    }


def _glm(about: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return {"attention_bias": about.has("blk.0.attn_q.bias")}


def _glm_experts(about: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    gating = about.value("expert_gating_func", _SIGMOID)
    if gating != _SIGMOID:
        raise CheckpointError(f"{about.file.path}: expert_gating_func is {gating}; supported: {_SIGMOID} (sigmoid)")
    return _experts(about) | {
        "attention_bias": about.has("blk.0.attn_q.bias"),
        "use_qk_norm": about.has("blk.0.attn_q_norm.weight"),
        "n_routed_experts": about.number("expert_count"),
        "num_nextn_predict_layers": int(about.value("nextn_predict_layers", 0)),
        "n_shared_experts": int(about.value("expert_shared_count", 0)),
        "first_k_dense_replace": int(about.value("leading_dense_block_count", 0)),
        "n_group": int(about.value("expert_group_count", 1)),
        "topk_group": int(about.value("expert_group_used_count", 1)),
        "norm_topk_prob": bool(about.value("expert_weights_norm", True)),
        "routed_scaling_factor": float(about.value("expert_weights_scale", 1.0)),
    }


def _qwen_experts(about: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return _experts(about) | {"norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}


def _gpt_oss(about: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return _experts(about) | {
        "intermediate_size": about.number("expert_feed_forward_length"),
        "sliding_window": about.number("attention.sliding_window"),
        "rope_parameters": common["rope_parameters"] | {"truncate": False},
    }


def _states(about: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    """For hybrids: layers with a state are those with a tensor ``ssm_a``. Only Qwen3.5's value heads are in turn."""
    heads, layers = about.number("ssm.time_step_rank"), range(common["num_hidden_layers"])
    settings = {
        "layer_types": [
            "linear_attention" if about.has(f"blk.{layer}.ssm_a") else "full_attention" for layer in layers
        ],
        "linear_num_value_heads": heads,
        "linear_num_key_heads": about.number("ssm.group_count"),
        "linear_key_head_dim": about.number("ssm.state_size"),
        "linear_value_head_dim": about.number("ssm.inner_size") // heads,
        "linear_conv_kernel_dim": about.number("ssm.conv_kernel"),
        "value_heads_in_turn": about.name != "qwen3next",
        "joined_inputs": [
            part for part, name in _JOINED.items() if any(about.has(name.format(layer)) for layer in layers)
        ],
    }
    if about.value("expert_count", 0):
        shared = about.number("expert_shared_feed_forward_length")
        settings |= _experts(about) | {"shared_expert_intermediate_size": shared, "norm_topk_prob": True}
    return settings


_JOINED = {"qkvz": "blk.{}.ssm_in.weight", "ba": "blk.{}.ssm_ba.weight"}
"""Names of the tensors of Qwen3-Next's joined projections; recent files have only the second."""


def _mixtral(about: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    return _experts(about, "feed_forward_length")


def _olmoe(about: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    clip = about.value("attention.clamp_kqv", None)
    return _experts(about, "feed_forward_length") | {"norm_topk_prob": False, "clip_qkv": clip or None}


def _phi(about: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    name, longest = "original_max_position_embeddings", common["max_position_embeddings"]
    return {name: common["rope_parameters"].get(name, longest)}  # the configuration would have a default


def _smollm(about: Metadata, common: dict[str, Any]) -> dict[str, Any]:
    rotated = [int((layer + 1) % 4 != 0) for layer in range(common["num_hidden_layers"])]
    return {"no_rope_layers": rotated, "use_sliding_window": False}


_LLAMA = Architecture("LlamaConfig", "LlamaForCausalLM", reordered=True)
_MIXTRAL = Architecture("MixtralConfig", "MixtralForCausalLM", reordered=True, windowed=True, settings=_mixtral)
_OLMO_3 = Architecture("Olmo3Config", "Olmo3ForCausalLM", settings=_olmo)
# Mistral's files name the architecture llama, as their layers are the same; so do Mixtral's.
ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": Architecture("MistralConfig", "MistralForCausalLM", reordered=True, windowed=True),
    "qwen2": Architecture("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": Architecture("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3moe": Architecture("Qwen3MoeConfig", "Qwen3MoeForCausalLM", settings=_qwen_experts),
    "qwen3next": Architecture("Qwen3NextConfig", "Qwen3NextForCausalLM", partial=True, settings=_states),
    "qwen35": Architecture("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", partial=True, sections=True, settings=_states),
    "qwen35moe": Architecture(
        "Qwen3_5MoeTextConfig", "Qwen3_5MoeForCausalLM", partial=True, sections=True, settings=_states
    ),
    "phi3": Architecture("Phi3Config", "Phi3ForCausalLM", partial=True, windowed=True, settings=_phi),
    "granite": Architecture("GraniteConfig", "GraniteForCausalLM", reordered=True, settings=_granite),
    "smollm3": Architecture("SmolLM3Config", "SmolLM3ForCausalLM", reordered=True, settings=_smollm),
    "mistral3": Architecture("Ministral3Config", "Ministral3ForCausalLM", reordered=True, settings=_ministral),
    "olmo2": Architecture("Olmo2Config", "Olmo2ForCausalLM"),
    "olmoe": Architecture("OlmoeConfig", "OlmoeForCausalLM", settings=_olmoe),
    "gpt-oss": Architecture("GptOssConfig", "GptOssForCausalLM", settings=_gpt_oss),
    "gemma2": Architecture("Gemma2Config", "Gemma2ForCausalLM", settings=_gemma2),
    "gemma3": Architecture("Gemma3TextConfig", "Gemma3ForCausalLM", settings=_gemma),
    "gemma4": Architecture("Gemma4TextConfig", "Gemma4ForCausalLM", by_layer=True, settings=_gemma4),
    "muse-glimmer": Architecture(
        "MuseGlimmerTextConfig", "MuseGlimmerForCausalLM", reordered=True, names="afmoe", settings=_muse
    ),
    "glm4": Architecture("Glm4Config", "Glm4ForCausalLM", partial=True, settings=_glm),
    "glm4moe": Architecture("Glm4MoeConfig", "Glm4MoeForCausalLM", partial=True, settings=_glm_experts),
}
"""Supported architectures, by their names in files."""


def architecture(file: Container) -> tuple[str, Architecture]:
    """The architecture of a file, and its name.

    Raises:
        CheckpointError: The architecture is not supported.
    """
    name = str(file.require("general.architecture"))
    if name not in ARCHITECTURES:
        raise CheckpointError(f"{file.path}: {name!r} is not supported in GGUF; supported: {', '.join(ARCHITECTURES)}")
    if name == "llama" and file.metadata.get("llama.expert_count"):
        return name, _MIXTRAL
    if name == "olmo2" and file.metadata.get("olmo2.attention.sliding_window"):
        return name, _OLMO_3
    return name, ARCHITECTURES[name]
