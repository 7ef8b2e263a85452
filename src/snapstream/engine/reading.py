"""A prompt that is being read: which layer has seen how much of it, and the caches it is compressed into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from snapstream.cache import CompressedSequence, LayerCache
from snapstream.compression import Layout, lay_out
from snapstream.config import CacheBudget
from snapstream.engine.output import KEPT_PARTS, KeptTokens, TokenLogprobs
from snapstream.engine.prefixes import Prefix
from snapstream.models.spec import ModelSpec
from snapstream.transfers import to_host


@dataclass(eq=False)
class Target:
    """Where the prompt goes for one request, in its own size and by its own policy.

    Attributes:
        budget: The request's cache.
        layers: Of one row each, and at least as large as the budget: part of a slot, or memory of its own.
        layout: Of the compressed prompt.
        telemetry: Whether to report which tokens were kept, and how much attention they had.
        wants_positions: Whether true positions are needed later.
        positions: Per layer that is done, true positions of the entries, int32 ``[N, count]``, if they are wanted.
        mass: Per layer of the model that is done, the share of the window's attention on what was kept, a scalar.
        parts: Kept tokens in each of :data:`KEPT_PARTS` equal parts of the prompt, over all layers and heads.
        error: Why this one could not be made.
    """

    budget: CacheBudget
    layers: Sequence[LayerCache]
    layout: Layout
    telemetry: bool = False
    wants_positions: bool = False
    positions: list[Tensor] = field(default_factory=list)
    mass: list[Tensor] = field(default_factory=list)
    parts: Tensor | None = None
    error: Exception | None = None

    def kept_tokens(self) -> KeptTokens:
        """Telemetry of the whole prompt."""
        mass, *layers = to_host([torch.stack(self.mass), *self.positions[: len(self.mass)]])
        positions = tuple(tuple(tuple(head) for head in layer.sort(-1).values.tolist()) for layer in layers)
        return KeptTokens(tuple(mass.tolist()), positions)

    def kept_shares(self, length: int) -> tuple[float, ...]:
        """How much of each of :data:`KEPT_PARTS` equal parts of a conversation of ``length`` tokens was kept."""
        return _shares(self.parts, length, len(self.layers) * self.layers[0].keys.shape[1])


class Reading:
    """The state of reading one prompt for one or more requests.

    Attributes:
        tokens: The prompt, without the turns before.
        past: What a conversation's next turn begins with.
        prefix: What the prompt begins with, if that was read before.
        skipped: How many of its tokens.
        keeps: What the prompt begins with, to be kept for others; filled layer by layer.
        targets: What it is compressed into; more than one if several requests have this prompt.
        scored: Most likely tokens to report beside each of the prompt's; ``None``: the prompt is not scored.
        layer: The layer that tokens pass now.
        done: Tokens that have passed it.
        logits: Of the last token, float32 ``[1, vocab]``, once all is read.
        logprobs: Of the prompt's tokens, if it is scored.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tokens: Sequence[int],
        *,
        past: CompressedSequence | None = None,
        scored: int | None = None,
    ) -> None:
        self.tokens, self.past, self.scored = tokens, past, scored
        self.prefix: Prefix | None = None
        self.skipped = 0
        self.keeps: Prefix | None = None
        self.targets: list[Target] = []
        self.layer = self.done = 0
        self.logits: Tensor | None = None
        self.logprobs: list[TokenLogprobs | None] = [None]
        self._layers = spec.cached_layers
        # Multiplications per token: those with weights, and those with each key it sees.
        self._constant, self._per_key = spec.layer_parameters, spec.heads * spec.head_dim * 2

    @property
    def before(self) -> int:
        """Entries that the staging cache begins with."""
        return 0 if self.past is None else self.past.entries

    @property
    def dropped_before(self) -> int:
        """How far true positions are ahead of entries: tokens that a turn before has dropped."""
        return 0 if self.past is None else len(self.past.tokens) - self.past.entries

    @property
    def length(self) -> int:
        """Entries of the staging cache when a layer has been read."""
        return self.before + len(self.tokens)

    @property
    def finished(self) -> bool:
        """Whether all layers have been read and compressed."""
        return self.layer == self._layers

    @property
    def failed(self) -> bool:
        """Whether nobody is left to whom going on would be of use."""
        return all(target.error is not None for target in self.targets)

    @property
    def share(self) -> float:
        """How much of the work is done, between 0 and 1."""
        skipped = self._work(self.skipped)
        done = (self._work(self.done) - skipped) / (self._work(len(self.tokens)) - skipped)
        return min(1.0, (self.layer + done) / self._layers)

    def add(
        self,
        budget: CacheBudget,
        layers: Sequence[LayerCache],
        *,
        telemetry: bool = False,
        wants_positions: bool = False,
    ) -> Target:
        """Compress the prompt for one more request; before anything is read.

        Args:
            budget: The request's.
            layers: Per layer, a cache of one row with room for what is kept.
            telemetry: See :class:`Target`.
            wants_positions: See :class:`Target`.

        Returns:
            What is filled layer by layer.
        """
        assert self.layer == 0
        assert self.done == self.skipped
        layout = lay_out(self.length, budget, self.before)
        self.targets.append(Target(budget, layers, layout, telemetry, telemetry or wants_positions))
        return self.targets[-1]

    def begin_behind(self, prefix: Prefix, tokens: int) -> None:
        """Leave out the first ``tokens`` of the prompt, as ``prefix`` holds them; before anything is read."""
        assert self.past is None
        assert self.layer == self.done == 0
        self.prefix, self.skipped, self.done = prefix, tokens, tokens

    def _work(self, tokens: int) -> float:
        """Multiplications of a layer for the first ``tokens`` tokens."""
        return tokens * (self._constant + self._per_key * (self.before + tokens / 2))


def kept_shares(sequence: CompressedSequence) -> tuple[float, ...]:
    """How much of each of :data:`KEPT_PARTS` equal parts of its conversation a sequence holds."""
    length = len(sequence.tokens)
    if sequence.entries == length:
        return _shares(None, length, 1)
    positions = to_host([torch.stack(list(sequence.positions))])[0].to(torch.int64)
    return _shares(count_parts(positions, length), length, positions.shape[0] * positions.shape[1])


def count_parts(positions: Tensor, length: int) -> Tensor:
    """How many of some positions, int64, lie in each of :data:`KEPT_PARTS` equal parts of ``length`` tokens."""
    part = positions.flatten() * KEPT_PARTS // length
    return torch.zeros(KEPT_PARTS, dtype=torch.int64, device=part.device).scatter_add_(0, part, torch.ones_like(part))


def _shares(parts: Tensor | None, length: int, copies: int) -> tuple[float, ...]:
    if parts is None:  # nothing was dropped
        return (1.0,) * KEPT_PARTS
    sizes = count_parts(torch.arange(length), length)
    return tuple((to_host([parts])[0] / (sizes * copies).clamp(min=1)).tolist())
