"""The decoder that all supported models are: blocks of attention and feed-forward between embedding and logits.

Tokens come as one flat row ``[T]``: a chunk of one prompt, or one token of each of ``T`` sequences. What attention
attends to is the caller's business, and so is the order: a block says what goes into attention
(:meth:`Block.project`) and what follows from its result (:meth:`Block.complete`). Prefill takes all tokens through one
layer after the other; decoding takes one token of each slot through all. :meth:`DecoderModel.forward` is the plain loop
over the layers, for whoever needs no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from snapstream.cache import LayerCache
from snapstream.kernels.operations import Angles, Embed, Operation
from snapstream.kernels.parts import Part
from snapstream.kernels.rows import can_store
from snapstream.models.deepseek import LatentAttention, MixtureOfExperts
from snapstream.models.layers import FeedForward, Linear, RMSNorm
from snapstream.models.llama import GroupedAttention
from snapstream.models.rope import rope_frequencies, rope_table
from snapstream.models.spec import ModelSpec

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""``attend(layer, query [T, H, D], key [T, N, D], value [T, N, D]) -> [T, H, D]``; queries and keys are rotated."""


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_epsilon)
        self.attention = GroupedAttention(spec) if spec.latent is None else LatentAttention(spec)
        self.feed_forward_norm = RMSNorm(spec.hidden_size, spec.norm_epsilon)
        self.feed_forward: nn.Module
        if spec.experts is not None and layer >= spec.experts.first_layer:
            self.feed_forward = MixtureOfExperts(spec.hidden_size, spec.experts)
        else:
            self.feed_forward = FeedForward(spec.hidden_size, spec.intermediate_size, bias=spec.mlp_bias)

    def project(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What goes into attention.

        Args:
            x: ``[T, hidden]``.
            cosine: Of the tokens' positions, see :meth:`DecoderModel.rope`.
            sine: The same.

        Returns:
            Query ``[T, H, D]``, key and value ``[T, N, D]``; query and key are rotated.
        """
        projected: tuple[Tensor, Tensor, Tensor] = self.attention.project(self.attention_norm(x), cosine, sine)
        return projected

    def store(self, x: Tensor, cosine: Tensor, sine: Tensor, cache: LayerCache, start: Tensor) -> Tensor:
        """:meth:`project` for the next tokens of one sequence, with their keys and values in its cache.

        Args:
            x: ``[T, hidden]``.
            cosine: Of the tokens' positions, see :meth:`DecoderModel.rope`.
            sine: The same.
            cache: ``[1, N, C, D]``.
            start: Entry of the first token, int64 scalar.

        Returns:
            Query ``[T, H, D]``, rotated.
        """
        if can_store(x):
            stored: Tensor = self.attention.store(self.attention_norm(x), cosine, sine, cache, start)
            return stored
        query, key, value = self.project(x, cosine, sine)
        cache.write((start + torch.arange(len(x), device=x.device))[None], key[None], value[None])
        return query

    def complete(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output ``[T, hidden]``, from its input ``[T, hidden]`` and attention's result ``[T, H, D]``."""
        x = self.attention.complete(attended).add_(x)
        result: Tensor = self.feed_forward(self.feed_forward_norm(x)).add_(x)
        return result

    def operations(self, layer: int, x: Part, angles: Part) -> Iterator[Operation]:
        """The layer in a decode step: what it makes is added to ``x``."""
        normed = Part("normed", x.size)
        yield self.attention_norm.operation(x, normed)
        yield from self.attention.operations(layer, normed, x, angles)
        yield self.feed_forward_norm.operation(x, normed)
        yield from cast(FeedForward | MixtureOfExperts, self.feed_forward).operations(normed, x)


class DecoderModel(nn.Module):
    """The whole decoder. Build it on the ``meta`` device and fill it with :func:`~snapstream.models.load_model`."""

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
        frequencies, self.rope_scaling = rope_frequencies(spec.source)
        self.register_buffer("frequencies", frequencies, persistent=False)

    @property
    def layers(self) -> Sequence[Block]:
        """All blocks, first to last."""
        return cast(Sequence[Block], self.blocks)

    def rope(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosine and sine ``[T, 1, D]`` of true positions, int64 ``[T]``; not of rows of a cache."""
        return rope_table(positions, self.frequencies, self.rope_scaling, self.embedding.weight.dtype)

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Take tokens through all layers.

        Args:
            tokens: int64 ``[T]``.
            positions: True positions, int64 ``[T]``.
            attend: Attention over the caller's cache.

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
        """A decode step: tokens of slots in, their logits out, in the buffer ``logits`` (float32)."""
        x, normed = Part("x", self.spec.hidden_size), Part("normed", self.spec.hidden_size)
        angles = Part("angles", 2 * len(self.frequencies), dtype=torch.float32)
        yield Embed(self.embedding.weight, x)
        yield Angles(self.frequencies, self.rope_scaling, angles, self.embedding.weight.dtype)
        for layer, block in enumerate(self.layers):
            yield from block.operations(layer, x, angles)
        yield self.norm.operation(x, normed)
        logits = Part("logits", self.spec.vocab_size, dtype=torch.float32)
        yield self.head.operation(normed, logits, rounded=True)
