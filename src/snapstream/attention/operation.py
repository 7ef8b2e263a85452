"""Attention as an operation, by whichever backend there is: of chunks of prompts, and of steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from snapstream.cache import QuantizedCache
from snapstream.kernels.buffers import PromptChunk, StepBuffers
from snapstream.kernels.operations import Attend, Operation
from snapstream.kernels.workspace import workspace

if TYPE_CHECKING:
    from snapstream.attention.base import AttentionBackend


@dataclass(frozen=True)
class AttendWith(Attend):
    """:class:`Attend` with the backend's ``prefill`` for a chunk of a prompt, and ``decode`` for a step.

    A step of several tokens attends one token after another. Pending entries of the tokens before are in the cache
    meanwhile. What they replace is put back at the end, since only :class:`~snapstream.kernels.taking.Commit` keeps
    entries.
    """

    backend: AttentionBackend

    @property
    def _special(self) -> dict[str, Any]:
        """What most models do not have, so that backends of others need not know it."""
        return {} if self.cap == 0.0 and self.sinks is None else {"cap": self.cap, "sinks": self.sinks}

    @override
    def in_loop(self, m: StepBuffers) -> Operation | None:
        if not (self.backend.in_loop and isinstance(m, PromptChunk)):
            return None
        values = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "backend"}
        return Attend(**values).in_loop(m)

    @override
    def run(self, m: StepBuffers) -> None:
        slots, cache = m.slots, m.caches[self.layer]
        (query, target), (B, T) = self.views(m), slots.token.shape
        if isinstance(m, PromptChunk):
            group, until = m.group_of(self.layer), m.packed_until
            end = m.ends[group] if m.ends and self.backend.reads_all_keys_in_prefill else None
            values = cache.values[0, :, :end, : self.target.size if self.backend.narrow_values else None]
            given = (query[0], cache.keys[0, :, :end], values, slots.count[group, 0], self.scale)
            packed = m.packed[group] if m.packed else None
            out = self.backend.prefill(*given, window=self.window, packed=packed, packed_until=until, **self._special)
            target[0] = out[..., : self.target.size]
            return
        group = m.group_of(self.layer)
        entries, valid = slots.entries(group), slots.valid(group)
        replaced = []
        try:
            for t in range(T):
                if T > 1:
                    place, pending = entries[:, t, None], m.pending[self.layer]
                    replaced.append((place, cache.read(place)))
                    cache.write_stored(place, pending.read(torch.full_like(place, t)), slots.active)
                numbers = cache.converted(m.dtype) if isinstance(cache, QuantizedCache) else cache
                given = (query[:, t], numbers.keys, numbers.values, valid[:, t], self.scale)
                out = self.backend.decode(*given, **self._special)
                out = out[..., : self.target.size].reshape(B, self.target.heads, -1)
                target[:, t] = torch.where(valid[:, t, None, None] > 0, out, target[:, t])
        finally:  # the last one first: a short ring may have given one entry to several tokens
            for place, tensors in reversed(replaced):
                cache.write_stored(place, tensors, slots.active)


@workspace.register
def _(o: AttendWith, m: StepBuffers, device: torch.device) -> int:
    if not isinstance(m, PromptChunk):
        return o.backend.decode_bytes(o, m)
    (_, T, H, D), target = o.views(m)[0].shape, o.views(m)[1]
    V = target.shape[-1] if o.backend.narrow_values else D
    return T * H * V * m.dtype.itemsize + o.backend.prefill_bytes(o, m)


def with_backend(operations: Sequence[Operation], backend: AttentionBackend) -> list[Operation]:
    """The same operations, with attention by a backend."""
    return [
        AttendWith(**{field.name: getattr(each, field.name) for field in fields(each)}, backend=backend)
        if type(each) is Attend
        else each
        for each in operations
    ]
