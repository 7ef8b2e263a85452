"""Gated DeltaNet, in place of attention: a short convolution and a state of fixed size."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from snapstream.cache import StateShape
from snapstream.kernels.buffers import BufferView
from snapstream.kernels.operations import GateBy, Operation
from snapstream.kernels.recurrence import Recur
from snapstream.models.layers import Linear, Result, RMSNorm
from snapstream.models.names import Form, Interleaved, Place, linear_places
from snapstream.models.spec import ModelSpec


class GatedDeltaNet(nn.Module):
    """The projections before and after the recurrence, and its own weights."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        group = spec.layer_group(layer)
        assert isinstance(group.entry, StateShape)
        assert group.window is not None
        self.shape, self.in_turn = group.entry, spec.value_heads_in_turn
        shape = self.shape
        # Gates of the results, queries, keys, values, then the strengths and decays of each value head.
        self.mixed = Linear(spec.hidden_size, shape.heads * shape.value + shape.size)
        self.taps = nn.Parameter(torch.empty(group.window + 1, shape.channels))
        self.rates = nn.Parameter(torch.empty(shape.heads))
        self.shifts = nn.Parameter(torch.empty(shape.heads))
        self.norm = RMSNorm(shape.value, spec.norm_epsilon)
        self.output = Linear(shape.heads * shape.value, spec.hidden_size)

    def operations(self, layer: int, source: BufferView, result: Result, angles: BufferView) -> Iterator[Operation]:
        """The layer as operations."""
        shape = self.shape
        width = shape.heads * shape.value
        gates, inputs = BufferView("mixed", shape.value, shape.heads), BufferView("mixed", shape.size, offset=width)
        made, normed = (
            BufferView("recurred", shape.value, shape.heads),
            BufferView("attended", shape.value, shape.heads),
        )
        yield self.mixed.operation(source, BufferView("mixed", width + shape.size))
        yield Recur(
            inputs,
            made,
            layer,
            self.taps,
            self.rates,
            self.shifts,
            before=len(self.taps) - 1,
            key_heads=shape.key_heads,
            key_size=shape.key,
            in_turn=self.in_turn,
        )
        yield self.norm.operation(made, normed)
        yield GateBy(gates, normed, sigmoid=False)
        yield self.output.operation(BufferView("attended", width), result)


def recurrent_places(source: str, target: str, spec: ModelSpec, layer: int) -> dict[str, Place]:
    """Where the tensors of a layer with a state go."""
    group = spec.layer_group(layer)
    shape, window = group.entry, group.window
    assert isinstance(shape, StateShape)
    assert window is not None
    width, channels, hidden, mixed = shape.heads * shape.value, shape.channels, spec.hidden_size, f"{target}.mixed"
    share = shape.heads // shape.key_heads
    of_head = (shape.key, shape.key, share * shape.value, share * shape.value)
    apart = {"qkvz": {"z": width, "qkv": channels}, "ba": {"b": shape.heads, "a": shape.heads}}
    joined = {"qkvz": Interleaved(of_head, (3, 0, 1, 2)), "ba": Interleaved((share, share), (0, 1))}
    places, start = dict[str, Place](), 0
    for both, parts in apart.items():
        rows = joined[both] if both in spec.joined_inputs else None
        for name, count in ({both: sum(parts.values())} if rows else parts).items():
            places |= linear_places(f"{source}.in_proj_{name}", mixed, count, hidden, start=start, rows=rows)
            start += count
    return (
        places
        | linear_places(f"{source}.out_proj", f"{target}.output", hidden, width)
        | {
            f"{source}.conv1d.weight": Place(f"{target}.taps", (channels, 1, window + 1), form=Form.TAPS),
            f"{source}.A_log": Place(f"{target}.rates", (shape.heads,), form=Form.LOGARITHMS),
            f"{source}.dt_bias": Place(f"{target}.shifts", (shape.heads,)),
            f"{source}.norm.weight": Place(f"{target}.norm.weight", (shape.value,)),
        }
    )
