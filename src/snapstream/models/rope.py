"""Rotary position embedding, with the parameters and scalings of ``transformers``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rope_frequencies(config: Any) -> tuple[Tensor, float]:
    """Inverse frequencies ``[D / 2]`` (float32) and the factor on sine and cosine for a configuration."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = config.rope_parameters
    kind = parameters.get("rope_type", "default")
    with torch.device("cpu"):
        if kind != "default":
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config)
            return frequencies.float(), float(scaling)
        # transformers has this one in its models only, and these take 40 MB to import.
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 1.0 / (parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)), 1.0


def longest_sequence(config: Any) -> int:
    """Tokens of the longest sequence that a model's rotation was scaled for, by the rules of vLLM.

    ``max_position_embeddings`` is the length before scaling where ``linear`` scaling is added to a model, so the factor
    lengthens it; ``yarn`` names the length before scaling itself. Llama 3's is mostly the length after scaling.
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


def rope_table(positions: Tensor, frequencies: Tensor, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine for each position.

    Computed from the true position each time, in float32: a table up to the longest position would be one more thing
    to size.

    Args:
        positions: int64 ``[T]``.
        frequencies: ``[D / 2]``.
        scaling: Factor on both.
        dtype: Type of the result.

    Returns:
        Two tensors ``[T, 1, D]``; the axis of size 1 is for heads.
    """
    angles = positions[:, None].float() * frequencies
    angles = torch.cat((angles, angles), -1)[:, None]
    return (angles.cos() * scaling).to(dtype), (angles.sin() * scaling).to(dtype)
