"""Where tensors of a Hugging Face checkpoint go: to which parameters of this package's modules."""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass

import torch
from torch import Tensor

from snapstream.models.spec import ModelSpec

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_OF_CACHE = re.compile(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.")
_WITHIN = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_OTHER_PARTS = tuple(
    f"{beginning}{part}."
    for beginning in ("", "model.")
    for part in (
        "vision_tower",
        "vision_adapter",
        "vision_projection",
        "vision_embedder",
        "embed_vision",
        "audio_tower",
        "embed_audio",
        "multi_modal_projector",
        "visual",
    )
)


class Form(enum.Enum):
    """How the numbers of a tensor become those of the parameter.

    ``LOGARITHMS``: the parameter is ``-exp(x)``, which is also what GGUF files contain. ``TAPS``: weights of a
    convolution, ``[channels, 1, taps]``, become ``[taps, channels]``.
    """

    NUMBERS = enum.auto()
    LOGARITHMS = enum.auto()
    TAPS = enum.auto()


@dataclass(frozen=True)
class Interleaved:
    """Rows of several matrices in one tensor, a few of each in turn.

    Attributes:
        sizes: How many of each come in turn.
        matrices: In which order they follow each other in the parameter.
    """

    sizes: tuple[int, ...]
    matrices: tuple[int, ...]

    def order(self, count: int) -> Tensor:
        """Which of ``count`` rows comes first, second, ..."""
        turns = torch.split(torch.arange(count).view(-1, sum(self.sizes)), list(self.sizes), 1)
        return torch.cat([turns[each].flatten() for each in self.matrices])


@dataclass(frozen=True)
class Place:
    """The destination of a tensor of a checkpoint: rows from ``start`` of a parameter, or of one expert's part.

    An ``offset`` is added to all of the tensor's numbers. GGUF files contain the sums.
    """

    parameter: str
    shape: tuple[int, ...]
    start: int = 0
    expert: int | None = None
    offset: float = 0.0
    form: Form = Form.NUMBERS
    rows: Interleaved | None = None

    def read(self, tensor: Tensor) -> Tensor:
        """What a tensor of a Hugging Face checkpoint becomes."""
        if self.offset:
            tensor = tensor.float() + self.offset
        if self.form is Form.LOGARITHMS:
            tensor = -tensor.float().exp()
        if self.form is Form.TAPS:
            tensor = tensor[:, 0].t()
        return tensor if self.rows is None else tensor[self.rows.order(len(tensor))]


def scale_of(name: str) -> str:
    """Name of the tensor with the scales of a float8 weight."""
    return f"{name}_scale_inv"


def may_be_ignored(name: str, spec: ModelSpec) -> bool:
    """Whether a checkpoint may contain a tensor that has no destination."""
    if name.endswith("rotary_emb.inv_freq"):  # old checkpoints contain RoPE frequencies
        return True
    if spec.tied_embeddings and name == "lm_head.weight":  # a second copy
        return True
    if spec.weight_block is None and name.endswith(".activation_scale"):  # activations are not rounded to float8
        return True
    if (unused := _OF_CACHE.match(name)) and int(unused[1]) in spec.shared_from:
        return True
    if spec.ignored_layers and name.startswith("mtp."):
        return True
    layer = _LAYER.match(name)  # multi-token prediction: layers after the last
    return layer is not None and spec.layers <= int(layer[1]) < spec.layers + spec.extra_layers + spec.ignored_layers


def name_within(name: str) -> str | None:
    """The name of a tensor in the model of texts within a model of texts and images; ``None`` if it is another part's.

    Names begin with ``language_model.model.`` or ``model.language_model.``.
    """
    if name.startswith(_OTHER_PARTS):
        return None
    for beginning, without in _WITHIN.items():
        if name.startswith(beginning):
            return without + name.removeprefix(beginning)
    return name


def norm_places(source: str, target: str, spec: ModelSpec, **names: str) -> dict[str, Place]:
    """Where the weights of norms go: of each name in the checkpoint to the module of the given name."""
    return {
        f"{source}.{theirs}.weight": norm_place(f"{target}.{ours}", spec.hidden_size, spec)
        for theirs, ours in names.items()
    }


def norm_place(target: str, size: int, spec: ModelSpec) -> Place:
    """Where the weight of a norm goes."""
    return Place(f"{target}.weight", (size,), offset=spec.norm_offset)


def linear_places(
    source: str,
    target: str,
    count: int,
    columns: int,
    bias: bool = False,
    start: int = 0,
    rows: Interleaved | None = None,
) -> dict[str, Place]:
    """Where a product's weight ``[count, columns]`` and bias go, from row ``start`` of the parameter."""
    places = {f"{source}.weight": Place(f"{target}.weight", (count, columns), start, rows=rows)}
    if bias:
        places[f"{source}.bias"] = Place(f"{target}.bias", (count,), start, rows=rows)
    return places


def gated_places(
    source: str, target: str, hidden: int, inner: int, *, bias: bool = False, joined: str = "", down: str = "down_proj"
) -> dict[str, Place]:
    """Where the tensors of a :class:`~snapstream.models.layers.FeedForward` go.

    Args:
        source: Beginning of their names.
        target: Name of its module.
        hidden: Columns of gates and ups.
        inner: Rows of each.
        bias: Whether products have biases.
        joined: Name of the tensor of gates and ups, if they are one.
        down: Name of the product after them.
    """
    if joined:
        places = linear_places(f"{source}.{joined}", f"{target}.gate_up", 2 * inner, hidden, bias)
    else:
        places = linear_places(f"{source}.gate_proj", f"{target}.gate_up", inner, hidden, bias)
        places |= linear_places(f"{source}.up_proj", f"{target}.gate_up", inner, hidden, bias, inner)
    return places | linear_places(f"{source}.{down}", f"{target}.down", hidden, inner, bias)
