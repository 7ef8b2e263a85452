"""Attention of steps that process several tokens per slot, by whichever backend there is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from typing_extensions import override

from snapstream.attention import AttentionBackend
from snapstream.kernels.operations import Attend, Operation
from snapstream.kernels.parts import Machine


@dataclass(frozen=True)
class AttendWith(Attend):
    """:class:`Attend`, one token after another, each with the backend's ``decode``.

    Pending entries of the tokens before are in the cache meanwhile. What they replace is put back at the end, since
    only :class:`~snapstream.kernels.operations.Commit` keeps entries.
    """

    backend: AttentionBackend

    @override
    def run(self, m: Machine) -> None:
        slots, cache = m.slots, m.caches[self.layer]
        (query, target), (B, T) = self.views(m), slots.token.shape
        entries, valid = slots.entries(), slots.valid()
        replaced = []
        try:
            for t in range(T):
                if T > 1:
                    place, pending = entries[:, t, None], m.pending[self.layer]
                    replaced.append((place, [_taken(tensor, place) for tensor in cache.tensors]))
                    key, value = pending.keys[:, :, t, None], pending.values[:, :, t, None]
                    cache.write(place, key.transpose(1, 2), value.transpose(1, 2), slots.active)
                out = self.backend.decode(query[:, t], cache.keys, cache.values, valid[:, t], self.scale)
                out = out[..., : self.target.size].reshape(B, self.target.heads, -1)
                target[:, t] = torch.where(valid[:, t, None, None] > 0, out, target[:, t])
        finally:  # the last one first: a short ring may have given one entry to several tokens
            for place, tensors in reversed(replaced):
                cache.write(place, tensors[0], tensors[-1], slots.active)


def with_backend(operations: Sequence[Operation], backend: AttentionBackend) -> list[Operation]:
    """The same operations, with attention by a backend."""
    return [
        AttendWith(**{field.name: getattr(each, field.name) for field in fields(each)}, backend=backend)
        if type(each) is Attend
        else each
        for each in operations
    ]


def _taken(tensor: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Entries ``[B, 1, N, D]`` at ``place``, int64 ``[B, 1]``, of a cache's tensor ``[B, N, C, D]``."""
    index = place[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
    return tensor.gather(2, index).transpose(1, 2)
