"""Loads the tensors of a GGUF file: dequantizes a few rows at a time, directly into their parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from snapstream.errors import CheckpointError
from snapstream.models.gguf.configuration import FREQUENCY_FACTORS, ROTATES_PAIRS, architecture
from snapstream.models.gguf.container import open_container
from snapstream.models.names import Place
from snapstream.models.spec import ModelSpec

_AT_ONCE = 2**24
"""Maximum number of elements that are dequantized to float32 at once."""
_GLOBAL = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_OF_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


def stored_shapes(path: Path, places: Mapping[str, Place]) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors, under their names in ``places`` or, if they are not in it, their names in the file."""
    file = open_container(path)
    shapes = {name: stored.shape for name, stored in file.tensors.items() if name != FREQUENCY_FACTORS}
    for name in places:
        stored = shapes.pop(stored_name(name), None)
        if stored is not None:
            shapes[name] = stored
    return shapes


def fill(
    path: Path, spec: ModelSpec, places: Mapping[str, Place], parameters: Mapping[str, Tensor], frequencies: Tensor
) -> None:
    """Read all tensors into their parameters.

    Args:
        path: The file; its tensors must have been checked against ``places``.
        spec: The model.
        places: Destination of each tensor.
        parameters: Parameters of the model by name.
        frequencies: Rotary frequencies, float32 ``[D / 2]``; divided in place if the file has factors for them.

    Raises:
        CheckpointError: The quantization of a tensor is not supported, or the file has the wrong number of factors.
    """
    file = open_container(path)
    in_pairs = architecture(file) in ROTATES_PAIRS
    for name, place in places.items():
        source = stored_name(name)
        columns = file.tensors[source].shape[-1]
        target = place.of(parameters[place.parameter])
        rotated = in_pairs and (".q_proj." in name or ".k_proj." in name)
        order = _halves(len(target), spec.head_dim) if rotated else numpy.arange(len(target))
        if target.dim() == 1:
            target.copy_(torch.from_numpy(file.rows(source, numpy.arange(1))[0][order]))
            continue
        step = max(1, _AT_ONCE // columns)
        for at in range(0, len(target), step):
            target[at : at + step] = torch.from_numpy(file.rows(source, order[at : at + step]))
    if FREQUENCY_FACTORS in file.tensors:
        factors = file.rows(FREQUENCY_FACTORS, numpy.arange(1))[0]
        if factors.shape != tuple(frequencies.shape):
            raise CheckpointError(f"{path}: {FREQUENCY_FACTORS} has {len(factors)} numbers, not {len(frequencies)}")
        frequencies.div_(torch.from_numpy(factors).to(frequencies.device))


def stored_name(name: str) -> str:
    """The name in a GGUF file of a tensor with a given name in transformers."""
    stem, _, kind = name.rpartition(".")
    layer = _LAYER.match(stem)
    return f"blk.{layer[1]}.{_OF_LAYER[layer[2]]}.{kind}" if layer else f"{_GLOBAL[stem]}.{kind}"


def _halves(count: int, size: int) -> NDArray[numpy.int64]:
    """Row order that converts heads stored for rotation in neighboring pairs to rotation in halves."""
    return numpy.arange(count).reshape(-1, size // 2, 2).swapaxes(1, 2).reshape(-1)
