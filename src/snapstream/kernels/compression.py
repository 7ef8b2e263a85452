"""Dispatches votes, key differences, smoothing, selection and copies of compression to kernels by device and dtype.

Importing this module registers the kernels with the operators of :mod:`snapstream.compression` and
:mod:`snapstream.cache`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from snapstream.cache.layer import copy_rows, plain_copy_rows
from snapstream.cache.quantized import encode, plain_encode
from snapstream.compression.compress import plain_selected, selected
from snapstream.compression.keys import SHORTEST, differences_of_keys, plain_differences_of_keys
from snapstream.compression.ranks import plain_taken_in_turn, taken_in_turn
from snapstream.compression.scoring import plain_smoothed, plain_window_attention, smoothed, window_attention
from snapstream.kernels import cpu, triton
from snapstream.kernels.cpu import choice, codes
from snapstream.kernels.cpu.checks import MULTIPLE, TYPES


@window_attention.register
def _window_attention(queries: Tensor, keys: Tensor, *rest: Any) -> Tensor:
    if triton.takes(keys) and queries.dtype == keys.dtype and keys.stride(3) == queries.stride(3) == 1:
        from snapstream.kernels.triton import votes

        with triton.current_device(keys.device):
            return votes.window_attention(queries, keys, *rest)
    fits_cpu = (
        cpu.loaded
        and keys.device.type == "cpu"
        and keys.dtype in TYPES
        and queries.dtype == keys.dtype
        and keys.shape[3] % MULTIPLE == 0
        and keys.stride(3) == queries.stride(3) == 1
        and keys.stride(2) % 2 == 0
        and rest[3] > 0  # the scale
    )
    if fits_cpu:
        # The ninth, key_chunk, only bounds the plain function's memory; arguments with their defaults are not passed.
        special = dict(zip(("cap", "sinks"), rest[9:], strict=False))
        return cpu.attend_window(queries, keys, *rest[:8], **special)
    return plain_window_attention(queries, keys, *rest)


@differences_of_keys.register
def _differences_of_keys(keys: Tensor, candidate_end: Tensor, sink: int, near: int, key_chunk: int) -> Tensor:
    if triton.takes(keys) and keys.stride(3) == 1:
        from snapstream.kernels.triton.keys import key_differences

        with triton.current_device(keys.device):
            return key_differences(keys, candidate_end, sink, near)
    rows = keys.dtype in TYPES and keys.stride(3) == 1 and keys.shape[3] % MULTIPLE == 0
    if cpu.loaded and keys.is_cpu and rows:
        return choice.key_differences(keys, candidate_end, sink, near, SHORTEST)
    return plain_differences_of_keys(keys, candidate_end, sink, near, key_chunk)


@taken_in_turn.register
def _taken_in_turn(lists: list[Tensor], *rest: Any) -> Tensor:
    if cpu.loaded and lists[0].is_cpu:
        return choice.take_in_turn(lists, *rest)
    return plain_taken_in_turn(lists, *rest)


@smoothed.register
def _smoothed(votes: Tensor, largest: bool, kernel: int, shift: int) -> Tensor:
    if triton.takes(votes):
        from snapstream.kernels.triton.votes import pool_votes

        with triton.current_device(votes.device):
            return pool_votes(votes, largest, kernel, shift)
    if cpu.loaded and votes.is_cpu and votes.dtype == torch.float32:
        return choice.smooth(votes, largest, kernel, shift)
    return plain_smoothed(votes, largest, kernel, shift)


@selected.register
def _selected(scores: Tensor, *rest: Any) -> Tensor:
    if triton.takes(scores):
        from snapstream.kernels.triton.select import select_entries

        with triton.current_device(scores.device):
            return select_entries(scores, *rest)
    if cpu.loaded and scores.is_cpu:
        return choice.select_entries(scores, *rest)
    return plain_selected(scores, *rest)


@encode.register
def _encode(numbers: Tensor, frame: Tensor | None, width: int, bits: int, target: Tensor) -> None:
    if triton.takes(numbers) and numbers.stride(2) == target.stride(2) == 1:
        from snapstream.kernels.triton.codes import encode as encode_on_device

        with triton.current_device(numbers.device):
            encode_on_device(numbers, frame, width, bits, target)
    elif cpu.loaded and codes.takes(numbers, target):
        codes.encode(numbers, frame, width, bits, target)
    else:
        plain_encode(numbers, frame, width, bits, target)


@copy_rows.register
def _copy_rows(source: Tensor, positions: Tensor, target: Tensor) -> None:
    if triton.takes(source) and source.stride(2) == target.stride(2) == 1:
        from snapstream.kernels.triton.select import gather

        with triton.current_device(source.device):
            gather(source, positions, target)
        return
    fits_cpu = target.is_cpu and target.shape[:2] == positions.shape and target.dtype == source.dtype
    if source.is_cpu and fits_cpu:  # copies whole rows, where torch's gather() copies single elements
        for rows, chosen, to in zip(source, positions, target, strict=True):
            torch.index_select(rows, 0, chosen, out=to)
    else:
        plain_copy_rows(source, positions, target)
