"""The decoder architecture of all supported models: blocks of attention and feed-forward between embedding and logits.

A model is a list of operations (:mod:`snapstream.kernels.operations`). Decoding takes one or several tokens of each
slot through all of it; prefill takes all tokens of a prompt through one layer before the next. The modules hold the
weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import nn

from snapstream.kernels.buffers import BufferView
from snapstream.kernels.operations import Cap, Embed, Operation
from snapstream.kernels.weight import DenseWeight
from snapstream.models.families import make_block
from snapstream.models.families.family import Layer
from snapstream.models.layer_inputs import PerLayerInputs, rounded_factor
from snapstream.models.layers import FixedNorm, Linear, Matrix, Result, RMSNorm
from snapstream.models.next_token import NextTokenModule
from snapstream.models.rope import Rotation
from snapstream.models.spec import ModelSpec


class DecoderModel(nn.Module):
    """The whole decoder. :func:`~snapstream.models.load_model` creates it and reads its weights."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding = Matrix(spec.vocab_size, spec.hidden_size)
        self.blocks = nn.ModuleList(make_block(spec, layer) for layer in range(spec.layers))
        self.norm = RMSNorm(spec.hidden_size, spec.norm_epsilon, wide=spec.wide_norms)
        self.head = Linear(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.tied_embeddings:
            self.head.weight = self.embedding
        self.mtp = NextTokenModule(spec) if spec.has_mtp else None
        self.layer_inputs = PerLayerInputs(spec) if spec.layer_inputs else None
        self.embedding_norm = FixedNorm(spec.hidden_size, spec.norm_epsilon) if spec.norms_embeddings else None
        names = dict.fromkeys(group.rotation for group in spec.groups)
        self.rotations = nn.ModuleList(Rotation(spec.source, name, spec.longest) for name in names)

    @property
    def device(self) -> torch.device:
        """Where its weights are."""
        return self.norm.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Type of its numbers; norms may have a wider one."""
        wide = {id(module.weight) for module in self.modules() if isinstance(module, RMSNorm) and module.wide}
        numbers = (each.dtype for each in self.parameters() if each.is_floating_point() and id(each) not in wide)
        return next(numbers, self.norm.weight.dtype)

    @property
    def layers(self) -> Sequence[Layer]:
        """All blocks, first to last."""
        return cast(Sequence[Layer], self.blocks)

    def operations(self) -> Iterator[Operation]:
        """Maps tokens to logits, in the buffer ``logits`` (float32)."""
        yield from self.embed()
        yield from (rotation.operation() for rotation in self._rotations)
        if self.layer_inputs is not None:
            yield from self.layer_inputs.operations(self._x)
        for layer in range(self.spec.layers):
            yield from self._block(layer, self.spec.cache_of(layer))
        yield from self.output()

    def embed(self, target: BufferView | None = None) -> Iterator[Operation]:
        """Maps tokens to hidden states, by default in the buffer ``x``."""
        target = target or self._x
        table, factor = self.embedding.value, self.spec.embedding_factor
        factor = rounded_factor(factor, table) if self.spec.rounds_embedding_factor else factor
        yield Embed(table, target, factor)
        if self.embedding_norm is not None:
            yield self.embedding_norm.operation(target, target)

    def rotation_of(self, layer: int) -> Rotation:
        """The rotation of a layer."""
        name = self.spec.layer_group(layer).rotation
        return next(each for each in self._rotations if each.name == name)

    def operations_of(self, layer: int, cache: int | None = None) -> Iterator[Operation]:
        """A layer alone: changes the hidden states in ``x``.

        Args:
            layer: Index of the layer; one more than the last for the next-token module's.
            cache: Index of the cache that it reads, if that is another one.
        """
        if self.layer_inputs is not None:
            embedded = BufferView("embedded", self.spec.hidden_size)
            yield from self.embed(embedded)
            yield from self.layer_inputs.operations(embedded, layer)
        yield from self._block(layer, self.spec.cache_of(layer) if cache is None else cache)

    def _block(self, layer: int, cache: int) -> Iterator[Operation]:
        block = self.layers[layer] if self.mtp is None or layer < self.spec.layers else self.mtp.layer
        angles = self.rotation_of(layer).operation().target
        return block.operations(cache, self._x, angles)

    def output(self) -> Iterator[Operation]:
        """Maps hidden states of the last layer, in ``x``, to logits; leaves the normalized states in ``normed``."""
        normed, logits = (
            BufferView("normed", self.spec.hidden_size),
            BufferView("logits", self.spec.vocab_size, dtype=torch.float32),
        )
        yield self.norm.operation(self._x, normed)
        # As transformers rounds them; with weights in blocks there is no such peer, and rounding would make ties.
        rounded = isinstance(self.head.weight.value, DenseWeight)
        yield self.head.operation(normed, Result(logits, factor=self.spec.logit_factor), rounded=rounded)
        if self.spec.logit_cap:
            yield Cap(logits, self.spec.logit_cap)

    def mtp_operations(self) -> Iterator[Operation]:
        """A step of the next-token module, which has one cache.

        Inputs are tokens and, in the buffer ``hidden``, the hidden state of the token before each. Outputs are hidden
        states in the buffer ``normed``, which :attr:`head` maps to the logits of the next tokens.
        """
        assert self.mtp is not None
        angles = self.rotation_of(self.spec.layers).operation()
        yield from self.embed()
        yield angles
        yield from self.mtp.operations(self._x, angles.target)

    def enter_mtp(self) -> Iterator[Operation]:
        """Replaces each token's hidden state in ``x`` by the input of the next-token module's layer."""
        assert self.mtp is not None
        yield self.norm.operation(self._x, BufferView("hidden", self.spec.hidden_size))
        yield from self.embed()
        yield from self.mtp.enter(self._x)

    @property
    def _rotations(self) -> Sequence[Rotation]:
        return cast(Sequence[Rotation], self.rotations)

    @property
    def _x(self) -> BufferView:
        return BufferView("x", self.spec.hidden_size)
