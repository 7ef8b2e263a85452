"""Entries as codes of 8 or 4 bits (:mod:`snapstream.cache.codes`), for the cache object.

Models attend to numbers, so a decode step widens the entries of one layer after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapstream.cache import CODES, QuantizedType
from snapstream.cache.codes import frame_of, rotation_of
from snapstream.cache.quantized import decoded, encoded
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
        """Codes of keys ``[B, N, T, D]`` and values ``[B, N, T, D_v]``, uint8."""
        width, value_width = (rotation_of(each.shape[-1], latent=False) for each in (keys, values))
        return encoded(self.kind.keys, keys, frames, width), encoded(self.kind.values, values, None, value_width)

    def decoded(self, keys: Tensor, values: Tensor, frames: Tensor, value_size: int) -> tuple[Tensor, Tensor]:
        """What codes stand for, float32."""
        width, value_width = (rotation_of(size, latent=False) for size in (frames.shape[-1], value_size))
        return decoded(self.kind.keys, keys, frames, width), decoded(self.kind.values, values, None, value_width)
