"""Sampling for all slots at once. On CUDA, all shapes are fixed, so it runs inside the decode graph.

The noise depends only on the request's seed, the position and the token (Gumbel-max over counter-based noise). A seeded
request therefore gives the same tokens in any slot, whatever other requests are running.

On a CPU, where shapes may depend on data, only tokens that can be drawn are considered, and nothing is computed that no
running request asks for. The tokens drawn are the same. So are those of the native loop (``cpu/step_draw.h``), except
where the rounding of a logarithm or of a sum decides.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from snapstream.compression.scoring import counter_uniform
from snapstream.config import SamplingParams
from snapstream.transfers import to_device

FEW = 512
"""Best tokens that are looked at first on a CPU if not every token may be drawn."""
MOST_NOISE = 16.64
"""More than the largest noise, as uniform numbers are at most 1 - 2**-24."""


class Sampled(NamedTuple):
    """One step's tokens and their log-probabilities. On a CPU, the latter are 0 if no request wants any.

    Attributes:
        tokens: int64 ``[B]``.
        logprob: Log-probability of each under the unmodified distribution, float32 ``[B]``.
        top_ids: Most likely tokens, int64 ``[B, max_logprobs]``.
        top_logprobs: Their log-probabilities, float32 ``[B, max_logprobs]``.
    """

    tokens: Tensor
    logprob: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


class SamplingState:
    """Sampling parameters and token counts of every slot, in device tensors at fixed addresses."""

    def __init__(
        self, slots: int, vocab_size: int, max_logprobs: int, device: torch.device, *, places: int = 1
    ) -> None:
        """Allocate the state of idle slots.

        Args:
            slots: Number of slots.
            vocab_size: Number of tokens.
            max_logprobs: Maximum number of log-probabilities per token.
            device: The device.
            places: Tokens per slot that one step may take; each has a mask of its own.
        """
        self.vocab_size = vocab_size
        self.max_logprobs = min(max_logprobs, vocab_size)

        def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
            return torch.full((slots,), value, dtype=dtype, device=device)

        self.temperature = column(0.0)
        self.top_k = column(vocab_size, torch.int64)
        self.top_p = column(1.0)
        self.min_p = column(0.0)
        self.seed = column(0, torch.int64)
        self.presence = column(0.0)
        self.frequency = column(0.0)
        self.repetition = column(1.0)
        self.output_counts = torch.zeros(slots, vocab_size, dtype=torch.int32, device=device)
        self.bias = torch.zeros(slots, vocab_size, dtype=torch.float32, device=device)
        self.biased = column(False, torch.bool)
        self.wants_logprobs = column(False, torch.bool)
        self.in_prompt = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)
        # Tokens that end the output, and the first position at which they are allowed.
        self.ends = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)
        self.end_from = column(0, torch.int64)
        # Tokens that a grammar allows next, one bit each.
        self.masked = column(False, torch.bool)
        self.allowed = torch.full((places, slots, mask_words(vocab_size)), -1, dtype=torch.int32, device=device)

    def assign(self, slot: int, params: SamplingParams, seed: int, prompt: Tensor, ends: Iterable[int] = ()) -> None:
        """Set up a slot for a request.

        Args:
            slot: Index of the slot.
            params: The request's sampling parameters.
            seed: The request's seed.
            prompt: All tokens before the first generated one, int64 ``[L]`` on the device.
            ends: Tokens that end the output.
        """
        # fill_() rather than item assignment: assigning a Python number would wait for the GPU.
        self.temperature[slot].fill_(params.temperature)
        self.top_k[slot].fill_(min(params.top_k or self.vocab_size, self.vocab_size))
        self.top_p[slot].fill_(params.top_p)
        self.min_p[slot].fill_(params.min_p)
        self.seed[slot].fill_(seed)
        self.presence[slot].fill_(params.presence_penalty)
        self.frequency[slot].fill_(params.frequency_penalty)
        self.repetition[slot].fill_(params.repetition_penalty)
        self.output_counts[slot].fill_(0)
        self.in_prompt[slot].fill_(False).index_fill_(0, prompt, True)
        self.wants_logprobs[slot].fill_(params.logprobs is not None)
        self.bias[slot].fill_(0)
        self.biased[slot].fill_(bool(params.logit_bias))
        if params.logit_bias:
            tokens = to_device(list(params.logit_bias), self.bias.device)
            self.bias[slot, tokens] = to_device(list(params.logit_bias.values()), self.bias.device, torch.float32)
        self.end_from[slot].fill_(len(prompt) + params.min_tokens)
        self.ends[slot].fill_(False)
        self.masked[slot].fill_(params.structured_outputs is not None)
        known = [token for token in ends if token < self.vocab_size]
        if params.min_tokens and known and params.structured_outputs is None:  # the masks of grammars know them
            self.ends[slot].index_fill_(0, to_device(known, self.ends.device), True)

    def copy_row(self, slot: int, source: SamplingState, row: int) -> None:
        """Copy a row of another state into a slot."""
        for name, mine in vars(self).items():
            if isinstance(mine, Tensor) and name != "allowed":  # which is set for every step
                mine[slot] = vars(source)[name][row]


def mask_words(vocab_size: int) -> int:
    """Number of 32-bit words in a mask of all tokens."""
    return (vocab_size + 31) // 32


def sample_greedy(logits: Tensor, state: SamplingState, active: Tensor, place: int = 0) -> Tensor:
    """The most likely token of each row of ``[B, vocab]``; the first one in case of a tie.

    Grammars are followed on a CPU only: on CUDA, where it would take time in every step, :func:`sample` does it.
    """
    if shapes_may_vary(logits.device) and bool((active & state.masked).any()):
        logits = _mask(logits, state.masked, state.allowed[place])
    return logits.argmax(-1)


def impose(tokens: Tensor, forced: Tensor) -> Tensor:
    """``tokens`` ``[B]``, replaced by those of ``forced`` ``[B]`` that are not negative."""
    return torch.where(forced >= 0, forced, tokens)


def sample(
    logits: Tensor,
    state: SamplingState,
    position: Tensor,
    active: Tensor,
    forced: Tensor,
    place: int = 0,
) -> Sampled:
    """Draw a token for every slot and count it.

    These apply in order: penalties, bias, the mask of end tokens before ``min_tokens``, that of a grammar, temperature,
    min-p, top-k, top-p.

    Args:
        logits: float32 ``[B, vocab]``.
        state: Parameters of the slots; counts are updated in place.
        position: Position of the new token, int64 ``[B]``.
        active: Which slots hold a running request, bool ``[B]``.
        forced: Token to take instead of the drawn one, int64 ``[B]``; -1 for none.
        place: Which of the tokens of this step it is.
    """
    on_cpu = shapes_may_vary(logits.device)
    adjusted = logits if on_cpu and not _is_penalized(state, position, active) else _penalize(logits, state, position)
    if not on_cpu or bool((active & state.masked).any()):
        adjusted = _mask(adjusted, state.masked, state.allowed[place])
    greedy = state.temperature == 0
    scaled = adjusted / state.temperature.where(~greedy, 1.0)[:, None]
    limits = _Limits(state.top_k, state.top_p, state.min_p, state.seed * 1_000_003 + position)
    if on_cpu:
        drawn = scaled.argmax(-1)
        for rows, draw in zip(limits.kinds(active & ~greedy, scaled.shape[1]), (_draw_any, _draw_best), strict=True):
            if len(rows):
                drawn[rows] = draw(scaled[rows], drawn[rows, None], limits.of(rows))
    else:
        ordered, ids = _sorted(scaled)
        drawn = torch.where(greedy, ids[:, 0], _draw(ordered, ids, limits))
    tokens = impose(drawn, forced)
    state.output_counts.scatter_add_(1, tokens[:, None], active.to(torch.int32)[:, None])
    if on_cpu and not (active & state.wants_logprobs).any():
        nothing = logits.new_zeros(len(logits), state.max_logprobs)
        return Sampled(tokens, nothing[:, 0], nothing.long(), nothing)
    logprobs = logits.log_softmax(-1)
    top_logprobs, top_ids = logprobs.topk(state.max_logprobs, -1)
    return Sampled(tokens, logprobs.gather(1, tokens[:, None])[:, 0], top_ids, top_logprobs)


def shapes_may_vary(device: torch.device) -> bool:
    """Whether the shapes of temporaries may depend on data: not in a graph, and not without data."""
    return device.type == "cpu"


class _Limits(NamedTuple):
    """What may be drawn in each row, and the seed of its noise; all ``[B]``."""

    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor

    def of(self, rows: Tensor) -> _Limits:
        """The limits of some rows."""
        return _Limits(*(each[rows] for each in self))

    def kinds(self, sampled: Tensor, vocab_size: int) -> tuple[Tensor, Tensor]:
        """Of the rows that are ``sampled``, those without limits and those with some."""
        unlimited = (self.top_k >= vocab_size) & (self.top_p >= 1) & (self.min_p == 0)
        return (sampled & unlimited).nonzero()[:, 0], (sampled & ~unlimited).nonzero()[:, 0]


def _sorted(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of each row from the highest to the lowest, and their tokens.

    A stable sort breaks ties in favor of the smaller token id, and makes top-k exact.
    """
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    return ordered, ids


def _gumbel(seed: Tensor, ids: Tensor) -> Tensor:
    return -torch.log(-torch.log(counter_uniform(seed, ids)))


def _draw(ordered: Tensor, ids: Tensor, limits: _Limits, rest: Tensor | float = 0.0) -> Tensor:
    """Draw a token per row.

    Args:
        ordered: Logits of a row's tokens, the highest first, ``[B, n]``; minus infinity for padding.
        ids: Their tokens.
        limits: See :class:`_Limits`.
        rest: What tokens that are not listed add to the sum of weights, which are 1 for the likeliest, ``[B, 1]``.
    """
    rank = torch.arange(ordered.shape[-1], device=ordered.device)
    keep = ordered - ordered[:, :1] >= limits.min_p[:, None].log()
    keep &= rank < limits.top_k[:, None]
    weight = (ordered - ordered[:, :1]).exp().where(keep, 0.0)
    probability = weight / (weight.sum(-1, keepdim=True) + rest)
    keep &= probability.cumsum(-1) - probability < limits.top_p[:, None]
    keep |= rank == 0
    best = torch.where(keep, ordered + _gumbel(limits.seed[:, None], ids), float("-inf")).argmax(-1, keepdim=True)
    return ids.gather(1, best)[:, 0]


def _draw_any(scaled: Tensor, likeliest: Tensor, limits: _Limits) -> Tensor:
    """:func:`_draw` without limits, which needs no order: among tokens that noise can lift above the ``likeliest``."""
    drawn = []
    for row, first, seed in zip(scaled, likeliest, limits.seed, strict=True):
        reached = row[first] + _gumbel(seed, first)
        ids = (row >= torch.minimum(reached - MOST_NOISE, row[first])).nonzero()[:, 0]
        values = row[ids] + _gumbel(seed, ids)
        best = (values == values.max()).nonzero()[:, 0]
        drawn.append(ids[best[row[ids[best]].argmax()]])  # of equal ones the likelier, which comes first if sorted
    return torch.stack(drawn)


def _draw_best(scaled: Tensor, likeliest: Tensor, limits: _Limits) -> Tensor:
    """:func:`_draw` with limits: of the best tokens, as many as it takes to have all that may be drawn."""
    peak, V = scaled.gather(1, likeliest), scaled.shape[1]
    all_weights = (scaled - peak).exp().sum(-1)
    count = FEW
    while count < V // 2:
        lowest = scaled.topk(count, -1).values[:, -1:]
        rows, ids = (scaled >= lowest).nonzero(
            as_tuple=True
        )  # all that are as good as the last one; by row, then token
        counts = rows.bincount(minlength=len(scaled))
        place = torch.arange(len(rows)) - (counts.cumsum(0) - counts)[rows]
        values = scaled.new_full((len(scaled), int(counts.max())), float("-inf"))
        values[rows, place] = scaled[rows, ids]
        tokens = torch.zeros_like(values, dtype=torch.int64)
        tokens[rows, place] = ids
        weights = (values - peak).exp().sum(-1)
        is_limited = (limits.top_k <= counts) | (limits.min_p.log() > (lowest - peak)[:, 0])
        only_top_p = (limits.top_k >= V) & (limits.min_p == 0)
        if bool((is_limited | (only_top_p & (weights > limits.top_p * all_weights))).all()):
            ordered, order = _sorted(values)
            rest = (all_weights - weights).clamp(min=0).where(~is_limited, 0.0)[:, None]
            return _draw(ordered, tokens.gather(1, order), limits, rest)
        count *= 8
    return _draw(*_sorted(scaled), limits)


def _is_penalized(state: SamplingState, position: Tensor, active: Tensor) -> bool:
    """Whether :func:`_penalize` changes anything for a running request."""
    changes = (state.presence != 0) | (state.frequency != 0) | (state.repetition != 1) | state.biased
    return bool((active & (changes | (position < state.end_from))).any())


def _penalize(logits: Tensor, state: SamplingState, position: Tensor) -> Tensor:
    seen = state.output_counts > 0
    factor = torch.where(seen | state.in_prompt, state.repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - seen * state.presence[:, None] - state.output_counts * state.frequency[:, None]
    too_early = state.ends & (position < state.end_from)[:, None]
    return (logits + state.bias).masked_fill(too_early, float("-inf"))


def _mask(logits: Tensor, masked: Tensor, allowed: Tensor) -> Tensor:
    """Leave out tokens that are not ``allowed``, int32 ``[B, words]``, in rows that are ``masked``."""
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    is_allowed = (allowed.view(torch.uint8)[..., None] >> bits & 1).bool().flatten(1)[:, : logits.shape[1]]
    return logits.masked_fill(masked[:, None] & ~is_allowed, float("-inf"))
