"""What one prompt occupies while it is prefilled, whatever the model's depth.

There are two of these, called lanes, so that a short prompt need not wait for a long one: see :func:`lanes`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from snapstream.attention import AttentionBackend
from snapstream.cache import EntryShape
from snapstream.config.policy import rows_of_queries
from snapstream.engine.settings import Types
from snapstream.models.spec import ModelSpec

SHORT = 8
"""A prompt of up to one in so many tokens of the longest prompt has a lane of its own."""
FEWEST_CHUNKS = 4
"""Chunks of the longest prompt from which on there is such a lane; shorter ones are soon read."""


class Staging:
    """The memory of one prompt that is being prefilled.

    Attributes:
        entries: Tokens that it has room for (``L``).
        caches: Per group of layers, the cache of one layer: ``L`` entries, or a state. One memory for all groups,
            unless layers read the caches of several.
        packed: Per kind of entries, values in the order in which the backend multiplies them; often empty.
        packed_until: How many of them are in that order, int64 scalar.
        hidden: Hidden states, ``[L, hidden]``.
        queries: The last queries of the current layer, ``[H, W, D]``.
    """

    def __init__(
        self,
        spec: ModelSpec,
        backend: AttentionBackend,
        *,
        types: Types,
        queries: int,
        entries: int,
        device: torch.device,
    ) -> None:
        """Allocate it.

        Args:
            spec: The model.
            backend: The attention backend.
            types: The engine's dtypes.
            queries: Number of last queries to keep, or ALL.
            entries: Tokens that it has room for.
            device: Device of the model.
        """
        dtype = types.activations
        self.entries = entries
        sizes = [math.prod(entry.shape(1, entries)) * entry.kind.stored for entry in spec.entries]
        memory = iter(_memories(sizes, dtype, device, apart=bool(spec.shared_from)))
        self.caches = [
            group.entry.within(next(memory), 1, entries)
            if isinstance(group.entry, EntryShape)
            else group.entry.empty(1, group.window or 0, entry_type=dtype, device=device)
            for group in spec.groups
        ]
        columns = [spec.values_of(entry) if backend.narrow_values else entry.size for entry in spec.entries]
        wanted = [
            backend.packed_shape(torch.Size((entry.heads, entries, size)), dtype)
            for entry, size in zip(spec.entries, columns, strict=True)
        ]
        packed = _memories([math.prod(shape) for shape in wanted], dtype, device, apart=bool(spec.shared_from))
        self.packed = [each.view(shape) for each, shape in zip(packed, wanted, strict=True)]
        self.packed_until = torch.zeros((), dtype=torch.int64, device=device)
        self.hidden = torch.zeros(entries, spec.hidden_size, dtype=dtype, device=device)
        rows = rows_of_queries(queries, entries)
        self.queries = torch.zeros(spec.heads, rows, spec.entries[0].size, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        """Bytes in memory; groups may share it."""
        tensors = [self.hidden, self.queries, *self.packed, *(each for cache in self.caches for each in cache.tensors)]
        memories = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}
        return sum(memories.values())

    def keep_queries(self, query: Tensor, start: int, length: int) -> None:
        """Keep the rows of ``query`` ``[T, H, D]``, the first of entry ``start``, that are among the prompt's last."""
        first = length - self.queries.shape[1]  # the entry of row 0; negative for a short prompt
        skipped = max(0, first - start)
        if skipped < len(query):
            rows = query[skipped:].transpose(0, 1)
            at = start + skipped - first
            self.queries[:, at : at + rows.shape[1]] = rows


def _memories(sizes: Sequence[int], dtype: torch.dtype, device: torch.device, *, apart: bool) -> Sequence[Tensor]:
    """Flat memory of so many numbers for each group: views of one memory, unless they must be ``apart``."""
    if apart:
        return torch.split(torch.zeros(sum(sizes), dtype=dtype, device=device), list(sizes))
    memory = torch.zeros(max(sizes), dtype=dtype, device=device)
    return [memory[:size] for size in sizes]


def staging_length(max_model_len: int, chunk: int, *, continued: bool) -> int:
    """Tokens in the staging cache of the longest prompt, a whole number of chunks.

    Args:
        max_model_len: Maximum sequence length.
        chunk: Prompt tokens per launch.
        continued: Whether a prompt may begin after the entries of a saved cache. Its chunks are then not aligned to
            multiples of ``chunk``, so one more chunk is needed.
    """
    return (-(-max_model_len // chunk) + continued) * chunk


def lanes(padded: int, chunk: int) -> tuple[int, ...]:
    """Tokens of each lane: one for any prompt and, unless that is short anyway, one for short prompts.

    Args:
        padded: The :func:`staging_length`.
        chunk: Prompt tokens per launch.
    """
    if padded < FEWEST_CHUNKS * chunk:
        return (padded,)
    return padded, -(-padded // (SHORT * chunk)) * chunk
