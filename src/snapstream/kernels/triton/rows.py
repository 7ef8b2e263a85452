"""Row-wise operations: norm, rotation and gates, each in one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from snapstream.kernels.plain import Activation
from snapstream.kernels.triton.tiles import rounded


@triton.jit
def normed(x, weight, epsilon, size, like, WIDE: tl.constexpr = False):
    """Norm float32 rows ``[rows, columns]``, 0 beyond ``size``, with the rounding of the model."""
    return scaled(x, 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / size + epsilon), weight, like, WIDE)


@triton.jit
def scaled(x, scale, weight, like, WIDE: tl.constexpr = False):
    """Multiply rows by their scales and a weight, and round after the weight and, unless ``WIDE``, before it."""
    y = x * scale[:, None]
    if not WIDE:
        y = rounded(y, like).to(tl.float32)
    return rounded(weight * y, like).to(tl.float32)


@triton.jit
def turned(first, second, cosine, sine):
    """Rotate pairs of elements."""
    return first * cosine - second * sine, second * cosine + first * sine


@triton.jit
def load_turned(source, cosine, sine, column, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Both halves of a rotated head, given pointers to its first element and first angle."""
    mask = column < HALF
    c = tl.load(cosine + column, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sine + column, mask=mask, other=0.0).to(tl.float32)
    x = source + column * (2 if PAIRS else 1)
    first = tl.load(x, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + (1 if PAIRS else HALF), mask=mask, other=0.0).to(tl.float32)
    return turned(first, second, c, s)


@triton.jit
def _norm(
    source,
    target,
    weight,
    factor,
    epsilon,
    source_row,
    source_head,
    target_row,
    target_head,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
    WIDE: tl.constexpr,
    MULTIPLIES: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, PADDED)
    mask = column < SIZE
    x = tl.load(source + row * source_row + head * source_head + column, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(weight + column, mask=mask, other=0.0).to(tl.float32)
    result = normed(x[None, :], w[None, :], epsilon, SIZE, target, WIDE)
    place = target + row * target_row + head * target_head + column
    if ADD:
        result += tl.load(place, mask=mask, other=0.0).to(tl.float32)[None, :]
    if MULTIPLIES:
        result = rounded(result, target).to(tl.float32) * tl.load(factor).to(tl.float32)
    tl.store(place[None, :], rounded(result, target), mask=mask[None, :])


@triton.jit
def _rotate(
    source,
    target,
    cosine,
    sine,
    source_row,
    source_head,
    target_row,
    target_head,
    angle_row,
    HALF: tl.constexpr,
    PADDED: tl.constexpr,
    PAIRS: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, PADDED)
    mask = column < HALF
    angle, x = row * angle_row, source + row * source_row + head * source_head
    first, second = load_turned(x, cosine + angle, sine + angle, column, HALF, PAIRS)
    tl.debug_barrier()  # pairs become halves, possibly in place: all reads must precede the writes
    y = target + row * target_row + head * target_head + column
    tl.store(y, rounded(first, target), mask=mask)
    tl.store(y + HALF, rounded(second, target), mask=mask)


@triton.jit
def _gate(
    source,
    ups,
    target,
    source_row,
    ups_row,
    target_row,
    INNER: tl.constexpr,
    BLOCK: tl.constexpr,
    KIND: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < INNER
    x = tl.load(source + row * source_row + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(ups + row * ups_row + column, mask=mask, other=0.0).to(tl.float32)
    z = x
    if KIND == 1:  # GELU, the approximation by a hyperbolic tangent
        z = x * (1.5957691216 + 0.0713548163 * x * x)
    elif KIND == 2:  # gpt-oss's
        x = tl.minimum(x, 7.0)
        z, up = x * 1.702, tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
    gated = rounded(x / (1.0 + tl.exp(-z)), target).to(tl.float32) * up
    tl.store(target + row * target_row + column, rounded(gated, target), mask=mask)


@triton.jit
def _gate_by(
    source,
    target,
    source_row,
    source_head,
    target_row,
    target_head,
    SIZE: tl.constexpr,
    PADDED: tl.constexpr,
    SINGLE: tl.constexpr,
    SIGMOID: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.program_id(2) * PADDED + tl.arange(0, PADDED)
    mask = column < SIZE
    gate = source + row * source_row + head * source_head + (column * 0 if SINGLE else column)
    x = tl.load(gate, mask=mask, other=0.0).to(tl.float32)
    factor = (1.0 if SIGMOID else x) / (1.0 + tl.exp(-x))
    place = target + row * target_row + head * target_head + column
    y = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    tl.store(place, rounded(y * factor, target), mask=mask)


def gate_by(source: Tensor, target: Tensor, *, sigmoid: bool) -> None:
    """Triton kernel for :class:`snapstream.kernels.operations.GateBy`.

    Args:
        source: ``[T, heads, D]``, or ``[T, heads, 1]``; the elements of a head must be contiguous.
        target: ``[T, heads, D]``, likewise.
        sigmoid: Whether targets are multiplied by the sigmoid of the source, instead of its SiLU.
    """
    rows, heads, size = target.shape
    padded = min(1024, next_power_of_2(size))
    _gate_by[(rows, heads, -(-size // padded))](
        source,
        target,
        *source.stride()[:2],
        *target.stride()[:2],
        SIZE=size,
        PADDED=padded,
        SINGLE=source.shape[2] == 1,
        SIGMOID=sigmoid,
        num_warps=max(1, padded // 256),
    )


def norm(
    source: Tensor,
    target: Tensor,
    weight: Tensor,
    epsilon: float,
    *,
    add: bool = False,
    wide: bool = False,
    factor: Tensor | None = None,
) -> None:
    """Triton kernel for :func:`snapstream.kernels.plain.norm`.

    Args:
        source: ``[T, heads, D]``; the elements of a head must be contiguous.
        target: As ``source``; may be the same memory.
        weight: ``[D]``.
        epsilon: Added to the mean of squares.
        add: Whether the result is added to the target.
        wide: See there.
        factor: What the result is multiplied by, ``[1]``, if anything.
    """
    rows, heads, size = source.shape
    padded = next_power_of_2(size)
    _norm[(rows, heads)](
        source,
        target,
        weight,
        weight if factor is None else factor,
        epsilon,
        *source.stride()[:2],
        *target.stride()[:2],
        SIZE=size,
        PADDED=padded,
        ADD=add,
        WIDE=wide,
        MULTIPLIES=factor is not None,
        num_warps=min(16, max(1, padded // 512)),
    )


def rotate(source: Tensor, target: Tensor, cosine: Tensor, sine: Tensor, *, pairs: bool) -> None:
    """Triton kernel for :func:`snapstream.kernels.plain.rotate`.

    Args:
        source: ``[T, heads, D]``; the elements of a head must be contiguous.
        target: As ``source``; may be the same memory.
        cosine: ``[T, D / 2]`` or wider, with the row stride of ``sine``.
        sine: As ``cosine``.
        pairs: See there.
    """
    rows, heads, size = source.shape
    assert cosine.stride(0) == sine.stride(0)
    _rotate[(rows, heads)](
        source,
        target,
        cosine,
        sine,
        *source.stride()[:2],
        *target.stride()[:2],
        cosine.stride(0),
        HALF=size // 2,
        PADDED=next_power_of_2(size // 2),
        PAIRS=pairs,
        num_warps=1,
    )


def gate(source: Tensor, target: Tensor, activation: Activation = Activation.SILU, up: Tensor | None = None) -> None:
    """Triton kernel for :func:`snapstream.kernels.plain.gate`.

    Args:
        source: ``[T, 2 * I]``, or with ``up`` ``[T, I]``; the elements of a row must be contiguous.
        target: ``[T, I]``.
        activation: Of the first half.
        up: What stands for the second half, ``[T, I]``.
    """
    rows, inner = target.shape
    block = min(1024, next_power_of_2(inner))
    up = source[:, inner:] if up is None else up
    _gate[(rows, -(-inner // block))](
        source,
        up,
        target,
        source.stride(0),
        up.stride(0),
        target.stride(0),
        INNER=inner,
        BLOCK=block,
        KIND=int(activation),
        num_warps=4,
    )
