"""Logits of a text, in plain torch: what a model says, without an engine."""

from __future__ import annotations

from torch import Tensor

from snapstream.kernels.buffers import PromptChunk, Slots, allocate_buffers
from snapstream.kernels.operations import PlainProgram
from snapstream.models.decoder import DecoderModel


def logits_of(model: DecoderModel, tokens: Tensor) -> Tensor:
    """Logits after every token of a text, with a full cache.

    Args:
        model: The model.
        tokens: int64 ``[L]``.

    Returns:
        float32 ``[L, vocab]``, or float64 for a model in float64.
    """
    length, device, dtype = len(tokens), tokens.device, model.dtype
    operations = list(model.operations())
    buffers = allocate_buffers((part for each in operations for part in each.parts()), length, dtype, device=device)
    groups = map(model.spec.layer_group, range(model.spec.cached_layers))
    caches = [group.entry.empty(1, length, entry_type=dtype, device=device) for group in groups]
    PlainProgram(operations, PromptChunk(buffers, Slots.of_prompt(tokens[None], length), caches, [], dtype)).run()
    return buffers["logits"]
