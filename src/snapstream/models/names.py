"""Where tensors of a Hugging Face checkpoint go: to which parameters of this package's modules."""

from __future__ import annotations

import re
from dataclasses import dataclass

from snapstream.models.spec import ModelSpec

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Place:
    """The destination of a tensor of a checkpoint: rows from ``start`` of a parameter, or of one expert's part."""

    parameter: str
    shape: tuple[int, ...]
    start: int = 0
    expert: int | None = None


def scale_of(name: str) -> str:
    """Name of the tensor with the scales of a float8 weight."""
    return f"{name}_scale_inv"


def may_be_ignored(name: str, spec: ModelSpec) -> bool:
    """Whether a checkpoint may contain a tensor that has no destination."""
    if name.endswith("rotary_emb.inv_freq"):  # old checkpoints contain RoPE frequencies
        return True
    if spec.tied_embeddings and name == "lm_head.weight":  # a second copy
        return True
    layer = _LAYER.match(name)  # multi-token prediction: layers after the last
    return layer is not None and spec.layers <= int(layer[1]) < spec.layers + spec.extra_layers


def norm_places(source: str, target: str, spec: ModelSpec, **names: str) -> dict[str, Place]:
    """Where the weights of norms go: of each name in the checkpoint to the module of the given name."""
    return {
        f"{source}.{theirs}.weight": Place(f"{target}.{ours}.weight", (spec.hidden_size,))
        for theirs, ours in names.items()
    }


def linear_places(
    source: str, target: str, rows: int, columns: int, bias: bool = False, start: int = 0
) -> dict[str, Place]:
    """Where a product's weight ``[rows, columns]`` and bias go, from row ``start`` of the parameter."""
    places = {f"{source}.weight": Place(f"{target}.weight", (rows, columns), start)}
    if bias:
        places[f"{source}.bias"] = Place(f"{target}.bias", (rows,), start)
    return places


def gated_places(source: str, target: str, hidden: int, inner: int, *, bias: bool = False) -> dict[str, Place]:
    """Where the tensors of a :class:`~snapstream.models.layers.FeedForward` go."""
    places = linear_places(f"{source}.gate_proj", f"{target}.gate_up", inner, hidden, bias)
    places |= linear_places(f"{source}.up_proj", f"{target}.gate_up", inner, hidden, bias, inner)
    places |= linear_places(f"{source}.down_proj", f"{target}.down", hidden, inner, bias)
    return places
