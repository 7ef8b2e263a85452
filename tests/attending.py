"""A model's operations in plain torch, with attention by a function: for oracles that keep caches of their own."""

from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from snapstream.kernels.buffers import PromptChunk, Slots, StepBuffers, allocate_buffers
from snapstream.kernels.operations import Attend, Operation, PlainProgram, Store
from snapstream.kernels.recurrence import Recur


@dataclass(frozen=True)
class AttendBy(Operation):
    """What ``attend(layer, query, key, value)`` says, of tensors ``[T, heads, D]``; stores nothing.

    Without a ``store``, the layer reads a cache that an earlier one has written: key and value are ``None``.
    """

    attend: object
    store: Store | None
    operation: Attend

    @override
    def run(self, m):
        key = value = None
        if self.store is not None:
            key = self.store.key.of(m.buffers).clone()
            value = key if self.store.value is None else self.store.value.of(m.buffers).clone()
        query, target = self.operation.query.of(m.buffers), self.operation.target.of(m.buffers)
        out = self.attend(self.operation.layer, query.clone(), key, value)
        target.copy_(out[..., : target.shape[2]])


@dataclass(frozen=True)
class RecurBy(Operation):
    """What ``recur(operation, inputs)`` says, of inputs ``[T, size]``."""

    recur: object
    operation: Recur

    @override
    def run(self, m):
        inputs = self.operation.source.of(m.buffers)[:, 0]
        self.operation.target.of(m.buffers).copy_(self.recur(self.operation, inputs.clone()))


def sinks_of(model):
    """Of each layer, one extra logit per head, or None."""
    return [
        next((each.sinks for each in model.operations_of(layer) if isinstance(each, Attend)), None)
        for layer in range(model.spec.cached_layers)
    ]


def run_on(operations, x, program):
    """What operations add to the buffer ``y`` ``[T, hidden]`` for rows ``x`` of one prompt."""
    operations = list(operations)
    buffers = allocate_buffers((part for each in operations for part in each.parts()), len(x), x.dtype, {"x": x})
    slots = Slots.of_prompt(torch.zeros(1, len(x), dtype=torch.int64), len(x))
    program(operations, PromptChunk(buffers, slots, [], [], x.dtype)).run()
    return buffers["y"]


def read_in_chunks(model, tokens, ends, program, *, again=False):
    """Logits after every token ``[L, vocab]``, of chunks that end at ``ends``, each read by a program.

    With ``again``, one program that has room for all tokens reads all chunks.
    """
    operations, (length, device) = list(model.operations()), (len(tokens), tokens.device)
    dtype, made, start = model.dtype, [], 0
    entries = [model.spec.layer_group(layer).entry for layer in range(model.spec.cached_layers)]
    caches = [entry.empty(1, length, entry_type=dtype, device=device) for entry in entries]
    parts = [part for each in operations for part in each.parts()]
    if again:
        whole = Slots.of_prompt(tokens[None].clone(), length)
        buffers = allocate_buffers(parts, length, dtype, device=device)
        work = PromptChunk(buffers, whole, caches, [], dtype, packed_until=whole.count.new_zeros(()))
        one = program(operations, work)
        for end in ends:
            for first in (whole.position, whole.count):
                first.fill_(start)
            some = replace(whole, token=tokens[None, start:end])
            rows = {name: buffer[: len(buffer) // length * (end - start)] for name, buffer in buffers.items()}
            one.rebind(replace(work, slots=some, buffers=rows))
            one.run()
            made.append(rows["logits"].clone())
            start = end
        return torch.cat(made)
    for end in ends:
        slots = Slots.of_prompt(tokens[None, start:end], length)
        for first in (slots.position, slots.count):
            first.fill_(start)
        buffers = allocate_buffers(parts, end - start, dtype, device=device)
        program(operations, PromptChunk(buffers, slots, caches, [], dtype)).run()
        made.append(buffers["logits"])
        start = end
    return torch.cat(made)


def logits_with(model, tokens, positions, attend, recur=None):
    """Logits after every token, float32 ``[T, vocab]``; tokens and positions are int64 ``[T]``."""
    given, made, store = list(model.operations()), [], None
    for each in given:
        if isinstance(each, Store):
            store = each
        elif isinstance(each, Recur):
            made.append(RecurBy(recur, each))
        elif isinstance(each, Attend):
            made.append(AttendBy(attend, store, each))
            store = None
        else:
            made.append(each)
    slots = replace(Slots.that_see(torch.ones_like(tokens), 1), token=tokens[:, None], position=positions)
    dtype = model.dtype
    buffers = allocate_buffers((part for each in given for part in each.parts()), len(tokens), dtype)
    PlainProgram(made, StepBuffers(buffers, slots, [], [], dtype)).run()
    return buffers["logits"]
