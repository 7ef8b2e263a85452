"""A model's operations in plain torch, with attention by a function: for oracles that keep caches of their own."""

from dataclasses import dataclass, replace

import torch
from typing_extensions import override

from snapstream.kernels.operations import Attend, Operation, PlainProgram, Store
from snapstream.kernels.parts import Machine, PromptChunk, Slots, allocate_buffers


@dataclass(frozen=True)
class AttendBy(Operation):
    """What ``attend(layer, query, key, value)`` says, of tensors ``[T, heads, D]``; stores nothing."""

    attend: object
    store: Store
    operation: Attend

    @override
    def run(self, m):
        key = self.store.key.of(m.buffers)
        value = key if self.store.value is None else self.store.value.of(m.buffers)
        query, target = self.operation.query.of(m.buffers), self.operation.target.of(m.buffers)
        out = self.attend(self.operation.layer, query.clone(), key.clone(), value.clone())
        target.copy_(out[..., : target.shape[2]])


def slots_of(tokens, positions=None):
    """State of slots with tokens ``[B, T]``, nothing stored yet."""
    nothing = torch.zeros(len(tokens), dtype=torch.int64, device=tokens.device)
    return Slots(
        token=tokens,
        position=nothing if positions is None else positions,
        base=nothing,
        count=nothing,
        limit=nothing + tokens.shape[1],
        active=nothing == 0,
        forced=nothing[:, None] - 1,
        taken=nothing[None],
    )


def run_on(operations, x, program):
    """What operations add to the buffer ``y`` ``[T, hidden]`` for rows ``x`` of one prompt."""
    operations = list(operations)
    buffers = allocate_buffers((part for each in operations for part in each.parts()), len(x), x.dtype, {"x": x})
    slots = slots_of(torch.zeros(1, len(x), dtype=torch.int64))
    program(operations, PromptChunk(buffers, slots, [], [])).run()
    return buffers["y"]


def read_in_chunks(model, tokens, ends, program):
    """Logits after every token ``[L, vocab]``, of chunks that end at ``ends``, each read by a program."""
    operations, (length, device) = list(model.operations()), (len(tokens), tokens.device)
    dtype, made, start = model.embedding.weight.dtype, [], 0
    caches = [model.spec.entry.empty(1, length, dtype=dtype, device=device) for _ in range(model.spec.layers)]
    for end in ends:
        slots = slots_of(tokens[None, start:end], torch.full((1,), start, device=device))
        slots = replace(slots, count=slots.position, limit=torch.full_like(slots.limit, length))
        parts = (part for each in operations for part in each.parts())
        buffers = allocate_buffers(parts, end - start, dtype, device=device)
        program(operations, PromptChunk(buffers, slots, caches, [])).run()
        made.append(buffers["logits"])
        start = end
    return torch.cat(made)


def logits_with(model, tokens, positions, attend):
    """Logits after every token, float32 ``[T, vocab]``; tokens and positions are int64 ``[T]``."""
    given, made = list(model.operations()), []
    for each in given:
        if isinstance(each, Store):
            store = each
        else:
            made.append(AttendBy(attend, store, each) if isinstance(each, Attend) else each)
    slots = slots_of(tokens[:, None], positions)
    dtype = model.embedding.weight.dtype
    buffers = allocate_buffers((part for each in given for part in each.parts()), len(tokens), dtype)
    PlainProgram(made, Machine(buffers, slots, [], [])).run()
    return buffers["logits"]
