"""Payloads: compressed caches serialized for transfer between two instances, as safetensors with a digest.

Both are checked before any tensor is used.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save
from torch import Tensor

from snapstream.compression.layout import Layout

_FORMAT = "snapstream-payload-1"
_NAMES = ("keys", "values")
_DIGEST = 32


class PayloadError(ValueError):
    """A payload is damaged, missing or not for this instance."""


@dataclass(frozen=True)
class Label:
    """Metadata on which both instances must agree.

    Attributes:
        layout: Layout of the cache, which follows from prompt and budget.
        model: Number of layers, hidden size and vocabulary size.
        first_head: Index of the share's first KV head in the model.
        dtype: Name of the cache's dtype.
        key_shape: KV heads of the share, and key size.
        value_shape: KV heads of the share, and value size; ``None`` if keys and values are one latent.
    """

    layout: Layout
    model: tuple[int, ...]
    first_head: int
    dtype: str
    key_shape: tuple[int, int]
    value_shape: tuple[int, int] | None

    def nbytes(self) -> int:
        """Bytes of the tensors, without headers."""
        numbers = sum(heads * size for heads, size in (self.key_shape, self.value_shape or (0, 0)))
        return self.model[0] * self.layout.count * numbers * getattr(torch, self.dtype).itemsize

    def most_bytes(self) -> int:
        """Maximum size, in bytes, of a payload with this label."""
        return self.nbytes() + 4096 + 256 * 2 * self.model[0] + _DIGEST


class Share(NamedTuple):
    """KV heads that one rank of a prefill instance sends to one rank of a decode instance.

    Attributes:
        sender: The sending rank.
        first: Index of the first head in the model.
        heads: Number of heads.
    """

    sender: int
    first: int
    heads: int


def heads_of(heads: int, ranks: int, rank: int) -> range:
    """KV heads that a tensor-parallel rank holds; with more ranks than heads, several ranks hold the same head."""
    if ranks <= heads:
        return range(rank * heads // ranks, (rank + 1) * heads // ranks)
    return range(rank * heads // ranks, rank * heads // ranks + 1)


def shares_for(heads: int, senders: int, receivers: int, receiver: int) -> list[Share]:
    """Which ranks send which heads to one rank; both instances compute the same result.

    Args:
        heads: KV heads of the model; 1 for latents.
        senders: Number of ranks of the prefill instance.
        receivers: Number of ranks of the decode instance.
        receiver: The receiving rank.
    """
    shares: list[Share] = []
    for head in heads_of(heads, receivers, receiver):
        holders = [rank for rank in range(senders) if head in heads_of(heads, senders, rank)]
        sender = holders[receiver % len(holders)]  # spreads the load over replicas of the head
        if shares and shares[-1].sender == sender:
            shares[-1] = shares[-1]._replace(heads=shares[-1].heads + 1)
        else:
            shares.append(Share(sender, head, 1))
    return shares


def pack(label: Label, layers: Sequence[tuple[Tensor, Tensor | None]]) -> bytes:
    """Serialize keys ``[N, E, D]`` and values ``[N, E, D_v]`` of all layers; they must be on the host."""
    tensors = {
        f"{number}.{name}": part.contiguous()
        for number, layer in enumerate(layers)
        for name, part in zip(_NAMES, layer, strict=True)
        if part is not None
    }
    packed = save(tensors, {"format": _FORMAT, "label": json.dumps(_plain(label))})
    return packed + hashlib.blake2b(packed, digest_size=_DIGEST).digest()


def unpack(payload: bytes, label: Label) -> list[tuple[Tensor, Tensor | None]]:
    """Check a payload and return its tensors.

    Args:
        payload: Output of :func:`pack`.
        label: The expected label.

    Returns:
        Per layer, keys ``[N, E, D]``, and values ``[N, E, D_v]`` or ``None`` for latents.

    Raises:
        PayloadError: The payload is damaged, or has a different label.
    """
    packed = memoryview(payload)[: -min(_DIGEST, len(payload))]
    found = _header(bytes(packed[: 2**20]))
    if found.get("format") != _FORMAT:
        raise PayloadError("it is not a payload of this version of SnapStream")
    try:
        said = json.loads(found["label"])
    except (KeyError, TypeError, ValueError) as error:
        raise PayloadError("its label cannot be read") from error
    wanted = _plain(label)
    if said != wanted:
        named = said if isinstance(said, dict) else {}
        other = [f"{name} {named.get(name)}, not {value}" for name, value in wanted.items() if named.get(name) != value]
        raise PayloadError(f"it is from an instance with different settings: {'; '.join(other)}")
    if hashlib.blake2b(packed, digest_size=_DIGEST).digest() != payload[-_DIGEST:]:
        raise PayloadError("it was damaged in transit")
    try:
        tensors = load(bytes(packed))
    except Exception as error:  # safetensors raises exceptions of many kinds
        raise PayloadError(f"it cannot be read: {error}") from error
    shapes = [label.key_shape] if label.value_shape is None else [label.key_shape, label.value_shape]
    layers: list[tuple[Tensor, Tensor | None]] = []
    for number in range(label.model[0]):
        parts = []
        for name, (heads, size) in zip(_NAMES, shapes, strict=False):
            part = tensors.pop(f"{number}.{name}", None)
            shape = (heads, label.layout.count, size)
            if part is None or tuple(part.shape) != shape or part.dtype != getattr(torch, label.dtype):
                raise PayloadError(f"{name} of layer {number} are missing, or have a different shape or dtype")
            parts.append(part)
        layers.append((parts[0], parts[1] if len(parts) == 2 else None))
    if tensors:
        raise PayloadError(f"it has unexpected tensors: {', '.join(sorted(tensors)[:3])}")
    return layers


def _plain(label: Label) -> dict[str, Any]:
    """A label in the form that JSON returns."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(label) | {"layout": astuple(label.layout)}))
    return plain


def _header(payload: bytes) -> dict[str, Any]:
    """The metadata in the header of a safetensors file; the rest is not read.

    Raises:
        PayloadError: The header cannot be read.
    """
    try:
        (size,) = struct.unpack_from("<Q", payload)
        found = json.loads(payload[8 : 8 + size])["__metadata__"]
    except (struct.error, KeyError, TypeError, ValueError, RecursionError) as error:
        raise PayloadError("it has no readable header") from error
    if not isinstance(found, dict):
        raise PayloadError("it has no readable header")
    return found
