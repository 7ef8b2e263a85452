"""Kernels of selection: key differences, smoothed votes, ranks of scores, and the token of every entry."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from snapstream.kernels.cpu import library
from snapstream.kernels.cpu.checks import MULTIPLE, TYPES, check_lengths, check_types, require
from snapstream.kernels.cpu.interface import STRUCTURES

CHOICE = "selection"
"""Its name in errors."""


def key_differences(keys: Tensor, candidate_end: Tensor, sink: int, near: int, shortest: float) -> Tensor:
    """CPU kernel for :func:`snapstream.compression.keys.key_differences`; ``D`` must be a multiple of 32.

    Raises:
        ValueError: Shapes or dtypes do not match.
        MemoryError: There is not enough memory for temporaries.
    """
    B, N, L, D = keys.shape
    check_types(keys)
    require(
        keys.stride(3) == 1 and D > 0 and D % MULTIPLE == 0,
        f"keys must be contiguous rows whose size is a multiple of {MULTIPLE}",
    )
    ends = check_lengths(B, candidate_end)[0]
    out = keys.new_zeros((B, N, L), dtype=torch.float32)
    strides = dict(zip(("key_sequence", "key_head", "key_row"), keys.stride()[:3], strict=True))
    shape = {"sequences": B, "heads": N, "length": L, "size": D}
    pointers = (each.data_ptr() for each in (keys, ends, out))
    arguments = STRUCTURES["Differences"](*pointers, **shape, **strides, sink=sink, near=near, shortest=shortest)
    library.run("key_differences", arguments, TYPES.index(keys.dtype), of=CHOICE)
    return out


def smooth(votes: Tensor, largest: bool, kernel: int, shift: int) -> Tensor:
    """CPU kernel for :func:`snapstream.compression.scoring.pool_votes`, with the same results.

    Raises:
        ValueError: The dtype, the kernel or the shift is invalid.
        MemoryError: There is not enough memory for temporaries.
    """
    require(votes.dtype == torch.float32, "votes must be float32")
    require(kernel > 0 and shift >= 0, "the kernel must be positive, and the shift not negative")
    check_types(votes)
    votes = votes.contiguous()
    out = torch.empty_like(votes)
    length = votes.shape[-1]
    sizes = {
        "rows": votes.numel() // max(1, length),
        "length": length,
        "largest": largest,
        "width": kernel,
        "shift": shift,
    }
    library.run("smooth", STRUCTURES["Smoothing"](votes.data_ptr(), out.data_ptr(), **sizes), of=CHOICE)
    return out


def take_in_turn(lists: Sequence[Tensor], every: Tensor, candidate_end: Tensor, sink: int, most: int) -> Tensor:
    """CPU kernel for :func:`snapstream.compression.ranks.take_in_turn`, with the same results.

    Raises:
        ValueError: Shapes or dtypes do not match.
        MemoryError: There is not enough memory for temporaries.
    """
    B, N, L = shape = lists[0].shape
    require(
        all(each.shape == shape and each.dtype == torch.float32 for each in lists), "scores must be float32 [B, N, L]"
    )
    require(len(every) == len(lists), "every list needs its rounds")
    check_types(*lists)
    ends, *_ = check_lengths(B, candidate_end, *every)
    every = every.contiguous()
    scores = [each.contiguous() for each in lists]
    out = torch.zeros_like(scores[0])
    pointers = (ctypes.c_void_p * len(scores))(*(each.data_ptr() for each in scores))
    sizes = {"lists": len(scores), "sequences": B, "heads": N, "length": L, "sink": sink, "most": most}
    addresses = (ctypes.addressof(pointers), *(each.data_ptr() for each in (every, ends, out)))
    arguments = STRUCTURES["Lists"](*addresses, **sizes)
    library.run("take_in_turn", arguments, of=CHOICE)
    return out


def select_entries(
    scores: Tensor, base: Tensor, count: Tensor, length: Tensor, sink: int, top_k: int, capacity: int
) -> Tensor:
    """CPU kernel for :func:`snapstream.compression.compress.select_entries`, with the same results.

    Raises:
        ValueError: Shapes or dtypes do not match.
        MemoryError: There is not enough memory for temporaries.
    """
    B, N, L = scores.shape
    require(scores.dtype == torch.float32, "scores must be float32")
    check_types(scores)
    scores, lengths = scores.contiguous(), check_lengths(B, base, count, length)
    positions = scores.new_empty((B, N, capacity), dtype=torch.int64)
    sizes = {"sequences": B, "heads": N, "length": L, "sink": sink, "top_k": top_k, "capacity": capacity}
    pointers = (each.data_ptr() for each in (scores, *lengths, positions))
    library.run("select_entries", STRUCTURES["Selection"](*pointers, **sizes), of=CHOICE)
    return positions
