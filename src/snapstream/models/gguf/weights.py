"""Loads the tensors of a GGUF file: blocks as they are, others as numbers, a few rows at a time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from snapstream.errors import CheckpointError
from snapstream.kernels.formats import FORMATS, Format
from snapstream.models.decoder import DecoderModel
from snapstream.models.gguf.configuration import FREQUENCY_FACTORS, ROTATES_PAIRS, architecture
from snapstream.models.gguf.container import Container, open_container
from snapstream.models.names import Place
from snapstream.models.progress import with_progress
from snapstream.models.storage import fill, fill_tiles, rows_at_once, target_of

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


def stored_formats(path: Path, places: Mapping[str, Place]) -> dict[str, Format]:
    """Formats of the tensors that are in blocks and can stay so, by their names in ``places``."""
    file, by_number = open_container(path), {each.number: each for each in FORMATS.values()}
    kinds = {name: by_number.get(file.tensors[stored_name(name)].kind) for name in places}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def widened_types(path: Path, places: Mapping[str, Place]) -> set[str]:
    """Names of the types in blocks that become numbers when they are loaded."""
    from gguf import GGMLQuantizationType as Type

    file, kept = open_container(path), {each.number for each in FORMATS.values()}
    types = {file.tensors[stored_name(name)].kind for name in places}
    return {Type(each).name for each in types - kept} - {"F64", "F32", "F16", "BF16"}


def fill_model(path: Path, model: DecoderModel, places: Mapping[str, Place]) -> None:
    """Read all tensors into a model's parameters.

    Args:
        path: The file; its tensors must have been checked against ``places``.
        model: The model. Its rotary frequencies are divided in place if the file has factors for them.
        places: Destination of each tensor.

    Raises:
        CheckpointError: The quantization of a tensor is not supported, or the file has the wrong number of factors.
    """
    file, frequencies = open_container(path), model.rotation_of(0).frequencies
    for name, place in with_progress(places.items(), len(places)):
        source, (target, kind) = stored_name(name), target_of(model, place)
        order = rows_in_order(file, name, model.spec.head_dim)
        if kind is not None and file.tensors[source].kind == kind.number:
            fill_tiles(target, kind, file.stored_rows(source), torch.from_numpy(order))
        else:
            _read_numbers(file, source, (target, kind), order)
    if FREQUENCY_FACTORS in file.tensors:
        factors = file.rows(FREQUENCY_FACTORS, numpy.arange(1))[0]
        if factors.shape != tuple(frequencies.shape):
            raise CheckpointError(f"{path}: {FREQUENCY_FACTORS} has {len(factors)} numbers, not {len(frequencies)}")
        frequencies.div_(torch.from_numpy(factors).to(frequencies.device))


def _read_numbers(
    file: Container, source: str, target: tuple[Tensor, Format | None], order: NDArray[numpy.int64]
) -> None:
    """Read rows of a tensor, in some order, as numbers."""
    shape = file.tensors[source].shape
    if len(shape) == 1:
        whole = file.rows(source, numpy.arange(1))[0]
        target[0].copy_(torch.from_numpy(whole[order] if len(order) == len(whole) else whole))
        return
    step = rows_at_once(shape[1])
    for at in range(0, len(order), step):
        fill(*target, torch.from_numpy(file.rows(source, order[at : at + step])), at)


def stored_name(name: str) -> str:
    """The name in a GGUF file of a tensor with a given name in transformers."""
    stem, _, kind = name.rpartition(".")
    layer = _LAYER.match(stem)
    return f"blk.{layer[1]}.{_OF_LAYER[layer[2]]}.{kind}" if layer else f"{_GLOBAL[stem]}.{kind}"


def rows_in_order(file: Container, name: str, head_dim: int) -> NDArray[numpy.int64]:
    """Which row of a tensor comes first, second, ... in this package; of a tensor of one dimension, which number."""
    shape = file.tensors[stored_name(name)].shape
    count = shape[0] if len(shape) > 1 or ".bias" in name else 1
    if architecture(file) in ROTATES_PAIRS and (".q_proj." in name or ".k_proj." in name):
        return _halves(count, head_dim)
    return numpy.arange(count)


def _halves(count: int, size: int) -> NDArray[numpy.int64]:
    """Row order that converts heads stored for rotation in neighboring pairs to rotation in halves."""
    return numpy.arange(count).reshape(-1, size // 2, 2).swapaxes(1, 2).reshape(-1)
