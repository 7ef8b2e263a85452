"""One layer's keys and values as codes of few bits, see :mod:`snapstream.cache.codes`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor
from typing_extensions import override

from snapstream.cache.codes import OF_BITS, CodeFormat, EntryType, QuantizedType, frame_of, rotated, rotation_of
from snapstream.cache.layer import EntryShape, LayerCache
from snapstream.operators import Operator


def plain_encode(numbers: Tensor, frame: Tensor | None, width: int, bits: int, target: Tensor) -> None:
    """Store numbers as codes.

    Args:
        numbers: ``[N, E, D]``.
        frame: Their frame, float32 ``[N, 2, D]``, if they are keys.
        width: How many neighbors a rotation mixes.
        bits: Of a code: 8 or 4.
        target: uint8 ``[N, E, nbytes]``.
    """
    wide = numbers.float()
    if frame is not None:
        wide = (wide - frame[:, None, 0]) / frame[:, None, 1]
    target.copy_(OF_BITS[bits].encoded(rotated(wide, width)))


def _encode_shape(numbers: Tensor, frame: Tensor | None, width: int, bits: int, target: Tensor) -> None:
    return None


encode = Operator("encode", plain_encode, _encode_shape, changes=("target",))
""":func:`plain_encode`, for which devices have kernels."""


def encoded(codes: CodeFormat, numbers: Tensor, frames: Tensor | None, width: int) -> Tensor:
    """Store numbers ``[B, N, T, D]`` as codes, uint8 ``[B, N, T, nbytes]``; keys have frames ``[B, N, 2, D]``."""
    B, N, T, D = numbers.shape
    target = torch.empty(B * N, T, codes.nbytes(D), dtype=torch.uint8, device=numbers.device)
    own = None if frames is None else frames.flatten(0, 1)
    encode(numbers.reshape(B * N, T, D), own, width, codes.bits, target)
    return target.view(B, N, T, -1)


def decoded(codes: CodeFormat, stored: Tensor, frames: Tensor | None, width: int) -> Tensor:
    """The numbers that codes stand for, float32 ``[B, N, T, D]``; the inverse of :func:`encoded`."""
    numbers = rotated(codes.decoded(stored), width)
    return numbers if frames is None else numbers * frames[:, :, 1, None] + frames[:, :, 0, None]


AT_ONCE = 4096
"""Entries that are widened at once: each step of a rotation is a copy of them in float32."""


class QuantizedCache(LayerCache):
    """Entries as codes, and the frame of each sequence's keys, float32 ``[B, N, 2, D]``: see :func:`frame_of`.

    Attributes:
        entry: Shape of an entry; if it is a latent, values are part of the keys.
        rotation: How many neighboring channels are mixed.
    """

    def __init__(self, tensors: Sequence[Tensor], entry: EntryShape, entry_type: QuantizedType) -> None:
        super().__init__(tensors)
        self.entry, self._entry_type = entry, entry_type
        self.stored = entry.kind.stored
        self.rotation = rotation_of(entry.size, latent=entry.latent)

    @property
    @override
    def values(self) -> Tensor:
        return self.tensors[self.stored - 1]

    @property
    def frames(self) -> Tensor:
        """Per sequence and head, center and spread of each channel of the keys, float32 ``[B, N, 2, D]``."""
        return self.tensors[self.stored]

    @property
    @override
    def entry_type(self) -> QuantizedType:
        return self._entry_type

    @property
    @override
    def size(self) -> int:
        return self.entry.size

    @override
    def _with(self, tensors: Sequence[Tensor]) -> QuantizedCache:
        return QuantizedCache(tensors, self.entry, self._entry_type)

    @override
    def write(self, entries: Tensor, key: Tensor, value: Tensor, active: Tensor | None = None) -> None:
        each = zip(self.formats, (key, value), (self.frames, None), strict=False)
        stored = (encoded(codes, new.transpose(1, 2), frames, self.rotation) for codes, new, frames in each)
        self.write_stored(entries, [codes.transpose(1, 2) for codes in stored], active)

    @override
    def converted(self, entry_type: EntryType, like: LayerCache | None = None) -> LayerCache:
        if entry_type == self._entry_type:
            return self
        if isinstance(entry_type, QuantizedType):
            return super().converted(entry_type, like)
        made = self.entry.empty(self.rows, self.entries, entry_type=entry_type, device=self.device)
        for start in range(0, self.entries, AT_ONCE):
            end = min(start + AT_ONCE, self.entries)
            some = cast(QuantizedCache, self.span(start, end))
            for mine, numbers in zip(made.span(start, end).tensors, some.numbers(), strict=True):
                mine.copy_(numbers)
        return made

    def numbers(self) -> list[Tensor]:
        """What the codes stand for: keys and, unless they are part of them, values, float32 ``[B, N, C, D]``."""
        each = zip(self.formats, self.tensors, (self.frames, None), strict=False)
        return [decoded(codes, stored, frames, self.rotation) for codes, stored, frames in each]

    @property
    def formats(self) -> list[CodeFormat]:
        """Formats of keys and, unless they are part of them, of values."""
        return [self._entry_type.keys, self._entry_type.values][: self.stored]


def quantized(cache: LayerCache, entry_type: QuantizedType, like: LayerCache | None) -> QuantizedCache:
    """Encode the entries of a cache; see :meth:`LayerCache.converted`."""
    tensors = cache.numbers() if isinstance(cache, QuantizedCache) else cache.tensors
    entry = EntryShape(cache.heads, cache.size, latent=cache.stored == 1)
    frames = like.frames.clone() if isinstance(like, QuantizedCache) else frame_of(tensors[0].float())
    width = rotation_of(entry.size, latent=entry.latent)
    each = zip((entry_type.keys, entry_type.values), tensors, (frames, None), strict=False)
    codes = [encoded(kind, numbers, own, width) for kind, numbers, own in each]
    return QuantizedCache([*codes, frames], entry, entry_type)
