"""Entries as codes of 8 or 4 bits (:mod:`snapstream.cache.codes`), for the cache object.

Models attend to numbers, so a decode step widens the entries of one layer after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapstream.cache import CODES, QuantizedType
from snapstream.cache.codes import CodeFormat, frame_of, rotated, rotation_of
from snapstream.cache.quantized import encode
from snapstream.config.engine import KV_DTYPES
from snapstream.errors import ConfigurationError

ALLOWED = ("auto", *(name for name in KV_DTYPES if name.partition("/")[0] in CODES))
"""Types of entries; ``auto`` is that of the model's keys and values."""


@dataclass(frozen=True)
class Coding:
    """How a layer stores its entries.

    Attributes:
        name: The name that the user gave.
        kind: The formats of keys and of values.
    """

    name: str
    kind: QuantizedType

    @classmethod
    def named(cls, name: str) -> Coding | None:
        """The formats called ``name``; ``None`` for ``auto``.

        Raises:
            ConfigurationError: The name is unknown.
        """
        if name not in ALLOWED:
            raise ConfigurationError(f"kv_dtype is {name!r}; allowed: {', '.join(ALLOWED)}")
        kind = QuantizedType.named(name, torch.float32)
        return None if kind is None else cls(name, kind)

    def check(self, key_size: int, value_size: int) -> None:
        """Check that heads of these sizes can be stored.

        Raises:
            ConfigurationError: They cannot.
        """
        reason = self.kind.unsupported(key_size, value_size)
        if reason:
            raise ConfigurationError(f"kv_dtype is {self.name!r}: {reason}; use int8")

    def frames(self, keys: Tensor, counts: Sequence[int]) -> Tensor:
        """Frames of new sequences, float32 ``[B, N, 2, D]``, of the first ``counts`` of their keys ``[B, N, E, D]``."""
        each = [frame_of(keys[row : row + 1, :, : max(1, count)].float()) for row, count in enumerate(counts)]
        return torch.cat(each)

    def encoded(self, keys: Tensor, values: Tensor, frames: Tensor) -> tuple[Tensor, Tensor]:
        """CodeFormat of keys ``[B, N, T, D]`` and values ``[B, N, T, D_v]``, uint8."""
        return _encoded(self.kind.keys, keys, frames), _encoded(self.kind.values, values, None)

    def decoded(self, keys: Tensor, values: Tensor, frames: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """What codes stand for."""
        wide_keys, wide_values = (
            rotated(numbers, rotation_of(numbers.shape[-1], latent=False))
            for numbers in (self.kind.keys.decoded(keys), self.kind.values.decoded(values))
        )
        center, spread = frames[:, :, None].unbind(3)
        return (wide_keys * spread + center).to(dtype), wide_values.to(dtype)


def _encoded(codes: CodeFormat, numbers: Tensor, frames: Tensor | None) -> Tensor:
    B, N, T, D = numbers.shape
    target = torch.empty(B * N, T, codes.nbytes(D), dtype=torch.uint8, device=numbers.device)
    own = None if frames is None else frames.flatten(0, 1)
    encode(numbers.reshape(B * N, T, D), own, rotation_of(D, latent=False), codes.bits, target)
    return target.view(B, N, T, -1)
