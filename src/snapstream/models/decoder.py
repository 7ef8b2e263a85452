"""The decoder architecture of all supported models: blocks of attention and feed-forward between embedding and logits.

Tokens come as a flat tensor ``[T]``: a chunk of one prompt, or one token of each of ``T`` sequences. The caller owns
the caches and computes attention. A block computes attention's inputs (:meth:`Block.project`) and processes its result
(:meth:`Block.complete`).

The caller also chooses the order. Prefill takes all tokens of a prompt through one layer before the next; decoding
takes one token of each slot through all layers. :meth:`DecoderModel.forward` is a plain loop over the layers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from snapstream.kernels.operations import Angles, Embed, Operation
from snapstream.kernels.parts import Part
from snapstream.models.block import Block
from snapstream.models.layers import Linear, RMSNorm
from snapstream.models.next_token import NextTokenModule
from snapstream.models.rope import rope_frequencies, rope_table
from snapstream.models.spec import ModelSpec

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, query [T, H, D], key [T, N, D], value [T, N, D]) -> [T, H, D]``; queries and keys are rotated."""


class DecoderModel(nn.Module):
    """The whole decoder. :func:`~snapstream.models.load_model` creates it and reads its weights."""

    frequencies: Tensor

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.blocks = nn.ModuleList(Block(spec, layer) for layer in range(spec.layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_epsilon)
        self.head = Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.tied_embeddings:
            self.head.weight = self.embedding.weight
        self.ahead = NextTokenModule(spec) if spec.reads_ahead else None
        frequencies, self.rope_scaling = rope_frequencies(spec.source)
        self.register_buffer("frequencies", frequencies, persistent=False)

    @property
    def layers(self) -> Sequence[Block]:
        """All blocks, first to last."""
        return cast(Sequence[Block], self.blocks)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine ``[T, 1, D]`` of true positions, int64 ``[T]``, which differ from entry indices."""
        return rope_table(positions, self.frequencies, self.rope_scaling, self.embedding.weight.dtype)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Take tokens through all layers.

        Args:
            tokens: int64 ``[T]``.
            positions: True positions, int64 ``[T]``.
            attend: Computes attention over the caller's cache.

        Returns:
            Hidden states of the last layer, ``[T, hidden]``.
        """
        x: Tensor = self.embedding(tokens)
        cosine, sine = self.rope(positions)
        for layer, block in enumerate(self.layers):
            query, key, value = block.project(x, cosine, sine)
            x = block.complete(x, attend(layer, query, key, value))
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """Map hidden states of the last layer, ``[T, hidden]``, to float32 ``[T, vocab]``."""
        result: Tensor = self.head(self.norm(hidden)).float()
        return result

    def operations(self) -> Iterator[Operation]:
        """A decode step: maps one token per slot to logits, in the buffer ``logits`` (float32)."""
        x, normed = Part("x", self.spec.hidden_size), Part("normed", self.spec.hidden_size)
        yield Embed(self.embedding.weight, x)
        yield (angles := self._angles())
        for layer, block in enumerate(self.layers):
            yield from block.operations(layer, x, angles.target)
        yield self.norm.operation(x, normed)
        logits = Part("logits", self.spec.vocab_size, dtype=torch.float32)
        yield self.head.operation(normed, logits, rounded=True)

    def operations_ahead(self) -> Iterator[Operation]:
        """A step of the next-token module, which has one cache.

        Inputs are tokens and, in the buffer ``hidden``, the hidden state of the token before each. Outputs are hidden
        states in the buffer ``normed``, which :attr:`head` maps to the logits of the next tokens.
        """
        assert self.ahead is not None
        x = Part("x", self.spec.hidden_size)
        yield Embed(self.embedding.weight, x)
        yield (angles := self._angles())
        yield from self.ahead.operations(x, angles.target)

    def _angles(self) -> Angles:
        target = Part("angles", 2 * len(self.frequencies), dtype=torch.float32)
        return Angles(self.frequencies, self.rope_scaling, target, self.embedding.weight.dtype)
