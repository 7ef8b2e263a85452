"""Attention on CUDA: Triton kernels of this package, and torch's flash kernels for prompts where they are faster."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Self, override

from snapstream.attention import flash
from snapstream.attention.base import AttentionBackend
from snapstream.cache import EntryShape, QuantizedCache, dense_dtype
from snapstream.kernels import triton as kernels
from snapstream.kernels.buffers import Slots, StepBuffers
from snapstream.kernels.operations import Attend, Operation
from snapstream.kernels.stock import PlannedProgram, Program


class TritonAttention(AttentionBackend):
    """Needs the kernels of :mod:`snapstream.kernels.triton`."""

    reads_all_keys_in_prefill = False
    narrow_values = True

    def __init__(self, device: torch.device, *, with_flash: bool = False) -> None:
        """Choose the device, and how prefill attends.

        Args:
            device: Device of all tensors.
            with_flash: Use :mod:`snapstream.attention.flash` for prefill.
        """
        self.device, self.with_flash = device, with_flash

    @classmethod
    @override
    def load(cls, device: torch.device) -> str | None:
        if device.type == "cpu":
            kernels.interpret()
        return None

    @classmethod
    @override
    def for_heads(cls, device: torch.device, dtype: torch.dtype, size: int, value_size: int | None = None) -> Self:
        sizes = size, value_size or size
        own = kernels.reads_fast(device, dtype, *sizes)
        return cls(device, with_flash=not own and flash.fits(device, dtype, *sizes))

    @staticmethod
    @override
    def unsupported(device: torch.device, dtype: torch.dtype, *sizes: int) -> str | None:
        """Requires a device with kernels, and a dtype and head sizes that they support."""
        if dtype not in kernels.DTYPES:
            return f"the dtype is {dtype}; float32, bfloat16 and float16 are supported"
        has_room = kernels.memory_of_processor(device) >= kernels.LATENTS_MEMORY
        most = kernels.LARGEST_HEAD if has_room else kernels.SMALL_HEAD
        if any(size % 2 or size > most for size in sizes):
            given = " and ".join(map(str, dict.fromkeys(sizes)))
            return f"the head size is {given}; on this device, even sizes up to {most} are supported"
        return kernels.missing(device)

    @override
    def program(self, operations: Sequence[Operation], work: StepBuffers) -> Program:
        if work.slots.token.is_meta:  # a plan, for which Triton need not be installed
            sizes = (self.decode_bytes(each, work) for each in operations if isinstance(each, Attend))
            scratch = torch.empty(max(sizes, default=0), dtype=torch.uint8, device="meta")
            return PlannedProgram(operations, work, scratch)
        from snapstream.kernels.triton.program import TritonProgram

        splits = 1
        for each in operations:
            if isinstance(each, Attend):  # those with the most entries need most
                cache, query = work.caches[each.layer], torch.Size((1, each.query.heads, each.query.size))
                dtype = dense_dtype(cache.entry_type)
                splits = max(splits, self.splits(len(work.slots.token), query, cache.keys.shape[1:], dtype))
        return TritonProgram(operations, work, splits=splits)

    def splits(self, slots: int, query: torch.Size, cache: torch.Size, dtype: torch.dtype) -> int:
        """Into how many parts decoding splits the entries of each slot.

        Args:
            slots: Slots (``B``).
            query: Shape of a slot's queries, ``[T, H, D]``.
            cache: Shape of its keys, ``[N, C, D]``.
            dtype: Dtype of both.
        """
        from snapstream.kernels.triton.decode import splits_of, tile_of

        (T, H, D), (N, C, _) = query, cache
        blocks = -(-H // N * T // tile_of(D, dtype, H // N * T)["ROWS"])
        return splits_of(slots, N * blocks, C, kernels.processors(self.device))

    @override
    def decode_bytes(self, o: Attend, m: StepBuffers) -> int:
        slots, entries = m.slots.token.numel(), m.caches[o.layer].entries
        # Results of the parts that each slot's entries are split into: many parts for few slots, few parts for many.
        # This is an upper bound, as grouped heads have fewer programs.
        most = min(kernels.MOST_SPLITS, -(-entries // kernels.LEAST_ENTRIES) * 2)
        parts = min(slots * most, max(slots, 2 * kernels.PROGRAMS_PER_PROCESSOR * kernels.processors(self.device)))
        cache, coded = m.caches[o.layer], 0
        if isinstance(cache, QuantizedCache):  # queries and results in another form, and tokens before they are codes
            coded = slots * (o.query.heads * (o.query.size + 2 + o.target.size) * 4 + 2 * cache.heads * cache.size * 4)
        return parts * o.query.heads * (o.target.size + 1) * 4 + coded

    @override
    def prefill(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        start: Tensor,
        scale: float,
        *,
        window: int = 0,
        cap: float = 0.0,
        sinks: Tensor | None = None,
        packed: Tensor | None = None,
        packed_until: Tensor | None = None,
    ) -> Tensor:
        from snapstream.kernels.triton.prefill import attend_chunk

        if len(query) == 1 and values.stride() == keys.stride() and not window:
            # A single token is decoded, which splits its entries into parts. Their number does not depend on the
            # length, because every number needs another kernel.
            given = (query, keys[None], values[None], (start + 1)[None], scale, cap, sinks)
            return self._attend_slots(*given, splits=kernels.MOST_SPLITS)
        if self.with_flash and not window and cap == 0.0 and sinks is None:
            return flash.attend(query, keys, values, start, scale)
        return attend_chunk(query, keys, values, start, scale, window, cap, sinks)

    @override
    def decode(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor,
        scale: float,
        *,
        cap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        splits = self.splits(len(query), query[:, None].shape[1:], keys.shape[1:], query.dtype)
        return self._attend_slots(query, keys, values, valid, scale, cap, sinks, splits=splits)

    def _attend_slots(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        valid: Tensor,
        scale: float,
        cap: float,
        sinks: Tensor | None,
        *,
        splits: int,
    ) -> Tensor:
        from snapstream.kernels.triton.decode import attend_slots

        B, H, D = query.shape
        N, C = keys.shape[1:3]
        is_latent = values.data_ptr() == keys.data_ptr()
        cache = EntryShape(N, D, latent=is_latent).kind([keys] if is_latent else [keys, values])
        out = query.new_zeros(B, H, values.shape[3])
        attend_slots(query, out, cache, None, Slots.that_see(valid, C), scale, cap=cap, sinks=sinks, splits=splits)
        return out
