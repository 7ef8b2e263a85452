"""Per-layer embeddings: what each layer of Gemma 4 E2B and E4B reads of a token besides the residual stream.

A second table has a short row for every token and layer. To it is added a projection of the token's embedding, also one
for every layer, which is normalized first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import nn

from snapstream.kernels.buffers import BufferView
from snapstream.kernels.operations import Embed, Operation, Product
from snapstream.kernels.weight import DenseWeight, Weight
from snapstream.models.layers import FixedNorm, Linear, Matrix, RMSNorm
from snapstream.models.names import Place, linear_places, norm_place
from snapstream.models.spec import ModelSpec

LAYER_PROJECTION = "layer_inputs.projection.weight"
"""Name of the weight of the projection, which layers read a part of."""


class PerLayerInputs(nn.Module):
    """The table and the projection of all layers."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        assert spec.layer_inputs is not None
        self.layers, self.size, self.hidden_size = spec.layers, spec.layer_inputs.size, spec.hidden_size
        self.table = Matrix(spec.layer_inputs.vocab_size, spec.layers * self.size)
        self.projection = Linear(spec.hidden_size, spec.layers * self.size)
        self.norm = RMSNorm(self.size, spec.norm_epsilon, wide=spec.wide_norms)
        self.balance = FixedNorm(1, 0.0, 2.0**-0.5)  # a factor on the sum

    def operations(self, embedded: BufferView, layer: int | None = None) -> Iterator[Operation]:
        """The inputs of one layer, or of all, given the tokens' embeddings."""
        table, size = self.table.value, self.size
        first, count = (0, self.layers) if layer is None else (layer, 1)
        yield Embed(table, BufferView("layer_inputs", self.layers * size), rounded_factor(size**0.5, table))
        weight = self.projection.weight.value.cut(slice(first * size, (first + count) * size))
        projected = BufferView("projected", count * size)
        yield Product(embedded, projected, weight, factor=self.hidden_size**-0.5)
        target = replace(part_of_layer(first, size), heads=count)
        yield self.norm.operation(BufferView("projected", size, count), target, add=True, factor=self.balance.weight)


def part_of_layer(layer: int, size: int) -> BufferView:
    """What a layer reads."""
    return BufferView("layer_inputs", size, offset=layer * size)


def rounded_factor(factor: float, table: Weight) -> float:
    """A factor on embeddings as transformers rounds it: to their type, if they are not in blocks."""
    return float(torch.tensor(factor, dtype=table.dtype)) if isinstance(table, DenseWeight) else factor


def layer_input_places(spec: ModelSpec) -> dict[str, Place]:
    """Where their tensors go."""
    if spec.layer_inputs is None:
        return {}
    size, target = spec.layers * spec.layer_inputs.size, "layer_inputs"
    table = Place(f"{target}.table", (spec.layer_inputs.vocab_size, size))
    norm = norm_place(f"{target}.norm", spec.layer_inputs.size, spec)
    return {
        "model.embed_tokens_per_layer.weight": table,
        "model.per_layer_projection_norm.weight": norm,
    } | linear_places("model.per_layer_model_projection", f"{target}.projection", size, spec.hidden_size)
