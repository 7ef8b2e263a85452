"""Steps of layers with a state: the short convolution and the gated delta rule in one kernel.

A program holds some columns of one value head's matrix while it goes through the tokens of a slot. Columns do not
depend on each other; the queries and keys that all need are convolved again by each program.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from snapstream.cache import StateCache
from snapstream.kernels.buffers import StepBuffers
from snapstream.kernels.recurrence import NORM_EPSILON, Recur
from snapstream.kernels.triton.tiles import rounded

COLUMNS = 32
"""Columns of a matrix per program; an estimate."""


@triton.jit
def _input(source, ring, channel, mask, row, position, token, source_row, ring_entry, entries, SETTLES: tl.constexpr):
    """Channels of a slot's token, given its number in this step; negative for tokens before."""
    place = position + token + channel * 0
    is_recorded = place >= 0
    if not SETTLES:
        is_recorded = is_recorded & (place < position)
    recorded = tl.load(ring + (place % entries) * ring_entry + channel, mask=mask & is_recorded, other=0.0)
    x = recorded.to(tl.float32)
    if not SETTLES:
        given = tl.load(source + (row + token) * source_row + channel, mask=mask & (place >= position), other=0.0)
        x += rounded(given.to(tl.float32), ring).to(tl.float32)  # as it is recorded
    return x


@triton.jit
def _convolved(
    source,
    ring,
    taps,
    channel,
    mask,
    row,
    position,
    token,
    source_row,
    ring_entry,
    entries,
    channels,
    BEFORE: tl.constexpr,
    SETTLES: tl.constexpr,
):
    total = tl.zeros(channel.shape, dtype=tl.float32)
    for tap in tl.static_range(BEFORE + 1):
        weight = tl.load(taps + tap * channels + channel, mask=mask, other=0.0).to(tl.float32)
        x = _input(
            source, ring, channel, mask, row, position, token + tap - BEFORE, source_row, ring_entry, entries, SETTLES
        )
        total += weight * x
    return rounded(total / (1.0 + tl.exp(-total)), source).to(tl.float32)


@triton.jit(do_not_specialize=["tokens", "entries"])
def _recur(
    source,
    target,
    taps,
    rates,
    shifts,
    matrices,
    inputs,
    position,
    active,
    counts,
    tokens,
    entries,
    source_row,
    target_row,
    target_head,
    ring_slot,
    ring_entry,
    epsilon,
    scale,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY: tl.constexpr,
    PADDED: tl.constexpr,
    VALUE: tl.constexpr,
    COLUMNS: tl.constexpr,
    BEFORE: tl.constexpr,
    IN_TURN: tl.constexpr,
    COUNTED: tl.constexpr,
    SETTLES: tl.constexpr,
    KEEPS: tl.constexpr,
):
    slot, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    if tl.load(active + slot) == 0:
        return
    share: tl.constexpr = HEADS // KEY_HEADS
    channels: tl.constexpr = 2 * KEY_HEADS * KEY + HEADS * VALUE
    key_head = head % KEY_HEADS if IN_TURN else head // share
    is_first = (head < KEY_HEADS) if IN_TURN else (head % share == 0)
    element, column = tl.arange(0, PADDED), part * COLUMNS + tl.arange(0, COLUMNS)
    in_key, in_value = element < KEY, column < VALUE
    query, key, value = key_head * KEY + element, (KEY_HEADS + key_head) * KEY + element, column
    value += 2 * KEY_HEADS * KEY + head * VALUE
    ring, row, first = inputs + slot * ring_slot, slot * tokens, tl.load(position + slot)
    place = matrices + ((slot * HEADS + head) * KEY + element[:, None]) * VALUE + column[None, :]
    mask = in_key[:, None] & in_value[None, :]
    state = tl.load(place, mask=mask, other=0.0)
    count = tokens
    if COUNTED:  # guesses after the first token; or tokens accepted
        count = tl.load(counts + slot).to(tl.int32)
        if not SETTLES:
            count = tl.minimum(count + 1, tokens)
    rate, shift = tl.load(rates + head), tl.load(shifts + head)
    one = tl.arange(0, 1)
    for token in range(count):
        at = (source_row, ring_entry, entries)
        # 1. What the token gives.
        q = _convolved(source, ring, taps, query, in_key, row, first, token, *at, channels, BEFORE, SETTLES)
        k = _convolved(source, ring, taps, key, in_key, row, first, token, *at, channels, BEFORE, SETTLES)
        v = _convolved(source, ring, taps, value, in_value, row, first, token, *at, channels, BEFORE, SETTLES)
        q *= scale / tl.sqrt_rn(tl.sum(q * q, 0) + epsilon)
        k *= 1.0 / tl.sqrt_rn(tl.sum(k * k, 0) + epsilon)
        b = _input(source, ring, channels + head + one, one < 1, row, first, token, *at, SETTLES)
        a = _input(source, ring, channels + HEADS + head + one, one < 1, row, first, token, *at, SETTLES)
        strength = tl.sum(rounded(1.0 / (1.0 + tl.exp(-b)), source).to(tl.float32), 0)
        x = tl.sum(a, 0) + shift
        decay = tl.exp(rate * tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0)))))
        # 2. The rule.
        state *= decay
        change = (v - tl.sum(state * k[:, None], 0)) * strength
        state += k[:, None] * change[None, :]
        if not SETTLES:
            made = rounded(tl.sum(state * q[:, None], 0), target)
            tl.store(target + (row + token) * target_row + head * target_head + column, made, mask=in_value)
            # 3. Record the input; what several programs need, one of them records.
            into, given = ring + ((first + token) % entries) * ring_entry, source + (row + token) * source_row
            tl.store(
                into + value,
                rounded(tl.load(given + value, mask=in_value, other=0.0).to(tl.float32), into),
                mask=in_value,
            )
            if part == 0:
                for own in tl.static_range(2):
                    gate = channels + own * HEADS + head + one
                    tl.store(into + gate, rounded(tl.load(given + gate).to(tl.float32), into))
                if is_first:
                    tl.store(
                        into + query,
                        rounded(tl.load(given + query, mask=in_key, other=0.0).to(tl.float32), into),
                        mask=in_key,
                    )
                    tl.store(
                        into + key,
                        rounded(tl.load(given + key, mask=in_key, other=0.0).to(tl.float32), into),
                        mask=in_key,
                    )
    if KEEPS:
        tl.store(place, state, mask=mask)


def recur(o: Recur, m: StepBuffers) -> None:
    """Triton kernel for :class:`~snapstream.kernels.recurrence.Recur` in steps."""
    slots, cache = m.slots, m.caches[o.layer]
    assert isinstance(cache, StateCache)
    source, target, inputs = o.source.of(m.buffers)[:, 0], o.target.of(m.buffers), cache.inputs
    _, heads, key, value = cache.matrices.shape
    counts: Tensor | None = slots.accepted if o.settles else slots.drafted
    columns = min(COLUMNS, next_power_of_2(value))
    _recur[(cache.rows, heads, -(-value // columns))](
        source,
        target,
        o.taps,
        o.rates,
        o.shifts,
        cache.matrices,
        inputs,
        slots.position,
        slots.active,
        slots.position if counts is None else counts,
        slots.tokens,
        cache.entries,
        source.stride(0),
        *target.stride()[:2],
        *inputs.stride()[:2],
        NORM_EPSILON,
        key**-0.5,
        HEADS=heads,
        KEY_HEADS=o.key_heads,
        KEY=key,
        PADDED=next_power_of_2(key),
        VALUE=value,
        COLUMNS=columns,
        BEFORE=o.before,
        IN_TURN=o.in_turn,
        COUNTED=counts is not None,
        SETTLES=o.settles,
        KEEPS=o.settles or slots.tokens == 1,
        num_warps=4,
    )
