"""Mixtures of experts: a router sends each token to a few of many feed-forward layers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from snapstream.errors import CheckpointError
from snapstream.kernels.buffers import BufferView
from snapstream.kernels.operations import Choose, Combine, ExpertProduct, Operation, Product, Sort
from snapstream.kernels.plain import Activation
from snapstream.kernels.weight import DenseWeight
from snapstream.models.joined import Joined
from snapstream.models.layers import FeedForward, Matrix, Result
from snapstream.models.names import Place, gated_places, linear_places
from snapstream.models.spec import ExpertShape


class Router(nn.Module):
    """Selects the experts of each token and their weights, in float32.

    Most models take a softmax over all experts, and select the best ones overall or (DeepSeek-V2) within the best
    groups; a group is rated by its best expert. DeepSeek-V3 and GLM-4.5 take a sigmoid per expert. A learned correction
    affects the selection but not the weights, and a group is rated by the sum of its two best experts.
    """

    def __init__(self, hidden_size: int, shape: ExpertShape) -> None:
        super().__init__()
        self.shape = shape
        self.weight = nn.Parameter(torch.empty(shape.count, hidden_size))
        self.bias = nn.Parameter(torch.zeros(shape.count)) if shape.biased else None
        self.correction = nn.Parameter(torch.zeros(shape.count)) if shape.corrected else None
        self.factors = nn.Parameter(torch.ones(shape.count)) if shape.beside else None


class MixtureOfExperts(nn.Module):
    """A mixture of experts: a few routed experts per token, plus shared experts that process every token.

    Rows are sorted by expert, so the weights of each selected expert are read once, however many tokens use it. There
    are always ``T * chosen`` rows, so no shape depends on the selection.
    """

    def __init__(self, hidden_size: int, shape: ExpertShape, activation: Activation = Activation.SILU) -> None:
        super().__init__()
        self.activation = activation
        self.chosen = shape.chosen
        self.router = Router(hidden_size, shape)
        self.gate_up = Matrix(shape.count, 2 * shape.inner, hidden_size)
        self.down = Matrix(shape.count, hidden_size, shape.inner)
        self.gate_up_bias = nn.Parameter(torch.zeros(shape.count, 2 * shape.inner)) if shape.biased else None
        self.down_bias = nn.Parameter(torch.zeros(shape.count, hidden_size)) if shape.biased else None
        self.shared: FeedForward | None = None
        if shape.shared_inner:
            self.shared = FeedForward(hidden_size, shape.shared_inner, activation=activation, gated=shape.gates_shared)

    def operations(
        self, source: BufferView, result: Result, routed: BufferView | None = None, factor: float = 1.0
    ) -> Iterator[Operation]:
        """The mixture as operations.

        Args:
            source: What experts read.
            result: Where their result goes, with a factor of 1.
            routed: What the router reads, if it is something else.
            factor: On the router's logits.
        """
        assert result.factor == 1.0, result
        shape, wide, target = self.router.shape, torch.float32, result.target
        logits, ends = BufferView("router", shape.count, dtype=wide), BufferView("ends", shape.count, dtype=torch.int64)
        weights = BufferView("expert_weights", self.chosen, dtype=wide)
        experts = BufferView("experts", self.chosen, dtype=torch.int64)
        rows = BufferView("sorted", source.size, copies=self.chosen)
        inner = BufferView("expert_inner", shape.inner, copies=self.chosen)
        made = BufferView("made", target.size, copies=self.chosen)
        yield Product(routed or source, logits, DenseWeight(self.router.weight), self.router.bias, factor=factor)
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
            factors=self.router.factors,
        )
        yield Sort(source, rows, experts, ends, shape.count)
        yield ExpertProduct(rows, inner, ends, self.gate_up.value, True, self.activation, self.gate_up_bias)
        yield ExpertProduct(inner, made, ends, self.down.value, gated=False, bias=self.down_bias)
        if self.shared is not None:
            yield from self.shared.operations(source, result)
        yield Combine(made, weights, experts, target, add=result.add or self.shared is not None)


def check_experts(count: int, chosen: int | None, groups: int = 1, chosen_groups: int = 1, *, least: int = 1) -> None:
    """Check that so many experts can be chosen.

    Args:
        count: Number of experts.
        chosen: How many each token chooses.
        groups: Number of groups that they are divided into.
        chosen_groups: Number of groups that a token's experts come from.
        least: Minimum number of experts in a group, if there are several.

    Raises:
        CheckpointError: They cannot.
    """
    if count % groups or (groups > 1 and count // groups < least):
        raise CheckpointError(f"{count} experts cannot be divided into {groups} groups of {least} or more")
    if not chosen or not 0 < chosen <= count // groups * chosen_groups:
        raise CheckpointError(f"num_experts_per_tok is {chosen}; {chosen_groups} of {groups} groups hold fewer experts")


@dataclass(frozen=True)
class ExpertNames:
    """What the tensors of a mixture are called in checkpoints.

    Attributes:
        router: The router.
        gate: Gates of an expert.
        up: Its ups.
        down: The product after them.
        shared: The experts that process every token.
        joined: How the tensors of all experts may be joined; see :mod:`snapstream.models.joined`.
    """

    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    shared: str = "shared_experts"
    joined: Joined | None = None


def expert_places(source: str, target: str, hidden: int, shape: ExpertShape, names: ExpertNames) -> dict[str, Place]:
    """Where the tensors of a mixture go."""
    router = f"{source}.{names.router}"
    places = {f"{router}.weight": Place(f"{target}.router.weight", (shape.count, hidden))}
    if shape.biased:
        places[f"{router}.bias"] = Place(f"{target}.router.bias", (shape.count,))
    if shape.beside:
        places[f"{source}.router.per_expert_scale"] = Place(f"{target}.router.factors", (shape.count,))
    if shape.corrected:
        places[f"{source}.gate.e_score_correction_bias"] = Place(f"{target}.router.correction", (shape.count,))
    inner = shape.inner
    products = ((names.gate, "gate_up", (inner, hidden), 0), (names.up, "gate_up", (inner, hidden), inner))
    for expert in range(shape.count):
        for name, module, sizes, start in (*products, (names.down, "down", (hidden, inner), 0)):
            theirs = f"{source}.experts.{expert}.{name}"
            places[f"{theirs}.weight"] = Place(f"{target}.{module}", sizes, start, expert)
            if shape.biased:
                places[f"{theirs}.bias"] = Place(f"{target}.{module}_bias", sizes[:1], start, expert)
    if shape.shared_inner:
        places |= gated_places(f"{source}.{names.shared}", f"{target}.shared", hidden, shape.shared_inner)
    if shape.gates_shared:
        places |= linear_places(f"{source}.{names.shared}_gate", f"{target}.shared.gate", 1, hidden)
    return places
