"""Reads the configuration of a GGUF file as the ``transformers`` configuration of the same model.

The classes of ``transformers`` take longer to import than a small model to load. They are used where they compute
something; otherwise the file and :mod:`snapstream.models.gguf.architectures` say everything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy

from snapstream.errors import CheckpointError, first_line
from snapstream.models.families import read_spec
from snapstream.models.gguf.architectures import Architecture, Metadata, architecture
from snapstream.models.gguf.container import Container, open_container
from snapstream.models.rope import longest_sequence
from snapstream.models.spec import ModelSpec

_DTYPES = {0: "float32", 1: "float16"}
"""Dtypes of unquantized tensors by kind. With others, numbers are bfloat16, which is precise enough for blocks."""
FREQUENCY_FACTORS = "rope_freqs.weight"
"""Tensor with the divisors of Llama 3's rotary frequencies."""
LONG_FACTORS = {"long_factor": "rope_factors_long.weight", "short_factor": "rope_factors_short.weight"}
"""Tensors with the divisors of LongRoPE's, for long and for short sequences."""


def load_gguf_spec(path: Path) -> ModelSpec:
    """Read the configuration of a file.

    Raises:
        CheckpointError: The file cannot be read, is damaged, or is not supported.
    """
    file = open_container(path)
    try:
        return read_spec(configuration(file), ends(file))
    except CheckpointError:
        raise
    except Exception as error:  # transformers validates with exceptions of many kinds
        raise CheckpointError(f"{path}: {first_line(error)}") from error


def configuration(file: Container) -> Any:
    """Build the ``transformers`` configuration, or what has the same attributes."""
    name, kind = architecture(file)
    about = Metadata(file, name)
    hidden, heads = about.number("embedding_length"), about.number("attention.head_count")
    shape = file.tensors.get("token_embd.weight")
    if shape is None:
        raise CheckpointError(f"{file.path} has no token_embd.weight; it is damaged, or not a language model")
    if about.number("block_count") > len(file.tensors):
        raise CheckpointError(f"{file.path} is damaged: it has more layers than tensors ({len(file.tensors)})")
    head = about.number("attention.key_length", hidden // heads)
    with_attention = (layer for layer in range(about.number("block_count")) if about.has(f"blk.{layer}.attn_q.weight"))
    first = next(with_attention, 0)
    bias = {part: about.has(f"blk.{first}.{part}.bias") for part in ("attn_q", "attn_output", "ffn_up")}
    if name == "llama" and bias["attn_q"] != bias["attn_output"]:
        raise CheckpointError(f"{file.path}: biases of queries, but not of attention's output, are not supported")
    if any(about.value("rope.dimension_sections", ())) and not kind.sections:
        raise CheckpointError(f"{file.path}: rotation by several positions (images, M-RoPE) is not supported")
    layers = about.number("block_count") - int(about.value("nextn_predict_layers", 0))  # without those for MTP
    first_layer = 0 if kind.by_layer else None
    rope, kinds = _rope(about), {stored.kind for stored in file.tensors.values()}
    settings = {
        "architectures": [kind.model],
        "vocab_size": shape.shape[0],
        "hidden_size": hidden,
        "intermediate_size": about.number(
            "feed_forward_length", about.value("expert_feed_forward_length", 0), layer=first_layer
        ),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": about.number("attention.head_count_kv", heads, layer=first_layer),
        "head_dim": head,
        "hidden_act": "silu",
        "rms_norm_eps": float(about.value("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": about.number("context_length"),
        "rope_parameters": rope,
        "sliding_window": None,  # some configurations would have one by default
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": bias["attn_output"],
        "mlp_bias": bias["ffn_up"],
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "dtype": _DTYPES.get(shape.kind, "bfloat16") if kinds <= {*_DTYPES} else "bfloat16",
    }
    for key in ("attention.value_length", "rope.dimension_count"):
        size = about.number(key, head)
        if kind.partial and key == "rope.dimension_count" and size < head:
            rope["partial_rotary_factor"] = size / head
        elif size != head:
            raise CheckpointError(
                f"{file.path}: {name}.{key} is {size}, but the head size is {head}; other sizes are not supported"
            )
    window = about.value("attention.sliding_window", None)
    if kind.windowed and window:
        settings["sliding_window"] = int(window)
    settings |= kind.settings(about, settings)
    config = SimpleNamespace(**settings) if _is_plain(kind, settings) else _of_transformers(kind, settings)
    if window and config.sliding_window is None and window < longest_sequence(config):
        raise CheckpointError(
            f"{file.path}: sliding-window attention ({window} tokens) is not supported in GGUF; use the safetensors "
            "checkpoint"
        )
    return config


def _is_plain(kind: Architecture, settings: Mapping[str, Any]) -> bool:
    """Whether ``transformers`` computes nothing: layers are alike, and rotation is not scaled."""
    rope = settings["rope_parameters"]
    sets = [rope] if "rope_type" in rope else rope.values()
    return not kind.by_layer and all(each["rope_type"] == "default" for each in sets)


def _of_transformers(kind: Architecture, settings: dict[str, Any]) -> Any:
    import transformers

    return getattr(transformers, kind.config)(**settings)


def _long_rope(about: Metadata) -> dict[str, Any]:
    factors = {name: about.file.rows(tensor, numpy.arange(1))[0].tolist() for name, tensor in LONG_FACTORS.items()}
    context = about.number("context_length")
    original = about.number("rope.scaling.original_context_length", context)
    parameters = {"rope_type": "longrope", "original_max_position_embeddings": original, **factors}
    scale = about.value("rope.scaling.attn_factor", None)
    if scale is not None:
        return parameters | {"attention_factor": float(scale)}
    return parameters | {"factor": context / original}


def ends(file: Container) -> tuple[int, ...]:
    """Tokens that end a turn or a completion, in addition to the end-of-text token."""
    names = ("eot_token_id", "eom_token_id", "fim_pad_token_id", "fim_rep_token_id", "fim_sep_token_id")
    found = (file.metadata.get(f"tokenizer.ggml.{name}") for name in names)
    return tuple(token for token in found if isinstance(token, int))


def _rope(about: Metadata) -> dict[str, Any]:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": float(about.value("rope.freq_base", 10000.0))}
    # Old files state only the factor, in rope.scale_linear.
    factor = float(about.value("rope.scaling.factor", None) or about.value("rope.scale_linear", None) or 0)
    kind = about.value("rope.scaling.type", "linear" if factor else "none")
    if all(about.has(name) for name in LONG_FACTORS.values()):
        return parameters | _long_rope(about)
    if kind == "none" or (kind == "linear" and factor in (0, 1)):
        return parameters
    if kind not in ("linear", "yarn"):
        raise CheckpointError(
            f"{about.file.path}: RoPE scaling {kind!r} is not supported in GGUF; supported: linear, yarn"
        )
    if not 1 <= factor < math.inf:
        raise CheckpointError(f"{about.file.path}: the factor of RoPE scaling is {factor:g}; it must be 1 or more")
    parameters |= {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        context = about.number("context_length")
        parameters["original_max_position_embeddings"] = about.number("rope.scaling.original_context_length", context)
        for ours, theirs in (("beta_fast", "yarn_beta_fast"), ("beta_slow", "yarn_beta_slow")):
            value = about.value(f"rope.scaling.{theirs}", None)
            if value is not None:
                parameters[ours] = float(value)
        multiplier = float(about.value("rope.scaling.yarn_log_multiplier", 0))
        if multiplier:  # what llama.cpp makes of it
            parameters |= {"mscale": 1.0, "mscale_all_dim": multiplier}
        scale = about.value("rope.scaling.attn_factor", about.value("rope.scaling.yarn_attn_factor", None))
        if scale is not None:  # a factor on YaRN's own; transformers expects the product of both
            parameters["attention_factor"] = float(scale) * (0.1 * math.log(factor) + 1.0)
    return parameters
