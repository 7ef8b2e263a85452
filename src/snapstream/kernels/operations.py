"""The operations of a model. Models describe their layers as a short list of them.

The same list serves decode steps, which have a row per token of each slot, and chunks of a prompt, which have a row per
token. Four programs run it:

- :mod:`snapstream.kernels.cpu.program`: a native loop, for all layers and several tokens in one launch (kernel looping,
  arXiv 2410.23668). For decode steps on a CPU and, within ``StockProgram``, for chunks of prompts.
- :mod:`snapstream.kernels.triton.program`: on CUDA.
- :mod:`snapstream.kernels.stock`: the native loop for what it supports, and torch for the rest. For prompts on a CPU,
  and for everything that the other two do not support.
- This module: operation by operation in plain torch. It defines what each operation means, and is the reference for
  tests of the others.

An operation reads and writes parts of buffers (:mod:`snapstream.kernels.buffers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import override

from snapstream.cache import QuantizedType, dense_dtype
from snapstream.inference import in_inference_mode
from snapstream.kernels import plain
from snapstream.kernels.buffers import BufferView, PromptChunk, StepBuffers
from snapstream.kernels.plain import Activation
from snapstream.kernels.weight import Weight


@dataclass(frozen=True)
class Operation:
    """One operation. Fields of type :class:`BufferView` are read or written; weights and tensors are parameters."""

    def run(self, m: StepBuffers) -> None:
        """Run the operation in plain torch."""
        raise NotImplementedError

    def in_loop(self, m: StepBuffers) -> Operation | None:
        """The operation as the native loop of :mod:`snapstream.kernels.cpu` runs it; ``None`` if it does not."""
        return self

    def parts(self) -> list[BufferView]:
        """All parts that the operation reads or writes."""
        values = (getattr(self, each.name) for each in fields(self))
        return [value for value in values if isinstance(value, BufferView)]


@dataclass(frozen=True)
class Embed(Operation):
    """Embeddings of the tokens, from a table ``[vocab, hidden]``, times a factor."""

    table: Weight
    target: BufferView
    factor: float = 1.0

    @override
    def run(self, m: StepBuffers) -> None:
        target = self.target.of(m.buffers)[:, 0]
        rows = self.table.rows(m.slots.token.flatten(), target.dtype)
        target.copy_(rows if self.factor == 1.0 else rows * self.factor)


@dataclass(frozen=True)
class Angles(Operation):
    """Cosines, then sines, of the rotary angles at the tokens' positions: float32, rounded to activations' type."""

    frequencies: Tensor
    scaling: float
    target: BufferView

    @override
    def run(self, m: StepBuffers) -> None:
        angles = m.slots.positions()[:, None].to(self.frequencies.dtype) * self.frequencies
        both = torch.cat((angles.cos(), angles.sin()), -1) * self.scaling
        self.target.of(m.buffers)[:, 0] = both.to(m.dtype)


@dataclass(frozen=True)
class Norm(Operation):
    """Root-mean-square norm of each head; with ``add``, it is added to the target. For ``wide``, see ``plain.norm``.

    What is written to the target is multiplied by ``factor``, a tensor ``[1]``, if there is one.
    """

    source: BufferView
    target: BufferView
    weight: Tensor
    epsilon: float
    add: bool = False
    wide: bool = False
    factor: Tensor | None = None

    @override
    def run(self, m: StepBuffers) -> None:
        target = self.target.of(m.buffers)
        y = plain.norm(self.source.of(m.buffers), self.weight, self.epsilon, wide=self.wide)
        y = target + y if self.add else y
        target.copy_(y if self.factor is None else y * self.factor)


@dataclass(frozen=True)
class Product(Operation):
    """``(x @ weight.T + bias) * factor`` with a weight ``[out, in]``.

    With ``add``, the result is added to the target. A float32 target gets the float32 sums, or with ``rounded`` the
    sums rounded to the type of activations.
    """

    source: BufferView
    target: BufferView
    weight: Weight
    bias: Tensor | None = None
    add: bool = False
    rounded: bool = False
    factor: float = 1.0

    @override
    def run(self, m: StepBuffers) -> None:
        x, target = self.source.of(m.buffers)[:, 0], self.target.of(m.buffers)[:, 0]
        y = self.weight.multiply(x if self.rounded else x.to(target.dtype), self.bias)
        if self.factor != 1.0:
            y = y * self.factor
        target.copy_(target + y if self.add else y)


@dataclass(frozen=True)
class Cap(Operation):
    """Soft cap of float32 logits, in place: ``cap * tanh(logits / cap)``."""

    target: BufferView
    cap: float

    @override
    def run(self, m: StepBuffers) -> None:
        self.target.of(m.buffers).div_(self.cap).tanh_().mul_(self.cap)


@dataclass(frozen=True)
class GatedProduct(Operation):
    """``activation(x @ gate.T) * (x @ up.T)``; gate and up are the halves of a weight ``[2 * inner, in]``."""

    source: BufferView
    target: BufferView
    weight: Weight
    bias: Tensor | None = None
    activation: Activation = Activation.SILU

    @override
    def run(self, m: StepBuffers) -> None:
        both = self.weight.multiply(self.source.of(m.buffers)[:, 0], self.bias)
        self.target.of(m.buffers)[:, 0] = plain.gate(both, self.activation)


@dataclass(frozen=True)
class Gate(Operation):
    """What follows the product of a :class:`GatedProduct`: halves of rows become ``activation(first) * second``.

    If ``up`` is given, it is the second half, and the source the first one.
    """

    source: BufferView
    target: BufferView
    activation: Activation = Activation.SILU
    up: BufferView | None = None

    @override
    def run(self, m: StepBuffers) -> None:
        both = self.source.of(m.buffers)
        if self.up is not None:
            both = torch.cat((both, self.up.of(m.buffers)), -1)
        self.target.of(m.buffers).copy_(plain.gate(both, self.activation))


@dataclass(frozen=True)
class GateBy(Operation):
    """Multiply heads by the SiLU of others, or with ``sigmoid`` by their sigmoid; those may have a single element."""

    source: BufferView
    target: BufferView
    sigmoid: bool

    @override
    def run(self, m: StepBuffers) -> None:
        gate, target = self.source.of(m.buffers), self.target.of(m.buffers)
        wide = gate.to(torch.promote_types(gate.dtype, torch.float32))
        target.copy_(target * (wide.sigmoid() if self.sigmoid else F.silu(wide)))


@dataclass(frozen=True)
class HeadProduct(Operation):
    """Multiply each head by its own matrix: ``weight[h]`` is ``[out, in]``, or ``[in, out]`` if ``transposed``."""

    source: BufferView
    target: BufferView
    weight: Weight
    transposed: bool

    @override
    def run(self, m: StepBuffers) -> None:
        x = self.source.of(m.buffers).transpose(0, 1)
        wide = torch.promote_types(x.dtype, self.weight.dtype)
        weight = self.weight.dense(wide)
        out = torch.bmm(x.to(wide), weight if self.transposed else weight.transpose(1, 2))
        self.target.of(m.buffers).copy_(out.transpose(0, 1))


@dataclass(frozen=True)
class Rotate(Operation):
    """Rotary embedding of the two halves of a head, or with ``pairs`` of neighboring elements, which become halves."""

    source: BufferView
    target: BufferView
    angles: BufferView
    pairs: bool = False

    @override
    def run(self, m: StepBuffers) -> None:
        x, target = self.source.of(m.buffers), self.target.of(m.buffers)
        cosine, sine = (half.repeat(1, 1, 2) for half in self.angles.of(m.buffers).to(x.dtype).chunk(2, -1))
        target.copy_(plain.rotate(x, cosine, sine, pairs=self.pairs))


@dataclass(frozen=True)
class ScaleByPosition(Operation):
    """Multiply a token's heads by ``1 + beta * log(1 + floor(position / length))``, in place."""

    target: BufferView
    beta: float
    length: int

    @override
    def run(self, m: StepBuffers) -> None:
        target = self.target.of(m.buffers)
        periods = torch.floor(m.slots.positions() / self.length)
        wide = torch.promote_types(target.dtype, torch.float32)
        target.mul_((1 + self.beta * torch.log1p(periods.to(wide))).to(target.dtype)[:, None, None])


@dataclass(frozen=True)
class Store(Operation):
    """Write keys and values to a layer's cache, or, with several tokens that are not certain, to pending entries."""

    key: BufferView
    value: BufferView | None
    layer: int

    @override
    def run(self, m: StepBuffers) -> None:
        slots, cache = m.slots, m.caches[self.layer]
        B, T = slots.token.shape
        dtype = m.dtype if isinstance(cache.entry_type, QuantizedType) else cache.entry_type
        key = self.key.of(m.buffers).view(B, T, -1, self.key.size).to(dtype)
        value = key if self.value is None else self.value.of(m.buffers).view(B, T, -1, self.value.size).to(dtype)
        entries = slots.entries(m.group_of(self.layer))
        if isinstance(m, PromptChunk):
            cache.write(entries, key, value)
        elif T == 1:
            cache.write(entries, key, value, slots.active)
        else:
            m.pending[self.layer].write(torch.arange(T, device=key.device).expand(B, T), key, value, slots.active)


@dataclass(frozen=True)
class Attend(Operation):
    """Attention of each token over its slot's cache, as it is once the token and those before it are stored.

    If values are shorter than keys, they are the first elements of the entries. Within a prompt, tokens attend to the
    last ``window`` tokens only, themselves included, or to all if that is 0. In a slot, the ring holds no others.
    ``cap`` is a soft cap of logits, 0 for none; ``sinks`` are one extra logit per head, without a value, float32
    ``[H]``: :func:`snapstream.kernels.plain.attend`.
    """

    query: BufferView
    target: BufferView
    layer: int
    scale: float
    window: int = field(default=0, kw_only=True)
    cap: float = field(default=0.0, kw_only=True)
    sinks: Tensor | None = field(default=None, kw_only=True)

    @override
    def in_loop(self, m: StepBuffers) -> Operation | None:
        dense = not isinstance(m, PromptChunk) or m.caches[self.layer].entry_type == m.dtype
        return self if dense else None

    def views(self, m: StepBuffers) -> tuple[Tensor, Tensor]:
        """Queries ``[B, T, H, D]`` and the buffer of results, ``[B, T, H, V]``."""
        B, T = m.slots.token.shape
        query = self.query.of(m.buffers)
        return query.view(B, T, *query.shape[1:]), self.target.of(m.buffers).view(B, T, self.target.heads, -1)

    @override
    def run(self, m: StepBuffers) -> None:
        slots, cache = m.slots, m.caches[self.layer]
        (query, target), (B, T) = self.views(m), slots.token.shape
        if isinstance(m, PromptChunk):
            values = cache.values[0][..., : self.target.size]
            start = slots.count[m.group_of(self.layer), 0]
            given = (start, self.scale, self.window, self.cap, self.sinks)
            target[0] = plain.attend_chunk(query[0], cache.keys[0], values, *given)
            return
        group = m.group_of(self.layer)
        entries, valid = slots.entries(group), slots.valid(group)
        seen, N = cache.clone(), cache.heads
        for t in range(T):
            if T > 1:
                stored = m.pending[self.layer].read(torch.full_like(entries[:, :1], t))
                seen.write_stored(entries[:, t, None], stored, slots.active)
            mask = torch.arange(seen.entries, device=query.device) < valid[:, t].clamp(min=1)[:, None]
            wide = torch.promote_types(query.dtype, dense_dtype(cache.entry_type))
            numbers = seen.converted(wide)
            out = plain.attend(
                query[:, t].reshape(B, N, -1, self.query.size).to(wide),
                numbers.keys,
                numbers.values[..., : self.target.size],
                mask[:, None, None],
                self.scale,
                self.cap,
                None if self.sinks is None else self.sinks.view(N, -1),
            ).to(query.dtype)
            target[:, t] = torch.where(valid[:, t, None, None] > 0, out.reshape(B, self.target.heads, -1), target[:, t])


@dataclass(frozen=True)
class Choose(Operation):
    """Choose each token's experts and their weights from the router's logits; see ``models/experts.py``.

    The weight of an expert is multiplied by its own of ``factors`` ``[E]``, if there are any.
    """

    logits: BufferView
    weights: BufferView
    experts: BufferView
    correction: Tensor | None
    groups: int
    chosen_groups: int
    corrected: bool
    normalize: bool
    scale: float
    factors: Tensor | None = None

    @override
    def run(self, m: StepBuffers) -> None:
        weights, experts = plain.choose_experts(
            self.logits.of(m.buffers)[:, 0],
            self.correction,
            self.experts.size,
            groups=self.groups,
            chosen_groups=self.chosen_groups,
            corrected=self.corrected,
            normalize=self.normalize,
            scale=self.scale,
        )
        self.weights.of(m.buffers)[:, 0] = weights if self.factors is None else weights * self.factors[experts]
        self.experts.of(m.buffers)[:, 0] = experts


@dataclass(frozen=True)
class Sort(Operation):
    """Copy each row next to the others with the same expert; ``ends`` holds where each expert's rows end."""

    source: BufferView
    target: BufferView
    experts: BufferView
    ends: BufferView
    count: int

    @override
    def run(self, m: StepBuffers) -> None:
        idle = ~m.slots.used().reshape(-1, 1)
        chosen = self.experts.of(m.buffers)[:, 0].masked_fill(idle, self.count)  # after all others
        order = chosen.flatten().argsort(stable=True)
        self.target.of(m.buffers)[:, 0] = self.source.of(m.buffers)[order // chosen.shape[1], 0]
        self.ends.of(m.buffers)[0, 0] = F.one_hot(chosen.flatten(), self.count + 1).sum(0)[:-1].cumsum(0)


@dataclass(frozen=True)
class ExpertProduct(Operation):
    """Multiply sorted rows by the weights ``[E, out, in]`` of their experts, and add their biases ``[E, out]``.

    For ``gated``, see :class:`GatedProduct`.
    """

    source: BufferView
    target: BufferView
    ends: BufferView
    weight: Weight
    gated: bool
    activation: Activation = Activation.SILU
    bias: Tensor | None = None

    @override
    def run(self, m: StepBuffers) -> None:
        source, target = self.source.of(m.buffers)[:, 0], self.target.of(m.buffers)[:, 0]
        start = 0
        for expert, end in enumerate(self.ends.of(m.buffers)[0, 0].tolist()):
            if start == end:
                continue
            out = self.weight.matrix(expert).multiply(
                source[start:end], None if self.bias is None else self.bias[expert]
            )
            target[start:end] = plain.gate(out, self.activation) if self.gated else out
            start = end


@dataclass(frozen=True)
class Combine(Operation):
    """Add up the weighted expert outputs of each token, and with ``add`` what is in the target."""

    source: BufferView
    weights: BufferView
    experts: BufferView
    target: BufferView
    add: bool = True

    @override
    def run(self, m: StepBuffers) -> None:
        idle = ~m.slots.used().reshape(-1, 1)
        chosen = self.experts.of(m.buffers)[:, 0].masked_fill(idle, torch.iinfo(torch.int64).max)
        place = chosen.flatten().argsort(stable=True).argsort().view_as(chosen)
        rows, target = self.source.of(m.buffers)[:, 0], self.target.of(m.buffers)[:, 0]
        weighted = (rows[place] * self.weights.of(m.buffers)[:, 0, :, None]).sum(1)
        target.copy_(target + weighted.to(target.dtype) if self.add else weighted)


@dataclass
class PlainProgram:
    """Runs a list of operations in plain torch; the reference for the native loop.

    Attributes:
        operations: The list.
        work: The buffers, slots and caches that it works on.
    """

    operations: Sequence[Operation]
    work: StepBuffers = field(repr=False)

    @in_inference_mode
    def run(self, steps: int = 1, first: int = 0, last: int | None = None) -> None:
        """Run operations ``first .. last``, ``steps`` times."""
        for self.work.step in range(steps):
            for operation in self.operations[first:last]:
                operation.run(self.work)
