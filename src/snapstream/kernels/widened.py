"""Weights in blocks as numbers, of one layer at a time: for long prompts, where products of numbers are faster.

On a GPU, products of bfloat16 are several times as fast as those that read blocks. A prompt passes through one layer
before the next, so a layer's weights are widened once per prompt, into memory for one layer. On a CPU, products of many
rows widen what they need (``cpu/panels.h``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TypeGuard

import torch
from torch import Tensor

from snapstream.kernels import operations as ops
from snapstream.kernels.operations import Operation
from snapstream.kernels.products import widen
from snapstream.kernels.weight import BlockWeight, DenseWeight, Weight

LONG = 128
"""Tokens of a prompt from which on it pays to widen weights on a GPU; measured on an H200."""


def least_tokens(device: torch.device) -> int | None:
    """Tokens of a prompt from which on it pays to widen weights; ``None`` if it never does."""
    return LONG if device.type == "cuda" else None


def widened_numbers(operations: Iterable[Operation]) -> int:
    """How many numbers the weights of a layer have that would be widened."""
    return sum(math.prod(each.weight.shape) for each in operations if _has_blocks(each))


def _has_blocks(operation: Operation) -> TypeGuard[ops.Product | ops.GatedProduct]:
    """Whether an operation is a product with blocks; of experts, few are used by each row."""
    return isinstance(operation, ops.Product | ops.GatedProduct) and operation.weight.has_blocks


def with_numbers(operations: Iterable[Operation], dtype: torch.dtype) -> list[Operation]:
    """The operations with numbers for blocks, on the meta device: what :class:`WidenedLayer` makes of them."""
    return [
        replace(each, weight=DenseWeight(torch.empty(each.weight.shape, dtype=dtype, device="meta")))
        if _has_blocks(each)
        else each
        for each in operations
    ]


class WidenedLayer:
    """Memory for the numbers of one layer.

    Args:
        numbers: The most that any layer has, see :func:`widened_numbers`.
        dtype: Their dtype.
        device: Where the weights are.
    """

    def __init__(self, numbers: int, dtype: torch.dtype, device: torch.device) -> None:
        self._memory = torch.zeros(numbers, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""
        return self._memory.nbytes

    def widen(self, operations: Sequence[Operation]) -> list[Operation]:
        """The operations of a layer with numbers for blocks, until the next call."""
        made: list[Operation] = []
        used = 0
        for operation in operations:
            if not _has_blocks(operation):
                made.append(operation)
                continue
            size = math.prod(operation.weight.shape)
            target = self._memory[used : used + size].view(operation.weight.shape)
            _widen(operation.weight, target)
            made.append(replace(operation, weight=DenseWeight(target)))
            used += size
        return made


def _widen(weight: Weight, target: Tensor) -> None:
    for part, rows in weight.runs():
        if isinstance(part, BlockWeight):
            widen(part, target[rows])
        else:
            target[rows] = part.dense(target.dtype)
