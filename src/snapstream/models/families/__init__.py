"""The supported families of models, and what they have in common."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from snapstream.errors import CheckpointError
from snapstream.kernels.plain import Activation
from snapstream.models.families.deepseek import DEEPSEEK
from snapstream.models.families.family import Family
from snapstream.models.families.gemma import GEMMA
from snapstream.models.families.gemma4 import GEMMA4
from snapstream.models.families.glm import GLM, GLM_EXPERTS
from snapstream.models.families.gpt_oss import GPT_OSS
from snapstream.models.families.granite import GRANITE, GRANITE_DENSE
from snapstream.models.families.llama import LLAMA
from snapstream.models.families.mixtral import MIXTRAL, QWEN_EXPERTS
from snapstream.models.families.muse import MUSE
from snapstream.models.families.olmo import OLMO, OLMOE
from snapstream.models.families.phi import PHI
from snapstream.models.families.qwen_next import QWEN_NEXT
from snapstream.models.families.smollm import SMOLLM
from snapstream.models.names import Place, linear_places, norm_place, norm_places
from snapstream.models.rope import longest_sequence
from snapstream.models.spec import ModelSpec, end_tokens

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    DEEPSEEK,
    GEMMA,
    GEMMA4,
    GLM,
    GLM_EXPERTS,
    GPT_OSS,
    GRANITE,
    GRANITE_DENSE,
    MIXTRAL,
    MUSE,
    OLMO,
    OLMOE,
    PHI,
    QWEN_EXPERTS,
    QWEN_NEXT,
    SMOLLM,
)
WRAPPED = {
    "Gemma3ForConditionalGeneration": {"gemma3_text": "Gemma3ForCausalLM"},
    "Gemma4ForConditionalGeneration": {"gemma4_text": "Gemma4ForCausalLM"},
    "Gemma4UnifiedForConditionalGeneration": {"gemma4_unified_text": "Gemma4ForCausalLM"},
    "MuseGlimmerForConditionalGeneration": {"muse_glimmer_text": "MuseGlimmerForCausalLM"},
    "Qwen3_5ForConditionalGeneration": {"qwen3_5_text": "Qwen3_5ForCausalLM"},
    "Qwen3_5MoeForConditionalGeneration": {"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    "Mistral3ForConditionalGeneration": {
        "mistral": "MistralForCausalLM",
        "ministral3": "Ministral3ForCausalLM",
        "mistral4": "Mistral4ForCausalLM",
    },
}
"""Models of texts and images: types and architectures of the model of texts within, which is used alone."""
ACTIVATIONS = {"silu": Activation.SILU, "gelu_pytorch_tanh": Activation.GELU}
"""Supported activations, by their names in ``config.json``."""


def supported_architectures() -> tuple[str, ...]:
    """Names of all supported architectures."""
    return (*(name for family in FAMILIES for name in family.architectures), *WRAPPED)


def family_of(architecture: str) -> Family:
    """The family of an architecture.

    Raises:
        CheckpointError: The architecture is not supported.
    """
    for family in FAMILIES:
        if architecture in family.architectures:
            return family
    raise CheckpointError(
        f"architecture {architecture} is not supported; supported: {', '.join(supported_architectures())}"
    )


def make_block(spec: ModelSpec, layer: int) -> nn.Module:
    """A layer of a model."""
    return family_of(spec.architecture).block(spec, layer)


def read_spec(config: Any, more_ends: tuple[int, ...] = ()) -> ModelSpec:
    """Read a ``transformers`` configuration.

    Args:
        config: The configuration.
        more_ends: Tokens that end a sequence, in addition to those in the configuration.

    Raises:
        CheckpointError: The architecture, or one of its features, is not supported.
    """
    named = getattr(config, "architectures", None) or [type(config).__name__.replace("Config", "ForCausalLM")]
    architecture, whole = str(named[0]), config
    if architecture in WRAPPED:
        config = config.text_config
        within = WRAPPED[architecture].get(config.model_type)
        if within is None:
            raise CheckpointError(f"{architecture} with a text model of type {config.model_type!r} is not supported")
        architecture = within
    family = family_of(architecture)
    activation = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
    if activation not in ACTIVATIONS:
        raise CheckpointError(f"activation {activation!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    common = {
        "architecture": architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": getattr(config, "intermediate_size", 0),
        "layers": config.num_hidden_layers,
        "heads": config.num_attention_heads,
        "norm_epsilon": config.rms_norm_eps,
        "max_position": longest_sequence(config),
        "tied_embeddings": bool(config.tie_word_embeddings),
        "mlp_bias": bool(getattr(config, "mlp_bias", False)),
        "activation": ACTIVATIONS[activation],
        "dtype": _dtype(whole, config),
        "eos_token_ids": tuple(sorted({*_ends(whole), *_ends(config), *more_ends})),
        "source": config,
        "wrapped": whole is not config,
        "weight_block": _weight_block(whole),
    }
    return ModelSpec(**common | family.fields(config, architecture))


def tensor_places(spec: ModelSpec) -> dict[str, Place]:
    """The destination of every tensor that a checkpoint of this model must have, by name."""
    family = family_of(spec.architecture)
    places = {
        "model.embed_tokens.weight": Place("embedding", (spec.vocab_size, spec.hidden_size)),
        "model.norm.weight": norm_place("norm", spec.hidden_size, spec),
    }
    if not spec.tied_embeddings:
        places["lm_head.weight"] = Place("head.weight", (spec.vocab_size, spec.hidden_size))
    places |= family.apart(spec)
    for layer in range(spec.layers):
        places |= family.places(f"model.layers.{layer}", f"blocks.{layer}", spec, layer)
    if spec.has_mtp:
        places |= _next_token("mtp", spec, family)
    return places


def _next_token(target: str, spec: ModelSpec, family: Family) -> dict[str, Place]:
    """The next-token module's own tensors.

    Its embedding and output projection are the model's; checkpoints may contain second copies of them here.
    """
    layer, hidden = spec.layers, spec.hidden_size
    source = f"model.layers.{layer}"
    places = norm_places(source, target, spec, enorm="embedding_norm", hnorm="hidden_norm")
    places[f"{source}.shared_head.norm.weight"] = Place(f"{target}.norm.weight", (hidden,))
    places |= linear_places(f"{source}.eh_proj", f"{target}.join", hidden, 2 * hidden)
    return places | family.places(source, f"{target}.block", spec, layer)


def _ends(config: Any) -> tuple[int, ...]:
    return end_tokens(getattr(config, "eos_token_id", None))


def _dtype(*configs: Any) -> torch.dtype:
    """The dtype that the first of several configurations states; float32 if none does."""
    stated = (getattr(config, "dtype", None) for config in configs)
    dtype = next((each for each in stated if each), torch.float32)
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(f"checkpoint dtype {dtype} is not supported; supported: float32, bfloat16, float16")
    return dtype


def _weight_block(config: Any) -> tuple[int, int] | None:
    """The block size of float8 weights; ``None`` for one scale per weight.

    Raises:
        CheckpointError: The weights are quantized in another way.
    """
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is None:
        return 128, 128
    settings = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    if method == "mxfp4" and config.model_type == "gpt_oss":
        return 128, 128  # four bits, which are widened on load
    if method == "fp8" and block is None:
        return None
    if method != "fp8" or not isinstance(block, list | tuple) or len(block) != 2:
        raise CheckpointError(
            f"weights quantized with {method!r} (blocks {block}) are not supported; supported: 'fp8' with scales per "
            "block or per weight, and 'mxfp4' of gpt-oss, which are converted to the engine's dtype on load"
        )
    return int(block[0]), int(block[1])
