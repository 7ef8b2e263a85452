"""What a module of this package says about a family of models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from snapstream.kernels.buffers import BufferView
from snapstream.kernels.operations import Operation
from snapstream.models.joined import Joined
from snapstream.models.names import Place
from snapstream.models.spec import ModelSpec


class Layer(Protocol):
    """A decoder layer: a module that holds its weights and describes what it computes."""

    def operations(self, layer: int, x: BufferView, angles: BufferView) -> Iterator[Operation]:
        """The layer as operations; its results are added to ``x``.

        One of them is :class:`~snapstream.kernels.operations.Attend`. The operations from it on must not write to the
        query's buffer, nor to any other that they read before they write to it, except ``x``: prefill takes the last
        token of a prompt through them a second time.

        Args:
            layer: Index of its cache.
            x: Hidden states.
            angles: Rotary angles of the tokens' positions.
        """


@dataclass(frozen=True)
class Family:
    """A family of models whose layers work alike.

    Attributes:
        architectures: Their names in ``config.json``.
        fields: Given a ``transformers`` configuration and the architecture, the fields of :class:`ModelSpec` that
            :func:`~snapstream.models.families.read_spec` does not read itself. Raises ``CheckpointError`` if a feature
            is not supported.
        block: Makes a layer, given its index.
        places: Where the tensors of a layer go, given the beginning of their names, the name of its module, the model
            and the layer's index.
        apart: Where tensors outside of layers go, where that is not as in other families.
        joined_experts: How checkpoints may join the tensors of all experts; see :mod:`snapstream.models.joined`.
    """

    architectures: tuple[str, ...]
    fields: Callable[[Any, str], dict[str, Any]]
    block: Callable[[ModelSpec, int], nn.Module]
    places: Callable[[str, str, ModelSpec, int], dict[str, Place]]
    apart: Callable[[ModelSpec], dict[str, Place]] = lambda spec: {}
    joined_experts: Joined | None = None
