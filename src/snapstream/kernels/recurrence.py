"""Gated DeltaNet (arXiv 2412.06464): linear attention whose layers have a state of fixed size instead of a cache.

A token's queries, keys and values go through a short convolution with those of the tokens before it. Each value head
has a matrix ``S`` ``[key, value]``. A token first makes it decay; then what the matrix says about its key moves towards
its value, by a strength between 0 and 1::

    S = decay * S
    S = S + strength * key (value - key @ S)
    output = query @ S

Steps of several tokens leave states as they are, since some tokens are guesses; they only record their inputs. The same
operation with ``settles`` then feeds the inputs of accepted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from snapstream.cache import StateCache
from snapstream.kernels.buffers import BufferView, PromptChunk, StepBuffers
from snapstream.kernels.operations import Operation

CHUNK = 64
"""Tokens of a prompt that matrix products take together."""
AT_ONCE = 4 * CHUNK
"""Tokens of a prompt whose queries, keys and values are held in float32 at once."""
NORM_EPSILON = 1e-6
"""Added to the sum of squares of queries and keys."""


@dataclass(frozen=True)
class Recur(Operation):
    """One layer's convolution and state, given a row per token.

    Attributes:
        source: Queries, keys and values of all heads; then the logits of the strengths ``b`` and what decides the
            decays ``a`` of all value heads. The logarithm of a decay is ``rate * softplus(a + shift)``.
        target: Outputs, ``[heads, value]``.
        layer: Index of the state.
        taps: The convolution's weights, ``[before + 1, channels]``, the last row for the token itself.
        rates: Negative, float32 ``[heads]``.
        shifts: float32 ``[heads]``.
        before: Tokens that the convolution looks back to.
        key_heads: Heads of queries and keys.
        key_size: Their elements.
        in_turn: Whether value heads take key heads in turn (as GGUF files store them); otherwise, neighboring value
            heads share one.
        settles: Whether states are brought past the tokens accepted; no outputs are computed.
    """

    source: BufferView
    target: BufferView
    layer: int
    taps: Tensor
    rates: Tensor
    shifts: Tensor
    before: int
    key_heads: int
    key_size: int
    in_turn: bool
    settles: bool = False

    @override
    def run(self, m: StepBuffers) -> None:
        slots, cache = m.slots, m.caches[self.layer]
        assert isinstance(cache, StateCache)
        (B, T), before = slots.token.shape, self.before
        entries, ring, used = cache.entries, cache.inputs, slots.used()
        rows = torch.arange(B, device=ring.device)[:, None]
        # 1. The inputs of these tokens and of those that the convolution looks back to; zeros before the first one.
        places = slots.position[:, None] + torch.arange(-before, T, device=ring.device)
        if self.settles:
            inputs = ring[rows, places % entries].to(m.dtype)
        else:
            given = self.source.of(m.buffers)[:, 0].view(B, T, -1)
            given = given.to(ring.dtype).to(given.dtype)  # as it will be when it is fed again
            inputs = torch.cat((ring[rows, places[:, :before] % entries].to(given.dtype), given), 1)
        inputs = inputs.masked_fill(places[..., None] < 0, 0)
        # 2. Record them.
        if not self.settles:
            self.record(m)
        # 3. The recurrence, from the state before these tokens.
        if self.settles:
            assert slots.accepted is not None
            used = slots.active[:, None] & (torch.arange(T, device=ring.device) < slots.accepted[:, None])
        rule = chunked if isinstance(m, PromptChunk) else one_by_one
        state = cache.matrices.to(torch.promote_types(m.dtype, torch.float32))
        for start in range(0, T, AT_ONCE):
            some = slice(start, start + AT_ONCE)
            out, state = rule(*self._heads(inputs[:, start : start + before + AT_ONCE], used[:, some]), state)
            if not self.settles:
                target = self.target.of(m.buffers).view(B, T, self.target.heads, -1)[:, some]
                target.copy_(torch.where(used[:, some, None, None], out.to(target.dtype), target))
        # 4. Tokens that are certain change the state.
        if self.settles or T == 1 or isinstance(m, PromptChunk):
            cache.matrices.copy_(torch.where(slots.active[:, None, None, None], state, cache.matrices))

    @override
    def in_loop(self, m: StepBuffers) -> Operation | None:
        return self if isinstance(m, PromptChunk) else None

    def record(self, m: StepBuffers) -> None:
        """Record the inputs of a step or of a chunk; of a long chunk, the last ones, as no more are needed."""
        slots, cache = m.slots, m.caches[self.layer]
        assert isinstance(cache, StateCache)
        (B, T), ring = slots.token.shape, cache.inputs
        first = max(0, T - cache.entries)
        given = self.source.of(m.buffers)[:, 0].view(B, T, -1)[:, first:].to(ring.dtype)
        rows = torch.arange(B, device=ring.device)[:, None]
        places = (slots.position[:, None] + torch.arange(first, T, device=ring.device)) % cache.entries
        ring[rows, places] = torch.where(slots.used()[:, first:, None], given, ring[rows, places])

    def _heads(self, inputs: Tensor, used: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values, strengths and logarithms of decays of all value heads, ``[B, heads, T, ...]``.

        Args:
            inputs: ``[B, before + T, size]``.
            used: Which tokens there are, ``[B, T]``; the others change nothing.
        """
        (B, T), (heads, value) = used.shape, (self.target.heads, self.target.size)
        before, channels = self.before, self.taps.shape[1]
        wide = torch.promote_types(inputs.dtype, torch.float32)
        mixed = convolved(inputs[..., :channels], self.taps)
        queries, keys, values = torch.split(mixed, [self.key_heads * self.key_size] * 2 + [heads * value], -1)
        queries, keys = (each.view(B, T, self.key_heads, -1).to(wide) for each in (queries, keys))
        order = key_head_of(heads, self.key_heads, in_turn=self.in_turn, device=inputs.device)
        queries, keys = (normalized(each)[:, :, order] for each in (queries, keys))
        given = inputs[:, before:, channels:]
        strengths = given[..., :heads].sigmoid().to(wide)
        decays = self.rates.to(wide) * F.softplus(given[..., heads:].to(wide) + self.shifts.to(wide))
        strengths, decays = (torch.where(used[..., None], each, 0).transpose(1, 2) for each in (strengths, decays))
        values = values.view(B, T, heads, value).to(wide).transpose(1, 2)
        return (queries * self.key_size**-0.5).transpose(1, 2), keys.transpose(1, 2), values, strengths, decays


def convolved(inputs: Tensor, taps: Tensor) -> Tensor:
    """Causal convolution of each channel, and SiLU.

    Args:
        inputs: ``[B, before + T, channels]``.
        taps: ``[before + 1, channels]``.

    Returns:
        ``[B, T, channels]``, in the dtype of the inputs.
    """
    wide = torch.promote_types(inputs.dtype, torch.float32)
    tokens = inputs.shape[1] - len(taps) + 1
    total = torch.zeros_like(inputs[:, :tokens], dtype=wide)
    for at, tap in enumerate(taps.to(wide)):
        total.addcmul_(inputs[:, at : at + tokens].to(wide), tap)
    return F.silu(total).to(inputs.dtype)


def normalized(x: Tensor) -> Tensor:
    """Vectors of length 1 along the last axis."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPSILON)


def key_head_of(heads: int, key_heads: int, *, in_turn: bool, device: torch.device | str = "cpu") -> Tensor:
    """The key head of each value head."""
    each = torch.arange(heads, device=device)
    return each % key_heads if in_turn else each // (heads // key_heads)


def one_by_one(
    queries: Tensor, keys: Tensor, values: Tensor, strengths: Tensor, decays: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """The rule as it is defined, one token after another.

    Args:
        queries: ``[B, H, T, K]``.
        keys: ``[B, H, T, K]``.
        values: ``[B, H, T, V]``.
        strengths: ``[B, H, T]``; 0 for a token that changes nothing.
        decays: Logarithms, ``[B, H, T]``; 0 likewise.
        state: ``[B, H, K, V]``.

    Returns:
        Outputs ``[B, T, H, V]``, and the state after the last token.
    """
    outputs = []
    for t in range(queries.shape[2]):
        state = state * decays[:, :, t, None, None].exp()
        known = torch.einsum("bhk,bhkv->bhv", keys[:, :, t], state)
        change = (values[:, :, t] - known) * strengths[:, :, t, None]
        state = state + keys[:, :, t, :, None] * change[:, :, None]
        outputs.append(torch.einsum("bhk,bhkv->bhv", queries[:, :, t], state))
    return torch.stack(outputs, 1), state


def chunked(
    queries: Tensor, keys: Tensor, values: Tensor, strengths: Tensor, decays: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """:func:`one_by_one` for many tokens, by matrix products of :data:`CHUNK` tokens (arXiv 2412.06464, section 3.3).

    Within a chunk, let ``d(t)`` be the product of decays up to token ``t``. The changes ``U`` of its tokens solve a
    triangular system, because each depends on the changes before it::

        U[t] = strength[t] * (value[t] - d(t) key[t] @ S - sum over s < t of d(t)/d(s) (key[t] @ key[s]) U[s])
    """
    length = queries.shape[2]
    short = -length % CHUNK
    queries, keys, values = (F.pad(each, (0, 0, 0, short)) for each in (queries, keys, values))
    strengths, decays = (F.pad(each, (0, short)) for each in (strengths, decays))
    many = (length + short) // CHUNK
    shape = (*queries.shape[:2], many, CHUNK)
    queries, keys, values = (each.reshape(*shape, -1) for each in (queries, keys, values))
    strengths, decays = strengths.reshape(shape), decays.double().reshape(shape)
    # 1. Of all chunks at once: what does not depend on the state.
    until = decays.cumsum(-1)  # in float64: differences of long sums
    later = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=queries.device).triu(1)
    between = (until[..., :, None] - until[..., None, :]).masked_fill(later, -torch.inf).exp().to(queries.dtype)
    since, left = (each.exp().to(queries.dtype)[..., None] for each in (until, until[..., -1:] - until))
    weighted = keys * strengths[..., None]
    system = weighted @ keys.transpose(-1, -2) * between
    right = torch.cat((values * strengths[..., None], weighted * since), -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    changes, known = torch.split(solved, [values.shape[-1], keys.shape[-1]], -1)
    attention = queries @ keys.transpose(-1, -2) * between
    queries, keys = queries * since, keys * left
    # 2. Chunk after chunk.
    outputs = []
    for at in range(many):
        change = changes[:, :, at] - known[:, :, at] @ state
        outputs.append(queries[:, :, at] @ state + attention[:, :, at] @ change)
        state = state * since[:, :, at, -1:] + keys[:, :, at].transpose(-1, -2) @ change
    return torch.cat(outputs, 2)[:, :, :length].transpose(1, 2), state
