"""DeepSeek-V2, V3 and R1: multi-head latent attention (MLA) and mixtures of experts.

MLA caches one vector per token for all heads, the *latent*: a compressed form of all keys and values (``rank``
elements) and one rotated key (``rope`` elements). The keys of a head are a linear map of the compressed part. This map
is applied to the query (*absorbed*) instead of expanding the keys, so heads attend to latents directly.

This is one KV head whose keys are the latents and whose values are their first ``rank`` elements. To the rest of the
package it is grouped attention with one group (DeepSeek-V2, arXiv 2405.04434, section 2.1).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from snapstream.kernels.operations import (
    Attend,
    Choose,
    Combine,
    ExpertProduct,
    HeadProduct,
    Operation,
    Product,
    Rotate,
    Sort,
    Store,
)
from snapstream.kernels.parts import Part
from snapstream.models.layers import FeedForward, Linear, RMSNorm
from snapstream.models.spec import ExpertShape, ModelSpec


class LatentAttention(nn.Module):
    """The projections before and after attention in MLA, in absorbed form."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        shape = spec.latent
        assert shape is not None
        self.heads, self.shape, self.scale = spec.heads, shape, spec.scale
        queries = spec.heads * (shape.nope + shape.rope)
        self.query_down: Linear | None = None
        self.query_norm: RMSNorm | None = None
        if shape.query_rank is not None:
            self.query_down = Linear(spec.hidden_size, shape.query_rank, bias=spec.qkv_bias)
            self.query_norm = RMSNorm(shape.query_rank, shape.norm_epsilon)
        self.query = Linear(shape.query_rank or spec.hidden_size, queries, bias=False)
        self.latent = Linear(spec.hidden_size, shape.rank + shape.rope, bias=spec.qkv_bias)
        self.latent_norm = RMSNorm(shape.rank, shape.norm_epsilon)
        # Would expand a latent: per head, to `nope` elements of its key and `value` elements of its value.
        self.expand = nn.Parameter(torch.empty(spec.heads, shape.nope + shape.value, shape.rank))
        self.output = Linear(spec.heads * shape.value, spec.hidden_size, bias=spec.output_bias)

    def operations(self, layer: int, source: Part, target: Part, angles: Part) -> Iterator[Operation]:
        """Attention as operations; the result is added to ``target``."""
        H, shape = self.heads, self.shape
        width, entry = shape.nope + shape.rope, shape.rank + shape.rope
        low = source
        if self.query_down is not None and self.query_norm is not None:
            low = Part("low", self.query_down.out_features)
            yield self.query_down.operation(source, low)
            yield self.query_norm.operation(low, low)
        yield self.query.operation(low, Part("heads", H * width))
        yield self.latent.operation(source, Part("latent", entry))
        compressed, key = Part("latent", shape.rank), Part("latent", shape.rope, offset=shape.rank)
        yield self.latent_norm.operation(compressed, compressed)
        yield Rotate(key, key, angles, shape.rope_in_pairs)
        yield Store(Part("latent", entry), None, layer)
        nope, rope = Part("heads", shape.nope, H, stride=width), Part("heads", shape.rope, H, shape.nope, width)
        absorbed, turned = Part("query", shape.rank, H, stride=entry), Part("query", shape.rope, H, shape.rank, entry)
        yield HeadProduct(nope, absorbed, self.expand[:, : shape.nope], transposed=True)
        yield Rotate(rope, turned, angles, shape.rope_in_pairs)
        mixed, value = Part("attended", shape.rank, H), Part("value", shape.value, H)
        yield Attend(Part("query", entry, H), mixed, layer, self.scale)
        yield HeadProduct(mixed, value, self.expand[:, shape.nope :], transposed=False)
        yield self.output.operation(Part("value", H * shape.value), target, add=True)


class Router(nn.Module):
    """Selects the experts of each token and their weights, in float32.

    V2 takes a softmax over all experts, and selects the best ones overall or within the best groups; a group is rated
    by its best expert. V3 takes a sigmoid per expert. A learned correction affects the selection but not the weights,
    and a group is rated by the sum of its two best experts.
    """

    def __init__(self, hidden_size: int, shape: ExpertShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.count, hidden_size))
        self.correction = nn.Parameter(torch.zeros(shape.count)) if shape.corrected else None


class MixtureOfExperts(nn.Module):
    """A mixture of experts: a few routed experts per token, plus shared experts that process every token.

    Rows are sorted by expert, so the weights of each selected expert are read once, however many tokens use it. There
    are always ``T * chosen`` rows, so no shape depends on the selection.
    """

    def __init__(self, hidden_size: int, shape: ExpertShape) -> None:
        super().__init__()
        self.chosen = shape.chosen
        self.router = Router(hidden_size, shape)
        self.gate_up = nn.Parameter(torch.empty(shape.count, 2 * shape.inner, hidden_size))
        self.down = nn.Parameter(torch.empty(shape.count, hidden_size, shape.inner))
        self.shared = FeedForward(hidden_size, shape.shared * shape.inner) if shape.shared else None

    def operations(self, source: Part, target: Part) -> Iterator[Operation]:
        """The mixture as operations; the result is added to ``target``."""
        shape, wide = self.router.shape, torch.float32
        logits, ends = Part("router", shape.count, dtype=wide), Part("ends", shape.count, dtype=torch.int64)
        weights = Part("expert_weights", self.chosen, dtype=wide)
        experts = Part("experts", self.chosen, dtype=torch.int64)
        rows = Part("sorted", source.size, copies=self.chosen)
        inner = Part("expert_inner", shape.inner, copies=self.chosen)
        made = Part("made", target.size, copies=self.chosen)
        yield Product(source, logits, self.router.weight)
        yield Choose(
            logits,
            weights,
            experts,
            self.router.correction,
            groups=shape.groups,
            chosen_groups=shape.chosen_groups,
            corrected=shape.corrected,
            normalize=shape.normalize,
            scale=shape.scale,
        )
        yield Sort(source, rows, experts, ends, shape.count)
        yield ExpertProduct(rows, inner, ends, self.gate_up, gated=True)
        yield ExpertProduct(inner, made, ends, self.down, gated=False)
        if self.shared is not None:
            yield from self.shared.operations(source, target)
        yield Combine(made, weights, experts, target)
