"""The prefill of one prompt: how far each layer has got, and the caches the prompt is compressed into."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from snapstream.cache import CompressedSequence, LayerCache, reported_layers
from snapstream.compression import Layout, end_of_pins, pinned_levels
from snapstream.compression.pins import PastEntries, pins_compete
from snapstream.config import CacheBudget
from snapstream.engine.prefill.prefix_cache import Keeping, Prefix
from snapstream.engine.prefill.result import PrefillResult, shares_of
from snapstream.engine.requests.output import KeptTokens, TokenLogprobs
from snapstream.models.spec import ModelSpec
from snapstream.transfers import to_host


@dataclass(eq=False)
class Target:
    """The compressed cache of one request, with the request's own size and policy.

    Attributes:
        slot: The slot that the cache is in; ``None`` for one outside of any.
        budget: The request's budget.
        layers: One cache per layer, with a batch size of 1 and room for all kept entries: part of a slot, or
            separately allocated.
        layouts: Per group of layers, the layout of the compressed prompt.
        return_kept_tokens: Whether to report which tokens were kept, and the share of attention on them.
        keep: Whether true positions are needed later.
        scored: Number of most likely tokens to report for each prompt token; ``None`` if the prompt is not scored.
        positions: Per finished layer, true positions of the entries, int32 ``[N, count]``, if wanted.
        mass: Per finished layer that reports are about, the share of the last tokens' attention that falls on kept
            tokens, a scalar.
        parts: Number of kept tokens in each of :data:`KEPT_PARTS` equal parts of the prompt, over all heads of layers
            that reports are about.
        counted: Number of these heads.
        pinned: Level of each token of the conversation, int8, if some are pinned.
        pins_compete: Whether there are more of them than fit.
        error: Why this cache could not be built.
    """

    budget: CacheBudget
    layers: Sequence[LayerCache]
    layouts: tuple[Layout, ...]
    slot: int | None = None
    return_kept_tokens: bool = False
    keep: bool = False
    scored: int | None = None
    positions: list[Tensor] = field(default_factory=list)
    mass: list[Tensor] = field(default_factory=list)
    parts: Tensor | None = None
    counted: int = 0
    pinned: Tensor | None = None
    pins_compete: bool = False
    error: Exception | None = None

    @property
    def wants_positions(self) -> bool:
        """Whether true positions are collected."""
        return self.keep or self.return_kept_tokens

    def kept_tokens(self, reported: Sequence[int]) -> KeptTokens:
        """Which tokens were kept in the layers that reports are about; without the next-token module's."""
        positions = [self.positions[layer] for layer in reported[: len(self.mass)]]
        mass, *layers = to_host([torch.stack(self.mass), *positions])
        kept = tuple(tuple(tuple(head) for head in layer.sort(-1).values.tolist()) for layer in layers)
        return KeptTokens(tuple(mass.tolist()), kept)


class PrefillJob:
    """The prefill of one prompt for one or more requests.

    Attributes:
        lane: Index of the staging memory that it works in; see :mod:`snapstream.engine.prefill.staging`.
        tokens: The prompt, without earlier turns.
        past: The compressed cache of earlier turns.
        prefix: The cached prefix that the prompt starts with; often empty.
        skipped: Number of prompt tokens taken from ``prefix``.
        keeps: What is being added to the prefix cache, layer by layer.
        targets: The caches it is compressed into; several if several requests have this prompt.
        layer: The current layer.
        done: Tokens that have passed through it.
        logits: Logits of the last token, float32 ``[1, vocab]``, once they are computed.
        logprobs: Log-probabilities of the prompt's tokens, if it is scored.
    """

    def __init__(
        self,
        spec: ModelSpec,
        tokens: Sequence[int],
        *,
        past: CompressedSequence | None = None,
        lane: int = 0,
    ) -> None:
        self.tokens, self.past, self.lane = tokens, past, lane
        self.prefix = Prefix()
        self.skipped = 0
        self.keeps: Keeping | None = None
        self.targets: list[Target] = []
        self.layer = self.done = 0
        self.logits: Tensor | None = None
        self.logprobs: list[TokenLogprobs | None] = [None]
        self._spec = spec
        # Multiplications per token: with the weights, and with each key it attends to.
        self._constant, self._per_key = spec.layer_parameters, spec.heads * spec.largest_head * 2

    @property
    def group(self) -> int:
        """The group of the current layer."""
        return self._spec.group_of(self.layer)

    @property
    def has_voters(self) -> bool:
        """Whether the last queries of the current layer are needed: to choose entries, or to report on the choice."""
        return any(each.layouts[self.group].selects or each.return_kept_tokens for each in self.targets)

    @property
    def before(self) -> int:
        """Entries of earlier turns at the start of the current layer's staging cache."""
        return self._before(self.group)

    def entries_at(self, start: int) -> list[int]:
        """In each group of layers, the entry of the staging cache that a token of the prompt has."""
        return [self._before(group) + start for group in range(len(self._spec.groups))]

    @property
    def dropped_before(self) -> int:
        """Offset of true positions from the current layer's entries: tokens that it dropped in earlier turns."""
        return 0 if self.past is None else len(self.past.tokens) - self.before

    @property
    def length(self) -> int:
        """Entries in the staging cache when the current layer is finished."""
        return self.before + len(self.tokens)

    @property
    def total(self) -> int:
        """Tokens of the conversation."""
        return len(self.tokens) + (0 if self.past is None else len(self.past.tokens))

    @property
    def finished(self) -> bool:
        """Whether all layers have been prefilled and compressed."""
        return self.layer == self._spec.cached_layers

    @property
    def failed(self) -> bool:
        """Whether all targets have failed, so there is no use in continuing."""
        return all(target.error is not None for target in self.targets)

    @property
    def scored(self) -> int | None:
        """Number of most likely tokens to report for each prompt token; ``None`` if the prompt is not scored."""
        return max((each.scored for each in self.targets if each.scored is not None), default=None)

    @property
    def share(self) -> float:
        """Share of the work that is done, between 0 and 1."""
        skipped = self._work(self.skipped)
        done = (self._work(self.done) - skipped) / (self._work(len(self.tokens)) - skipped)
        return min(1.0, (self.layer + done) / self._spec.cached_layers)

    def add(
        self,
        budget: CacheBudget,
        layers: Sequence[LayerCache],
        *,
        slot: int | None = None,
        return_kept_tokens: bool = False,
        keep: bool = False,
        scored: int | None = None,
    ) -> Target:
        """Add a target for one more request; must be called before the prefill starts.

        Args:
            budget: The request's budget.
            layers: Per layer, a cache with a batch size of 1 and room for all kept entries.
            slot: See :class:`Target`.
            return_kept_tokens: See :class:`Target`.
            keep: See :class:`Target`.
            scored: See :class:`Target`.

        Returns:
            The target, which is filled layer by layer.
        """
        assert self.layer == 0
        assert self.done == self.skipped
        target = Target(budget, layers, self.layouts(budget), slot, return_kept_tokens, keep, scored)
        if target.layouts[0].pinned_end:
            target.pinned = pinned_levels(budget, self.total)
            target.pins_compete = pins_compete(target.pinned)
        self.targets.append(target)
        return target

    def result(self, target: Target) -> PrefillResult:
        """What the finished prefill leaves behind for one of its targets."""
        sequence = None
        if target.slot is None:
            sequence = CompressedSequence(
                groups=self._spec.groups,
                layers=target.layers,
                positions=target.positions,
                layouts=target.layouts,
                tokens=(*(() if self.past is None else self.past.tokens), *self.tokens),
                logits=self.logits,
                budget=target.budget,
            )
        scores = () if target.scored is None else (_shortened(one, target.scored) for one in self.logprobs)
        return PrefillResult(
            layouts=target.layouts,
            logits=self.logits,
            positions=target.positions if target.keep else (),
            sequence=sequence,
            kept=target.kept_tokens(reported_layers(self._spec.groups)) if target.return_kept_tokens else None,
            shares=shares_of(target.parts, self.total, target.counted),
            logprobs=tuple(scores),
            reused=self.skipped,
        )

    def layouts(self, budget: CacheBudget) -> tuple[Layout, ...]:
        """Per group of layers, the layout of the prompt compressed with a budget."""
        before = [self._before(group) for group in range(len(self._spec.groups))]
        return tuple(
            group.lay_out(known + len(self.tokens), budget, known, self._pinned_end(budget, number))
            for number, (group, known) in enumerate(zip(self._spec.groups, before, strict=True))
        )

    def _pinned_end(self, budget: CacheBudget, group: int) -> int:
        """In a group of layers, the end of the entries among which pinned tokens are."""
        known = self._spec.groups[group]
        if self.past is None or not budget.pin or not known.has_budget:
            return end_of_pins(budget, self.total)
        layout, tokens = self.past.layouts[group], len(self.past.tokens)
        ring = torch.cat([self.past.positions[layer][:, layout.base :].flatten() for layer in known.layers])
        levels = pinned_levels(budget, tokens).to(ring.device)
        ring_has_pins = bool((levels[ring.long()] > 0).any())
        return end_of_pins(budget, self.total, PastEntries(layout.count, tokens, layout.base, ring_has_pins))

    def _before(self, group: int) -> int:
        return 0 if self.past is None else self.past.layouts[group].count

    def begin_behind(self, prefix: Prefix) -> None:
        """Take the first tokens of the prompt from ``prefix``; must be called before the prefill starts."""
        assert self.past is None
        assert self.layer == self.done == 0
        self.prefix, self.skipped, self.done = prefix, prefix.tokens, prefix.tokens

    def _work(self, tokens: int) -> float:
        """Multiplications in one layer for the first ``tokens`` tokens."""
        return tokens * (self._constant + self._per_key * (self._before(0) + tokens / 2))


def _shortened(one: TokenLogprobs | None, most: int) -> TokenLogprobs | None:
    """The report cut to ``most`` alternatives; other requests with the same prompt may have asked for more."""
    if one is None or len(one.top) == most:
        return one
    return TokenLogprobs(one.token_id, one.logprob, dict(list(one.top.items())[:most]))
