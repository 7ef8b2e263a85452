"""The next-token module of DeepSeek-V3 and R1: multi-token prediction (arXiv 2412.19437, section 2.2).

After the model has processed token ``i``, the module takes the model's hidden state ``h[i]`` and token ``i + 1``, and
predicts token ``i + 2``. ``h[i]`` is taken after the model's last norm. To predict further tokens, the module uses its
own hidden state in place of the model's. It shares the model's embedding and output projection.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

from torch import nn

from snapstream.kernels.buffers import BufferView
from snapstream.kernels.operations import Operation
from snapstream.models.families import make_block
from snapstream.models.families.family import Layer
from snapstream.models.layers import Linear, RMSNorm
from snapstream.models.spec import ModelSpec


class NextTokenModule(nn.Module):
    """One more decoder layer, whose input is a hidden state and the token after it."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        size, epsilon = spec.hidden_size, spec.norm_epsilon
        self.embedding_norm, self.hidden_norm = RMSNorm(size, epsilon), RMSNorm(size, epsilon)
        self.join = Linear(2 * size, size, bias=False)
        self.block = make_block(spec, spec.layers)
        self.norm = RMSNorm(size, epsilon)

    @property
    def layer(self) -> Layer:
        """Its decoder layer."""
        return cast(Layer, self.block)

    def enter(self, x: BufferView) -> Iterator[Operation]:
        """The layer's input in ``x``, from embedded tokens in ``x`` and the states before them in ``hidden``."""
        size = x.size
        yield self.embedding_norm.operation(x, BufferView("joined", size))
        yield self.hidden_norm.operation(BufferView("hidden", size), BufferView("joined", size, offset=size))
        yield self.join.operation(BufferView("joined", 2 * size), x)

    def operations(self, x: BufferView, angles: BufferView) -> Iterator[Operation]:
        """A step: maps embedded tokens in ``x`` and states in the buffer ``hidden`` to states in ``normed``."""
        yield from self.enter(x)
        yield from self.layer.operations(0, x, angles)
        yield self.norm.operation(x, BufferView("normed", x.size))
