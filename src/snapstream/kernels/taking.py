"""The operations at the end of a step: which tokens are taken, and what of the step is kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from snapstream.cache import StateCache
from snapstream.kernels.buffers import BufferView, Slots, StepBuffers
from snapstream.kernels.operations import Operation
from snapstream.kernels.sampling import SamplingState, sample, sample_greedy


@dataclass(frozen=True)
class Draw(Operation):
    """Choose each slot's next token as its request wants it, or take the forced one; for one token per slot."""

    logits: BufferView
    state: SamplingState

    @override
    def run(self, m: StepBuffers) -> None:
        slots, active, logits = m.slots, m.slots.active, self.logits.of(m.buffers)[:, 0]
        tokens = sample(logits, self.state, slots.position + 1, active, slots.forced[:, 0]).tokens
        left = torch.cat((slots.forced[:, 1:], torch.full_like(slots.forced[:, :1], -1)), 1)
        slots.forced.copy_(torch.where(active[:, None], left, slots.forced))
        slots.taken[m.step] = torch.where(active, tokens, slots.taken[m.step])
        slots.token[:, 0] = torch.where(active, tokens, slots.token[:, 0])
        slots.count.add_(active.long())
        slots.position.add_(active.long())


def accept(slots: Slots, tokens: Tensor) -> None:
    """Record the tokens taken, and how many of them are certain because the guesses before them were right.

    Args:
        slots: State of the slots; ``taken`` and ``accepted`` are written.
        tokens: The token that the model takes after each token, int64 ``[B, T]``; undefined after a wrong guess.
    """
    right = (slots.token[:, 1:] == tokens[:, :-1]) & slots.used()[:, 1:]
    assert slots.accepted is not None
    slots.accepted.copy_(torch.where(slots.active, 1 + right.long().cumprod(1).sum(1), slots.accepted))
    taken, places = slots.taken[: slots.tokens], torch.arange(slots.tokens, device=tokens.device)
    taken.copy_(torch.where(slots.active & (places[:, None] < slots.accepted), tokens.T, taken))


@dataclass(frozen=True)
class Verify(Operation):
    """Take the most likely token after each token that a grammar allows, or the forced one; see :func:`accept`."""

    logits: BufferView
    state: SamplingState

    @override
    def run(self, m: StepBuffers) -> None:
        slots = m.slots
        logits = self.logits.of(m.buffers)[:, 0].view(*slots.token.shape, -1)
        each = [sample_greedy(logits[:, t], self.state, slots.active, t) for t in range(slots.tokens)]
        likeliest = torch.stack(each, 1)
        forced = slots.forced[:, : slots.tokens]
        accept(slots, torch.where(forced >= 0, forced, likeliest))


@dataclass(frozen=True)
class Commit(Operation):
    """Write the pending entries of accepted tokens to the caches of all layers; states are settled separately."""

    @override
    def run(self, m: StepBuffers) -> None:
        slots, places = m.slots, [m.slots.entries(group) for group in range(len(m.slots.base))]
        assert slots.accepted is not None
        for layer, (cache, pending) in enumerate(zip(m.caches, m.pending, strict=True)):
            if isinstance(cache, StateCache):  # see Recur
                continue
            entries = places[m.group_of(layer)]
            for t in range(slots.tokens):
                stored = pending.read(torch.full_like(entries[:, :1], t))
                cache.write_stored(entries[:, t, None], stored, slots.active & (t < slots.accepted))


@dataclass(frozen=True)
class Advance(Operation):
    """Advance each slot past its accepted tokens; the last token taken is processed next."""

    @override
    def run(self, m: StepBuffers) -> None:
        slots = m.slots
        assert slots.accepted is not None
        accepted = torch.where(slots.active, slots.accepted, 0)
        last = slots.taken.gather(0, (accepted - 1).clamp(min=0)[None])[0]
        slots.token[:, 0] = torch.where(slots.active, last, slots.token[:, 0])
        most = slots.forced.shape[1]
        coming = torch.arange(most, device=accepted.device) + accepted[:, None]
        left = slots.forced.gather(1, coming.clamp(max=most - 1))
        slots.forced.copy_(torch.where(coming < most, left, -1))
        slots.count.add_(accepted)
        slots.position.add_(accepted)
