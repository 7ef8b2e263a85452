"""Sampling for all slots at once, with fixed shapes, so it runs inside the decode graph.

The noise depends only on the request's seed, the position and the token (Gumbel-max over counter-based noise). A seeded
request therefore gives the same tokens in any slot, whatever other requests are running.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from snapstream.compression.scoring import counter_uniform
from snapstream.config import SamplingParams
from snapstream.transfers import to_device


class Sampled(NamedTuple):
    """One step's tokens and their log-probabilities.

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

    def __init__(self, slots: int, vocab_size: int, max_logprobs: int, device: torch.device) -> None:
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
        self.in_prompt = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)
        # Tokens that end the output, and the first position at which they are allowed.
        self.ends = torch.zeros(slots, vocab_size, dtype=torch.bool, device=device)
        self.end_from = column(0, torch.int64)

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
        self.bias[slot].fill_(0)
        if params.logit_bias:
            tokens = to_device(list(params.logit_bias), self.bias.device)
            self.bias[slot, tokens] = to_device(list(params.logit_bias.values()), self.bias.device, torch.float32)
        self.end_from[slot].fill_(len(prompt) + params.min_tokens)
        self.ends[slot].fill_(False)
        known = [token for token in ends if token < self.vocab_size]
        if params.min_tokens and known:
            self.ends[slot].index_fill_(0, to_device(known, self.ends.device), True)

    def copy_row(self, slot: int, source: SamplingState, row: int) -> None:
        """Copy a row of another state into a slot."""
        for name, mine in vars(self).items():
            if isinstance(mine, Tensor):
                mine[slot] = vars(source)[name][row]


def sample_greedy(logits: Tensor) -> Tensor:
    """The most likely token of each row of ``[B, vocab]``; the first one in case of a tie."""
    return logits.argmax(-1)


def impose(tokens: Tensor, forced: Tensor) -> Tensor:
    """``tokens`` ``[B]``, replaced by those of ``forced`` ``[B]`` that are not negative."""
    return torch.where(forced >= 0, forced, tokens)


def sample(logits: Tensor, state: SamplingState, position: Tensor, active: Tensor, forced: Tensor) -> Sampled:
    """Draw a token for every slot and count it.

    These apply in order: penalties, bias, the mask of end tokens before ``min_tokens``, temperature, min-p, top-k,
    top-p.

    Args:
        logits: float32 ``[B, vocab]``.
        state: Parameters of the slots; counts are updated in place.
        position: Position of the new token, int64 ``[B]``.
        active: Which slots hold a running request, bool ``[B]``.
        forced: Token to take instead of the drawn one, int64 ``[B]``; -1 for none.
    """
    logprobs = logits.log_softmax(-1)
    top_logprobs, top_ids = logprobs.topk(state.max_logprobs, -1)
    adjusted = _penalize(logits, state, position)
    greedy = state.temperature == 0
    scaled = adjusted / state.temperature.where(~greedy, 1.0)[:, None]
    # A stable sort breaks ties in favor of the smaller token id, and makes top-k exact.
    ordered, ids = torch.sort(scaled, dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    keep = ordered - ordered[:, :1] >= state.min_p[:, None].log()
    keep &= rank < state.top_k[:, None]
    probability = ordered.masked_fill(~keep, float("-inf")).softmax(-1)
    keep &= probability.cumsum(-1) - probability < state.top_p[:, None]
    keep |= rank == 0
    noise_seed = (state.seed * 1_000_003 + position)[:, None]
    gumbel = -torch.log(-torch.log(counter_uniform(noise_seed, ids)))
    drawn = torch.where(keep, ordered + gumbel, float("-inf")).argmax(-1, keepdim=True)
    tokens = impose(torch.where(greedy, ids[:, 0], ids.gather(1, drawn)[:, 0]), forced)
    state.output_counts.scatter_add_(1, tokens[:, None], active.to(torch.int32)[:, None])
    chosen = logprobs.gather(1, tokens[:, None])[:, 0]
    return Sampled(tokens, chosen, top_ids, top_logprobs)


def _penalize(logits: Tensor, state: SamplingState, position: Tensor) -> Tensor:
    seen = state.output_counts > 0
    factor = torch.where(seen | state.in_prompt, state.repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    logits = logits - seen * state.presence[:, None] - state.output_counts * state.frequency[:, None]
    too_early = state.ends & (position < state.end_from)[:, None]
    return (logits + state.bias).masked_fill(too_early, float("-inf"))
