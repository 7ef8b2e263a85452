"""Operations on a CUDA device: decode steps and chunks of prompts, run by stock products and kernels of this package.

Norms of queries and keys, their rotation and the cache write are fused into one kernel where they follow each other.
Nothing here waits for the device or depends on data in its memory, so a step can be captured as one graph.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from snapstream.cache import EntryShape, LayerCache, QuantizedCache, StateCache
from snapstream.inference import in_inference_mode
from snapstream.kernels import operations as ops
from snapstream.kernels.buffers import BufferView, PromptChunk, StepBuffers
from snapstream.kernels.operations import Operation
from snapstream.kernels.products import add_biases, grouped_linear
from snapstream.kernels.recurrence import Recur
from snapstream.kernels.taking import Commit
from snapstream.kernels.triton import blocks, recurrence, rows, store
from snapstream.kernels.triton.codes import store_tokens
from snapstream.kernels.triton.decode import attend_slots, decode_scratch
from snapstream.kernels.triton.places import PENDING, RING, STRAIGHT, Places
from snapstream.kernels.weight import BlockWeight

Call = Callable[[], object]


class TritonProgram:
    """Runs operations of a step, or of a chunk of a prompt; see :mod:`snapstream.kernels.operations`."""

    draws, captured = False, True

    def __init__(self, operations: Sequence[Operation], work: StepBuffers, *, splits: int = 1) -> None:
        """Prepare every call.

        Args:
            operations: The operations in order, without :class:`~snapstream.kernels.taking.Draw`: the host records what
                is taken.
            work: The buffers, slots and caches that they work on, all on one device.
            splits: Into how many parts attention splits the entries of each slot.
        """
        self.operations, self.work = operations, work
        # All layers share the scratch memory of attention.
        needed = [
            decode_scratch(
                work.slots.token.numel(),
                each.target.heads,
                each.target.size,
                splits,
                each.query.size if isinstance(work.caches[each.layer], QuantizedCache) else 0,
            )
            for each in operations
            if type(each) is ops.Attend
        ]
        device = work.slots.token.device
        self._numbers: dict[EntryShape, LayerCache] = {}  # tokens before they become codes
        self._scratch = torch.empty(max(needed, default=0), dtype=torch.float32, device=device)
        self._splits = splits
        self._length, self._calls = len(operations), list[tuple[int, Call]]()  # with the index of the first operation
        at = 0
        while at < len(operations):
            used, call = self._call_of(operations[at:])
            self._calls.append((at, call))
            at += used

    @in_inference_mode
    def run(self, steps: int = 1, first: int = 0, last: int | None = None) -> None:
        """Run operations ``first .. last``, a slice of the list, ``steps`` times.

        A slice must not begin or end within operations that are fused.
        """
        begin, end, _ = slice(first, last).indices(self._length)
        for self.work.step in range(steps):
            for at, call in self._calls:
                if begin <= at < end:
                    call()

    def _call_of(self, operations: Sequence[Operation]) -> tuple[int, Call]:
        """How many operations the next call covers, and the call."""
        fused = self._grouped_store(operations) or self._latent_store(operations)
        if fused is not None:
            return fused
        first = operations[0]
        if type(first) is ops.Attend:
            return 1, self._attend(first)
        if type(first) is ops.Store and first.value is not None:
            return 1, self._store(first)
        return 1, _call_of(first, self.work)

    def _attend(self, o: ops.Attend) -> Call:
        m = self.work
        return functools.partial(
            attend_slots,
            o.query.of(m.buffers),
            o.target.of(m.buffers),
            m.caches[o.layer],
            m.pending[o.layer] if m.slots.tokens > 1 else None,
            m.slots,
            o.scale,
            cap=o.cap,
            sinks=o.sinks,
            splits=self._splits,
            scratch=self._scratch,
            group=m.group_of(o.layer),
        )

    def _store(self, o: ops.Store) -> Call:
        """A write of keys and values that are not rotated, or of which a part is."""
        assert o.value is not None
        N, D, buffer = o.key.heads, o.key.size, o.key.buffer
        end = o.key.offset + N * D
        if (o.key, o.value) != (BufferView(buffer, D, N, o.key.offset), BufferView(buffer, D, N, end)):
            return functools.partial(o.run, self.work)
        source = BufferView(buffer, 2 * N * D, offset=o.key.offset).of(self.work.buffers)[:, 0]
        into, places, after = self._places(o.layer)
        return _in_turn(functools.partial(store.store_grouped, source, source, None, None, into, places), after)

    def _grouped_store(self, operations: Sequence[Operation]) -> tuple[int, Call] | None:
        """``[norm of queries, norm of keys,] rotation of both, store``."""
        m = self.work
        norms = operations[:2] if isinstance(operations[0], ops.Norm) else ()
        rest = operations[len(norms) : len(norms) + 2]
        if len(rest) < 2:
            return None
        rotated, stored = rest
        if not isinstance(rotated, ops.Rotate) or not isinstance(stored, ops.Store) or stored.value is None:
            return None
        key, value, both = stored.key, stored.value, rotated.source
        N, D, H = key.heads, key.size, both.heads - key.heads
        name = both.buffer
        laid_out = (both, key, value) == (
            BufferView(name, D, H + N),
            BufferView(name, D, N, offset=H * D),
            BufferView(name, D, N, offset=(H + N) * D),
        )
        query = BufferView(name, D, H)
        are_normed = [
            isinstance(norm, ops.Norm) and norm.source == norm.target == part and not norm.add and norm.factor is None
            for norm, part in zip(norms, (query, key), strict=False)
        ]
        if rotated.target != both or rotated.pairs or not laid_out or not all(are_normed):
            return None
        source = BufferView(name, (H + 2 * N) * D).of(m.buffers)[:, 0]
        weights, wide = None, False
        if norms:
            first, second = norms
            assert isinstance(first, ops.Norm)
            assert isinstance(second, ops.Norm)
            weights, wide = (first.weight, second.weight, first.epsilon), first.wide
        cosine, sine = _angles(rotated.angles, m)
        into, places, after = self._places(stored.layer)
        call = functools.partial(store.store_grouped, source, source, cosine, sine, into, places, weights, wide=wide)
        return len(norms) + 2, _in_turn(call, after)

    def _latent_store(self, operations: Sequence[Operation]) -> tuple[int, Call] | None:
        """``norm of the compressed part, rotation of the rest, store``."""
        m = self.work
        if len(operations) < 3:
            return None
        norm, rotated, stored = operations[:3]
        if not (isinstance(norm, ops.Norm) and isinstance(rotated, ops.Rotate) and isinstance(stored, ops.Store)):
            return None
        entry, rank = stored.key, norm.source.size
        laid_out = stored.value is None and (norm.source, rotated.source) == (
            BufferView(entry.buffer, rank),
            BufferView(entry.buffer, entry.size - rank, offset=rank),
        )
        in_place = norm.source == norm.target and rotated.source == rotated.target
        if not laid_out or not in_place or norm.wide or norm.add:
            return None
        source = entry.of(m.buffers)[:, 0]
        cosine, sine = _angles(rotated.angles, m)
        into, places, after = self._places(stored.layer)
        weight, pairs = (norm.weight, norm.epsilon), rotated.pairs
        return 3, _in_turn(lambda: store.store_latent(source, cosine, sine, into, places, weight, pairs=pairs), after)

    def _places(self, layer: int) -> tuple[LayerCache, Places, Call | None]:
        """Where tokens are stored, and what comes after that; several that are not certain only become pending."""
        m, slots = self.work, self.work.slots
        T, group = slots.tokens, m.group_of(layer)
        if isinstance(m, PromptChunk):
            return m.caches[layer], Places(STRAIGHT, T, slots.count[group]), None
        into = m.caches[layer] if T == 1 else m.pending[layer]
        ring = (slots.count[group], slots.base[group], slots.limit[group])
        places = Places(RING if T == 1 else PENDING, T, *ring, slots.active)
        if not isinstance(into, QuantizedCache):
            return into, places, None
        if into.entry not in self._numbers:
            made = into.entry.empty(into.rows, T, entry_type=m.dtype, device=into.device)
            self._numbers[into.entry] = made
        numbers = self._numbers[into.entry]
        after = functools.partial(store_tokens, numbers, into, places)
        return numbers, Places(PENDING, T, *ring, slots.active), after


def _in_turn(first: Call, second: Call | None) -> Call:
    if second is None:
        return first

    def both() -> None:
        first()
        second()

    return both


def _angles(part: BufferView, m: StepBuffers) -> tuple[Tensor, Tensor]:
    cosine, sine = part.of(m.buffers)[:, 0].chunk(2, -1)
    return cosine, sine


@functools.singledispatch
def _call_of(operation: Operation, m: StepBuffers) -> Call:
    """A call that runs one operation, in plain torch if there is no kernel."""
    return functools.partial(operation.run, m)


@_call_of.register
def _(o: ops.Norm, m: StepBuffers) -> Call:
    source, target = o.source.of(m.buffers), o.target.of(m.buffers)
    return functools.partial(rows.norm, source, target, o.weight, o.epsilon, add=o.add, wide=o.wide, factor=o.factor)


@_call_of.register
def _(o: ops.Gate, m: StepBuffers) -> Call:
    source, target = o.source.of(m.buffers)[:, 0], o.target.of(m.buffers)[:, 0]
    up = None if o.up is None else o.up.of(m.buffers)[:, 0]
    return functools.partial(rows.gate, source, target, o.activation, up)


@_call_of.register
def _(o: ops.Rotate, m: StepBuffers) -> Call:
    source, target = o.source.of(m.buffers), o.target.of(m.buffers)
    return functools.partial(rows.rotate, source, target, *_angles(o.angles, m), pairs=o.pairs)


@_call_of.register
def _(o: ops.GateBy, m: StepBuffers) -> Call:
    return functools.partial(rows.gate_by, o.source.of(m.buffers), o.target.of(m.buffers), sigmoid=o.sigmoid)


@_call_of.register
def _(o: Recur, m: StepBuffers) -> Call:
    if isinstance(m, PromptChunk):  # matrix products
        return functools.partial(o.run, m)
    return functools.partial(recurrence.recur, o, m)


@_call_of.register
def _(o: ops.Embed, m: StepBuffers) -> Call:
    table = o.table
    if not isinstance(table, BlockWeight):
        return functools.partial(o.run, m)
    target = o.target.of(m.buffers)[:, 0]

    def embed() -> None:
        blocks.widen(table, target, m.slots.token.flatten())
        if o.factor != 1.0:
            target.mul_(o.factor)

    return embed


@_call_of.register
def _(o: ops.Product, m: StepBuffers) -> Call:
    x, y = o.source.of(m.buffers)[:, 0], o.target.of(m.buffers)[:, 0]
    if o.weight.has_blocks:
        like = x if o.rounded else None
        return functools.partial(blocks.multiply, x, o.weight, y, o.bias, add=o.add, like=like, factor=o.factor)
    if not x.dtype == y.dtype == o.weight.dtype or (o.factor != 1.0 and not o.add):
        return functools.partial(o.run, m)
    weight, bias, factor = o.weight.dense(x.dtype).t(), o.bias, o.factor
    if bias is None:
        # The product itself reads and writes the tensor that it adds to.
        if o.add:
            return lambda: torch.addmm(y, x, weight, alpha=factor, out=y)
        return lambda: torch.mm(x, weight, out=y)
    if o.add:
        return lambda: y.add_(torch.addmm(bias, x, weight), alpha=factor)
    return lambda: torch.addmm(bias, x, weight, out=y)


@_call_of.register
def _(o: ops.GatedProduct, m: StepBuffers) -> Call:
    x, y = o.source.of(m.buffers)[:, 0], o.target.of(m.buffers)[:, 0]

    def gated_product() -> None:
        if o.weight.has_blocks:
            both = x.new_empty(len(x), o.weight.shape[0])
            blocks.multiply(x, o.weight, both, o.bias)
        else:
            both = o.weight.multiply(x, o.bias)
        rows.gate(both, y, o.activation)

    return gated_product


@_call_of.register
def _(o: ops.ExpertProduct, m: StepBuffers) -> Call:
    x, y = o.source.of(m.buffers)[:, 0], o.target.of(m.buffers)[:, 0]
    ends = o.ends.of(m.buffers)[0, 0]

    def expert_product() -> None:
        if o.weight.has_blocks:
            out = x.new_empty(len(x), o.weight.shape[1])
            blocks.multiply(x, o.weight, out, ends=ends)
        else:
            out = grouped_linear(x, o.weight, ends)
        add_biases(out, o.bias, ends)
        if o.gated:
            rows.gate(out, y, o.activation)
        else:
            y.copy_(out)

    return expert_product


@_call_of.register
def _(o: Commit, m: StepBuffers) -> Call:
    def commit() -> None:
        for layer, (pending, cache) in enumerate(zip(m.pending, m.caches, strict=True)):
            if not isinstance(cache, StateCache):
                store.commit(pending, cache, m.slots, m.group_of(layer))

    return commit
