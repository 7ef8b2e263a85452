"""Loads the tensors of a GGUF file: blocks as they are, others as numbers, a few rows at a time."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from snapstream.errors import CheckpointError
from snapstream.kernels.formats import FORMATS, Format
from snapstream.models.decoder import DecoderModel
from snapstream.models.gguf.architectures import architecture
from snapstream.models.gguf.configuration import FREQUENCY_FACTORS, LONG_FACTORS
from snapstream.models.gguf.container import Container, open_container
from snapstream.models.names import Form, Interleaved, Place
from snapstream.models.progress import with_progress
from snapstream.models.storage import fill, fill_tiles, rows_at_once, target_of

if TYPE_CHECKING:
    from gguf import TensorNameMap

_LAYER = re.compile(r"blk\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_RENAMED = {
    "correction_bias": "correction.bias",
    ".sinks": ".sinks.weight",
    ".dt_bias": ".dt_proj.bias",
    ".layer_scalar": ".layer_scalar.weight",
}
"""Ends of names that the gguf package has otherwise."""
_SCALES = {".router.scale": ".router.proj", ".router.per_expert_scale": ".experts.down_proj"}
"""Ends of the names of factors, and of the products that they belong to in files."""
_GATE_UP = ("gate_proj", "up_proj")
_APART = (FREQUENCY_FACTORS, *LONG_FACTORS.values())
"""Tensors that belong to the configuration."""


@dataclass(frozen=True)
class Source:
    """What a tensor of a checkpoint is in a GGUF file: a tensor, or one expert's part of it.

    Attributes:
        name: Name of the tensor in the file.
        expert: The expert.
        part: Which of several products of the expert, whose rows follow each other.
        parts: How many these are.
    """

    name: str
    expert: int | None = None
    part: int = 0
    parts: int = 1

    def first(self, rows: int) -> int:
        """The row that its own begin with; ``rows`` says how many they are."""
        return ((self.expert or 0) * self.parts + self.part) * rows


def stored_shapes(path: Path, places: Mapping[str, Place]) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors, under their names in ``places`` or, if they are not in it, their names in the file."""
    file = open_container(path)
    sources = sources_of(file, places)
    uses = Counter(source.name for source in sources.values())
    others = file.tensors.keys() - uses.keys() - set(_APART)
    shapes = {name: file.tensors[name].shape for name in others if not _is_unused(file, name)}
    for name, source in sources.items():
        stored = file.tensors.get(source.name)
        if stored is not None:
            shapes[name], count = stored.shape, stored.shape[0] * source.parts
            if source.expert is not None and count == uses[source.name]:  # all experts are there
                _, *shape = stored.shape
                shapes[name] = (shape[0] // source.parts, *shape[1:])
            wanted = places[name].shape
            if shapes[name] == tuple(size for size in wanted if size > 1):  # files leave out dimensions of 1
                shapes[name] = wanted
    return shapes


def _is_unused(file: Container, name: str) -> bool:
    """Whether a tensor is not used.

    The last layers may be for multi-token prediction, or read caches of others and yet have keys and values of their
    own. Norms of Muse's queries and keys have no weights but what the configuration says.
    """
    arch, layer = architecture(file)[0], _LAYER.match(name)
    if layer is None:
        return False
    if arch == "muse-glimmer" and name.endswith(("attn_q_norm.weight", "attn_k_norm.weight")):
        return True
    keys = "block_count", "nextn_predict_layers", "attention.shared_kv_layers"
    count, ahead, shared = (file.metadata.get(f"{arch}.{key}", 0) for key in keys)
    number, own = int(layer[1]), name.removeprefix(layer[0])
    return count - ahead <= number < count or (number >= count - shared and own.startswith(("attn_k", "attn_v.")))


def stored_formats(path: Path, places: Mapping[str, Place]) -> dict[str, Format]:
    """Formats of the tensors that are in blocks and can stay so, by their names in ``places``."""
    file, by_number = open_container(path), {each.number: each for each in FORMATS.values()}
    sources = sources_of(file, places).items()
    kinds = {name: by_number.get(file.tensors[source.name].kind) for name, source in sources}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def widened_types(path: Path, places: Mapping[str, Place]) -> set[str]:
    """Names of the types in blocks that become numbers when they are loaded."""
    from gguf import GGMLQuantizationType as Type

    file, kept = open_container(path), {each.number for each in FORMATS.values()}
    types = {file.tensors[source.name].kind for source in sources_of(file, places).values()}
    return {Type(each).name for each in types - kept} - {"F64", "F32", "F16", "BF16"}


def fill_model(path: Path, model: DecoderModel, places: Mapping[str, Place]) -> None:
    """Read all tensors into a model's parameters.

    Args:
        path: The file; its tensors must have been checked against ``places``.
        model: The model. Its rotary frequencies are divided in place if the file has factors for them.
        places: Destination of each tensor.

    Raises:
        CheckpointError: The quantization of a tensor is not supported, or the file has the wrong number of factors.
    """
    file, first_layer = open_container(path), model.spec.groups[0].layers[0]
    frequencies = model.rotation_of(first_layer).frequencies
    sources = sources_of(file, places)
    for name, place in with_progress(places.items(), len(places)):
        source, (target, kind) = sources[name], target_of(model, place)
        order = rows_in_order(file, name, place.shape, model.spec.head_dim, place.rows)
        if place.form is Form.TAPS:
            target.copy_(torch.from_numpy(file.rows(source.name, order)).t())
            continue
        if source.expert is not None and len(place.shape) == 1:  # a bias is one of the rows
            target.copy_(torch.from_numpy(file.rows(source.name, numpy.array([source.expert]))[0]))
            continue
        first = source.first(place.shape[0])
        if kind is not None and file.tensors[source.name].kind == kind.number:
            rows = file.stored_rows(source.name)[first : first + place.shape[0]]
            fill_tiles(target, kind, rows, torch.from_numpy(order))
        else:
            _read_numbers(file, source.name, (target, kind), first + order)
    if FREQUENCY_FACTORS in file.tensors:
        factors = file.rows(FREQUENCY_FACTORS, numpy.arange(1))[0]
        if factors.shape != tuple(frequencies.shape):
            raise CheckpointError(f"{path}: {FREQUENCY_FACTORS} has {len(factors)} numbers, not {len(frequencies)}")
        frequencies.div_(torch.from_numpy(factors).to(frequencies.device))


def _read_numbers(
    file: Container, source: str, target: tuple[Tensor, Format | None], order: NDArray[numpy.int64]
) -> None:
    """Read rows of a tensor, in some order, as numbers."""
    shape = file.tensors[source].shape
    if len(shape) == 1:
        whole = file.rows(source, numpy.arange(1))[0]
        target[0].copy_(torch.from_numpy(whole[order] if len(order) == len(whole) else whole))
        return
    step = rows_at_once(shape[-1])
    for at in range(0, len(order), step):
        fill(*target, torch.from_numpy(file.rows(source, order[at : at + step])), at)


def sources_of(file: Container, names: Iterable[str]) -> dict[str, Source]:
    """Where a file has tensors, by their names in transformers; the gguf package knows the names."""
    arch, kind = architecture(file)
    known = _known_names(kind.names or arch, file.metadata.get(f"{arch}.block_count", 0))
    return {name: _source(file, known, name) for name in names}


@functools.lru_cache(maxsize=2)
def _known_names(arch: str, layers: int) -> TensorNameMap:
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    numbers = {name: number for number, name in MODEL_ARCH_NAMES.items()}
    return get_tensor_name_map(numbers.get(arch, numbers["llama"]), layers)  # mistral has llama's


def _source(file: Container, known: TensorNameMap, name: str) -> Source:
    for ours, theirs in _SCALES.items():
        if name.endswith(ours):
            return Source(f"{known.get_name(name.replace(ours, theirs))}.scale")
    if name.endswith(".A_log"):
        return Source(known.get_name(name) or name)
    renamed = name
    for theirs, in_file in _RENAMED.items():
        renamed = renamed.replace(theirs, in_file)
    stem, _, kind = renamed.rpartition(".")
    expert = _EXPERT.search(stem)
    found = known.get_name(_EXPERT.sub(".experts.", stem))
    if expert is not None and (found is None or f"{found}.{kind}" not in file.tensors):
        stem, _, product = stem.rpartition(".")
        joined = known.get_name(_EXPERT.sub(".experts.", f"{stem}.gate_up_proj"))
        if joined is not None and product in _GATE_UP:
            if f"{joined}.{kind}" not in file.tensors:  # apart, under names that the package does not know
                return Source(f"{joined.replace('gate_up', product[: -len('_proj')])}.{kind}", int(expert[1]))
            return Source(f"{joined}.{kind}", int(expert[1]), _GATE_UP.index(product), len(_GATE_UP))
    return Source(f"{found or stem}.{kind}", None if expert is None else int(expert[1]))


def rows_in_order(
    file: Container, name: str, shape: Sequence[int], head_dim: int, rows: Interleaved | None = None
) -> NDArray[numpy.int64]:
    """Which row of a tensor comes first, second, ... in this package; of a tensor of one dimension, which number.

    Args:
        file: The file.
        name: The tensor's name in transformers.
        shape: Its shape.
        head_dim: Elements of a head.
        rows: Which matrices it holds, if their rows are interleaved.
    """
    count = shape[0] if len(shape) > 1 or name.endswith("bias") else 1
    if rows is not None:
        return numpy.asarray(rows.order(count))
    _, kind = architecture(file)
    if kind.reordered and (".q_proj." in name or ".k_proj." in name):
        return _halves(count, head_dim)
    return numpy.arange(count)


def _halves(count: int, size: int) -> NDArray[numpy.int64]:
    """Row order that converts heads stored for rotation in neighboring pairs to rotation in halves."""
    return numpy.arange(count).reshape(-1, size // 2, 2).swapaxes(1, 2).reshape(-1)
