"""What a prefill leaves behind for one request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapstream.cache import CompressedSequence, reported_layers
from snapstream.compression import Layout
from snapstream.engine.requests.output import KEPT_PARTS, KeptTokens, TokenLogprobs
from snapstream.transfers import to_host


@dataclass(frozen=True, eq=False)
class PrefillResult:
    """A compressed prompt, in its slot or outside of any.

    Attributes:
        layouts: Per group of layers, the layout of the cache.
        logits: Logits of the prompt's last token, float32 ``[1, vocab]``; dropped once they are no longer needed.
        positions: Per layer, true positions of the entries, int32 ``[N, count]``; empty unless the cache is returned.
        sequence: The cache, if it is outside of any slot.
        kept: Which tokens were kept, if requested.
        shares: Share of tokens kept in each part of the prompt.
        logprobs: Log-probabilities of the prompt's tokens, if requested.
        reused: Prompt tokens taken from the prefix cache.
    """

    layouts: tuple[Layout, ...]
    logits: Tensor | None
    positions: Sequence[Tensor] = ()
    sequence: CompressedSequence | None = None
    kept: KeptTokens | None = None
    shares: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    reused: int = 0

    @classmethod
    def of_stored(cls, sequence: CompressedSequence, *, keep: bool) -> PrefillResult:
        """A stored sequence that is decoded unchanged; ``keep`` tells whether its cache is returned again."""
        pairs = zip(sequence.groups, sequence.layouts, strict=True)
        return cls(
            layouts=tuple(group.resumed(layout) for group, layout in pairs),
            logits=sequence.logits,
            positions=sequence.positions if keep else (),
            sequence=sequence,
            shares=kept_shares(sequence),
        )


def kept_shares(sequence: CompressedSequence) -> tuple[float, ...]:
    """Share of tokens that a sequence holds of each of :data:`KEPT_PARTS` equal parts of its conversation."""
    length = len(sequence.tokens)
    if sequence.entries == length:
        return shares_of(None, length, 1)
    positions = [sequence.positions[layer] for layer in reported_layers(sequence.groups)]
    held = to_host([torch.cat(positions)])[0].to(torch.int64)
    return shares_of(count_parts(held, length), length, len(held))


def count_parts(positions: Tensor, length: int) -> Tensor:
    """Count the positions, int64, that lie in each of :data:`KEPT_PARTS` equal parts of ``length`` tokens."""
    part = positions.flatten() * KEPT_PARTS // length
    return torch.zeros(KEPT_PARTS, dtype=torch.int64, device=part.device).scatter_add_(0, part, torch.ones_like(part))


def shares_of(parts: Tensor | None, length: int, copies: int) -> tuple[float, ...]:
    """Share of ``length`` tokens that is kept in each part; ``parts`` counts them over ``copies`` heads."""
    if parts is None:  # nothing was dropped
        return (1.0,) * KEPT_PARTS
    sizes = count_parts(torch.arange(length), length)
    return tuple((to_host([parts])[0] / (sizes * copies).clamp(min=1)).tolist())
