"""Reads the paged cache of any backend, whatever its internal layout.

Kernels store keys and values in different orders: interleaved, packed for vector units, or transposed. Writing uses the
backend's own ``do_kv_cache_update``. For reading, the order is determined once at startup: numbers are written through
that function and located in the block. A cache that does not return exactly what was written, for example because it is
quantized, is rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from snapstream.errors import ConfigurationError

_BASE = 128
"""Base of the digits in which numbers are written: integers up to 256 are exact in every cache dtype."""


class PagedCache:
    """The entries of one attention layer, in blocks.

    Attributes:
        key_shape: Shape of one entry's keys, ``(N, D)``.
        value_shape: Shape of one entry's values, ``(N, D_v)``; ``None`` where keys and values are one latent (MLA).
    """

    def __init__(self, layer: Any, block_size: int, blocks: int) -> None:
        """Determine the layout of a layer's cache.

        Args:
            layer: vLLM's attention layer, with its cache bound.
            block_size: Tokens per block of the kernel.
            blocks: Blocks of that size in the pool.

        Raises:
            ConfigurationError: The layout cannot be determined.
        """
        self.layer = layer
        self.block_size = block_size
        if layer.kv_cache.shape[0] != blocks:
            raise self._unreadable(f"it has the shape {tuple(layer.kv_cache.shape)}, not {blocks} blocks")
        self.latent = hasattr(layer, "kv_lora_rank")
        self.key_shape: tuple[int, int]
        self.value_shape: tuple[int, int] | None
        if self.latent:
            self.key_shape = (1, layer.kv_lora_rank + layer.qk_rope_head_dim)
            self.value_shape = None
        else:
            self.key_shape = (layer.num_kv_heads, layer.head_size)
            self.value_shape = (layer.num_kv_heads, getattr(layer, "head_size_v", layer.head_size))
        self._keys, self._values = self._locate()

    def read_pages(self, cache: Tensor, blocks: Tensor) -> Tensor:
        """Copy blocks out unchanged: ``[blocks, elements per block]``."""
        return cache[blocks].flatten(1)

    def keys(self, pages: Tensor, length: int) -> Tensor:
        """The first ``length`` keys of pages from :meth:`read_pages`, ``[N, length, D]``."""
        found = pages[:, self._keys.flatten()].view(-1, *self.key_shape)
        return found[:length].transpose(0, 1)

    def values(self, pages: Tensor, positions: Tensor) -> Tensor:
        """Values at ``positions`` ``[N, E]``, counted from the first token of the blocks: ``[N, E, D_v]``."""
        assert self._values is not None
        head = torch.arange(positions.shape[0], device=positions.device)[:, None]
        within = self._values[positions % self.block_size, head]
        return pages[(positions // self.block_size)[..., None], within]

    def read(self, cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor | None]:
        """Copy entries out: keys ``[N, E, D]`` and, unless the cache is latent, values ``[N, E, D_v]``.

        Args:
            cache: The layer's cache.
            slots: Slots of the entries, int64 ``[E]``.
        """
        block, within = (slots // self.block_size)[:, None, None], slots % self.block_size

        def entries(offsets: Tensor) -> Tensor:
            return cache[(block, *torch.unravel_index(offsets[within], cache.shape[1:]))].transpose(0, 1)

        return entries(self._keys), None if self._values is None else entries(self._values)

    def write(self, cache: Tensor, keys: Tensor, values: Tensor | None, slots: Tensor) -> None:
        """Store entries through the backend's own function.

        Args:
            cache: The layer's cache.
            keys: ``[N, E, D]``.
            values: ``[N, E, D_v]``; ``None`` for a latent cache.
            slots: Slots to write to, int64 ``[E]``.
        """
        layer = self.layer
        entries = keys.transpose(0, 1)
        if values is None:
            latent, rope = torch.split(entries[:, 0], [layer.kv_lora_rank, layer.qk_rope_head_dim], dim=-1)
            layer.impl.do_kv_cache_update(
                latent.contiguous(), rope[:, None].contiguous(), cache, slots, layer.kv_cache_dtype, layer._k_scale
            )
        else:
            layer.impl.do_kv_cache_update(
                layer, entries.contiguous(), values.transpose(0, 1).contiguous(), cache, slots
            )

    def _locate(self) -> tuple[Tensor, Tensor | None]:
        """Offsets within a block of every element: keys ``[block, N, D]``, values ``[block, N, D_v]``."""
        cache = self.layer.kv_cache
        page = cache[0]  # the null block, which no request uses
        saved = page.clone()
        slots = torch.arange(self.block_size, device=cache.device)

        def store_keys(numbers: Tensor) -> None:
            values = None if self.value_shape is None else numbers.new_zeros(self.block_size, *self.value_shape)
            values = None if values is None else values.transpose(0, 1)
            self.write(cache, numbers.view(self.block_size, *self.key_shape).transpose(0, 1), values, slots)

        def store_values(numbers: Tensor) -> None:
            assert self.value_shape is not None
            keys = numbers.new_zeros(self.block_size, *self.key_shape)
            values = numbers.view(self.block_size, *self.value_shape)
            self.write(cache, keys.transpose(0, 1), values.transpose(0, 1), slots)

        try:
            keys = self._find(page, store_keys, self.key_shape)
            return keys, None if self.value_shape is None else self._find(page, store_values, self.value_shape)
        finally:
            page.copy_(saved)

    def _find(self, page: Tensor, store: Callable[[Tensor], None], shape: tuple[int, int]) -> Tensor:
        """Offset in ``page`` of each of ``block_size * prod(shape)`` numbers that ``store`` writes."""
        size = self.block_size * shape[0] * shape[1]
        numbers = torch.arange(size, device=page.device)
        found = torch.zeros(page.numel(), dtype=torch.int64, device=page.device)
        factor = 1
        while factor < size:
            page.zero_()
            store((numbers // factor % _BASE + 1).to(page.dtype))
            digit = page.flatten().to(torch.int64) - 1
            found += digit.clamp(min=0) * factor
            factor *= _BASE
        place = torch.nonzero(digit >= 0)[:, 0]
        if place.numel() != size or not torch.equal(found[place].sort().values, numbers):
            raise self._unreadable("its blocks do not store every element unchanged")
        offsets = torch.empty(size, dtype=torch.int64, device=page.device)
        offsets[found[place]] = place
        return offsets.view(self.block_size, *shape)

    def _unreadable(self, why: str) -> ConfigurationError:
        return ConfigurationError(
            f"the SnapStream plugin cannot read the cache of {type(self.layer.impl).__name__}: {why}; choose another "
            "--attention-backend"
        )
