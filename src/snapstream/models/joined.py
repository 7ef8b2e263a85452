"""Experts that a checkpoint stores as one tensor per layer, as gpt-oss and Qwen3.5 do.

In gpt-oss, ``gate_up_proj`` ``[E, hidden, 2 * inner]`` has alternating columns of gates and ups, and ``down_proj`` is
``[E, inner, hidden]``; biases are ``[E, 2 * inner]`` and ``[E, hidden]``. In Qwen3.5, experts have the rows of
products, gates before ups, and no biases.

gpt-oss is published in four bits (MXFP4). Then there are two tensors for each:
``blocks`` uint8 ``[E, rows, columns / 32, 16]``, with two numbers per byte, the first in the lower half, and ``scales``
uint8 ``[E, rows, columns / 32]``, exponents of two plus 127. Rows are then those of products, as they are here.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from snapstream.errors import CheckpointError

BLOCKS, SCALES = "_blocks", "_scales"
_NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The products that each tensor holds."""


class Joined(enum.Enum):
    """How the experts of a layer are joined: their columns, gates and ups in turn, or their rows, gates before ups."""

    COLUMNS = enum.auto()
    ROWS = enum.auto()


@dataclass(frozen=True)
class ExpertPart:
    """A product's weight or bias of one expert.

    Attributes:
        name: Its name, with the expert's number.
        shape: Its shape.
        read: Reads it from the file.
    """

    name: str
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


def expert_parts(kind: Joined, name: str, stored: Any, scales: Callable[[], Any]) -> Iterator[ExpertPart]:
    """What a tensor of all experts consists of.

    Args:
        kind: How they are joined.
        name: Its name, such as ``model.layers.0.mlp.experts.gate_up_proj``.
        stored: The slice of a safetensors file with its numbers, or with its blocks.
        scales: Finds the scales of its blocks, as a slice or as a tensor.

    Raises:
        CheckpointError: The tensor has another shape, or the scales do not fit the blocks.
    """
    source, _, own = name.rpartition(".")
    in_blocks, is_bias, in_rows = own.endswith(BLOCKS), own.endswith("_bias"), kind is Joined.ROWS
    experts, *shape = stored.get_shape()
    wanted = 3 if in_blocks else 1 if is_bias else 2
    if len(shape) != wanted or (in_blocks and (shape[2] != 16 or stored.get_dtype() != "U8")):
        what = "[experts, rows, columns / 32, 16] of bytes" if in_blocks else f"of {wanted + 1} dimensions"
        raise CheckpointError(f"{name} is {[experts, *shape]} ({stored.get_dtype()}), expected {what}")
    if in_blocks:
        rows, columns = shape[0], shape[1] * 32
        found = scales()
        is_here = isinstance(found, Tensor)
        given = list(found.shape if is_here else found.get_shape())
        are_bytes = found.dtype == torch.uint8 if is_here else found.get_dtype() == "U8"
        if given != [experts, *shape[:2]] or not are_bytes:
            scaled = name.removesuffix(BLOCKS) + SCALES
            raise CheckpointError(f"{scaled} is {given}, expected {[experts, *shape[:2]]} of bytes")
    elif is_bias:
        rows, columns = shape[0], 0
    else:
        rows, columns = shape if in_rows else reversed(shape)

    def read(expert: int, rows: slice) -> Tensor:
        whole: Tensor = stored[expert]
        if in_blocks:
            return widen(whole[rows], found[expert][rows])
        return whole[rows] if is_bias or in_rows else whole[:, rows].t()

    products = _PARTS[own.removesuffix(BLOCKS).removesuffix("_bias")]
    many, count = len(products), rows // len(products)
    for at, product in enumerate(products):
        chosen = slice(at * count, (at + 1) * count) if in_rows else slice(at, None, many)
        for expert in range(experts):
            made = (count,) if is_bias else (count, columns)
            part = f"{source}.{expert}.{product}.{'bias' if is_bias else 'weight'}"
            yield ExpertPart(part, made, functools.partial(read, expert, chosen))


def holds_experts(name: str) -> bool:
    """Whether a tensor holds all experts of a layer."""
    source, _, kind = name.rpartition(".")
    return source.endswith(".experts") and kind.removesuffix(BLOCKS).removesuffix("_bias") in _PARTS


def widen(blocks: Tensor, scales: Tensor) -> Tensor:
    """The numbers of weights in MXFP4 (OCP Microscaling Formats, 1.0), which bfloat16 holds exactly.

    Args:
        blocks: uint8 ``[rows, columns / 32, 16]``.
        scales: uint8 ``[rows, columns / 32]``.

    Returns:
        float32 ``[rows, columns]``.
    """
    table = torch.tensor((*_NUMBERS, *(-number for number in _NUMBERS)))
    both = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    return torch.ldexp(table[both.int()], scales.int()[..., None] - 127).flatten(-2)
