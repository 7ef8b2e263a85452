"""A prompt that waits in one layer of the cache, and the choice of the tokens to keep of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from snapstream.compression import LayoutTensors, choose_entries, lay_out, layout_tensors
from snapstream.config import CacheBudget, LayerPrompt
from snapstream.config.policy import ALL
from snapstream.integrations.transformers.pins import BatchPins
from snapstream.transfers import to_device


@dataclass
class WaitingPrompt:
    """A prompt that has not been compressed yet, appended to the previous contents of the cache.

    Attributes:
        keys: ``[B, N, L, D]``.
        values: ``[B, N, L, D_v]``.
        first_voters: Per sequence, how many of the tokens come from the cache; their queries no longer exist.
        entries: True positions of the tokens that come from the cache, ``[B, N or 1, C]``; ``None`` if none are pinned.
        bases: Per sequence, the first of them that was in the ring.
        real: Which tokens are neither padding nor unused entries, ``[B, L]``; ``None`` if all tokens are real, or while
            this is not known for new tokens.
        tail: Queries of the last ``W`` tokens, ``[B, H, W, D]``.
        chosen: Tokens that would be kept if the prompt ended here, ``[B, N or 1, C]``; ``None`` until attention has
            run.
        layout: Layout of the cache with the chosen tokens.
        positions: True positions of the chosen tokens, like ``chosen``; ``None`` if none are pinned.
    """

    keys: Tensor
    values: Tensor
    first_voters: list[int]
    entries: Tensor | None = None
    bases: Sequence[int] = ()
    real: Tensor | None = None
    tail: Tensor | None = None
    chosen: Tensor | None = None
    layout: LayoutTensors | None = None
    positions: Tensor | None = None

    @torch.no_grad()
    def observe(self, query: Tensor, fresh: Tensor | None, budget: CacheBudget) -> None:
        """Keep the queries that vote if the prompt ends here.

        Args:
            query: Rotated queries of the last tokens, ``[B, H, T, D]``.
            fresh: Which of them are not padding, ``[B, T]``; ``None`` if all are.
            budget: Budget of one sequence.
        """
        keeps_all = budget.policy.queries == ALL
        if self.tail is None:
            self.tail = F.pad(query[:, :, :0], (0, 0, 0 if keeps_all else budget.window, 0))
        queries = torch.cat((self.tail, query), 2)
        if fresh is not None:  # move the real ones to the end, in order
            flags = F.pad(fresh.int(), (self.tail.shape[2], 0), value=1)
            queries = take(queries, flags.sort(dim=1, stable=True).indices[:, None])
        self.tail = queries if keeps_all else queries[:, :, -budget.window :]

    @torch.no_grad()
    def choose(
        self,
        key: Tensor,
        lengths: Sequence[int],
        budget: CacheBudget,
        pins: BatchPins | None,
        *,
        latent: bool,
        layer: int,
        softmax: dict[str, Any],
    ) -> None:
        """Select the tokens that would be kept if the prompt ended here.

        Args:
            key: Rotated keys of all tokens, ``[B, N, L, D]``; for MLA, expanded to all heads.
            lengths: Real tokens per sequence.
            budget: Budget of one sequence.
            pins: Pinned tokens of all sequences; ``None`` if there are none.
            latent: Whether all heads keep the same tokens (MLA).
            layer: Index of the layer.
            softmax: How logits become weights: ``scale``, ``cap`` and ``sinks`` of :class:`LayerPrompt`.
        """
        assert self.tail is not None
        # 1. The layout of each sequence's cache
        ends = [0] * len(lengths) if pins is None else pins.ends
        sizes = zip(lengths, self.first_voters, ends, strict=True)
        layouts = [lay_out(length, budget, first, end) for length, first, end in sizes]
        self.layout = layout = layout_tensors(layouts, key.device)
        # 2. The choice among the real tokens, in order
        real = self.real
        order = None if real is None or bool(real.all()) else (~real).sort(dim=1, stable=True).indices[:, None]
        if any(one.selects for one in layouts):
            values = self.values if budget.policy.needs_values else None
            shown = LayerPrompt(
                self.tail,
                key if order is None else take(key, order),
                values if order is None or values is None else take(values, order),
                layout,
                budget.sink,
                layer=layer,
                pinned=None if pins is None else to_device(pins.levels, key.device, torch.int8),
                pins_compete=pins is not None and pins.compete,
                **softmax,
            )
            chosen = choose_entries(shown, budget, combine=_mean_of_heads if latent else None)
            chosen = chosen[:, :1] if latent else chosen
        else:
            entry = torch.arange(budget.capacity, device=key.device)
            chosen = torch.where(entry < layout.count[:, None], entry, -1)[:, None]
        # 3. Where they are among all tokens
        chosen = chosen.clamp(min=0)
        self.positions = None if pins is None else to_device(pins.positions_of(chosen), key.device)
        self.chosen = chosen if order is None else order.expand(-1, chosen.shape[1], -1).gather(2, chosen)


def take(tensor: Tensor, entries: Tensor) -> Tensor:
    """Gather entries ``[B, N or 1, E]`` of ``[B, N, L, D]``."""
    return tensor.gather(2, entries[..., None].expand(-1, tensor.shape[1], -1, tensor.shape[-1]))


def _mean_of_heads(votes: Tensor) -> Tensor:
    """Average the votes of all heads, ``[B, N, L] -> [B, 1, L]``."""
    return votes.mean(1, keepdim=True)
