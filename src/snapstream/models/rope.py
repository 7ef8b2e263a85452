"""Rotary position embedding, with the parameters and scalings of ``transformers``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rope_frequencies(config: Any) -> tuple[Tensor, float]:
    """The inverse frequencies ``[D / 2]`` (float32) and the factor on sine and cosine of a configuration."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    with torch.device("cpu"):
        if kind != "default":
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config)
            return frequencies.float(), float(scaling)
        # In transformers, this case exists only in model files, which take 40 MB to import.
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 1.0 / (parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)), 1.0


def longest_sequence(config: Any) -> int:
    """Maximum sequence length in tokens after RoPE scaling, by the same rules as vLLM.

    With ``linear`` scaling, ``max_position_embeddings`` is the length before scaling, so it is multiplied by the
    factor. ``yarn`` states the length before scaling separately. With ``llama3``, ``max_position_embeddings`` is
    usually the length after scaling.
    """
    parameters = config.rope_parameters
    longest: int = config.max_position_embeddings
    kind, factor = parameters.get("rope_type", "default"), parameters.get("factor") or 1.0
    original = parameters.get("original_max_position_embeddings")
    if kind == "yarn":
        return int((original or longest) * factor)
    if kind == "linear" or (kind == "llama3" and original and longest <= original):
        return int(longest * factor)
    return longest
