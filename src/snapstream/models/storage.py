"""How weights are stored: which keep the format of their checkpoint, and what each tensor of it fills."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import groupby

import torch
from torch import Tensor, nn

from snapstream.kernels import cpu
from snapstream.kernels.cpu.blocks import pack
from snapstream.kernels.formats import FORMATS, LANES, Format
from snapstream.kernels.quantizing import quantize
from snapstream.models.attention import GroupedAttention
from snapstream.models.decoder import DecoderModel
from snapstream.models.experts import Router
from snapstream.models.families import tensor_places
from snapstream.models.layer_inputs import LAYER_PROJECTION
from snapstream.models.layers import FixedNorm, Matrix, RMSNorm
from snapstream.models.names import Place
from snapstream.models.recurrent import GatedDeltaNet
from snapstream.models.rope import Rotation
from snapstream.models.spec import ModelSpec, StoredRows

logger = logging.getLogger(__name__)

_IN_EIGHT_BITS = (
    "embed_tokens.weight",
    "embed_tokens_per_layer.weight",
    "lm_head.weight",
    "shared_expert_gate.weight",
    *(f"in_proj_{part}.weight" for part in ("a", "b", "ba")),
)


def with_formats(spec: ModelSpec, formats: Mapping[str, Format]) -> ModelSpec:
    """The same model with weights in blocks.

    A weight can consist of several tensors: rows of queries, keys and values, for example. Each keeps its own format.
    Kernels take sixteen rows at once, so if one of them begins elsewhere, the whole weight is a tensor of numbers.

    Args:
        spec: The model.
        formats: Formats of tensors, by their names in :func:`~snapstream.models.families.tensor_places`; other tensors
            become numbers.
    """
    places = tensor_places(spec)
    model = empty_model(replace(spec, stored_as={}), torch.float32)
    matrices = {name for name, module in model.named_modules() if isinstance(module, Matrix)}
    filled: dict[str, list[tuple[int, StoredRows]]] = {}
    for name, place in places.items():
        if place.parameter in matrices and not place.expert:  # all experts have the format of the first
            run = StoredRows(place.shape[0], formats.get(name))
            filled.setdefault(place.parameter, []).append((place.start, run))
    stored_as, unfit = {}, []
    for name, runs in filled.items():
        runs.sort(key=lambda each: each[0])
        if not any(run.format for _, run in runs):
            continue
        is_cut = name == LAYER_PROJECTION and spec.layer_inputs is not None and spec.layer_inputs.size % LANES
        if is_cut or any(start % LANES for start, _ in runs):
            unfit.append(name)
        else:
            each_format = groupby((run for _, run in runs), lambda run: run.format)
            stored_as[name] = tuple(StoredRows(sum(run.count for run in same), kind) for kind, same in each_format)
    if unfit:
        logger.warning(
            "%d weights are not kept in blocks (%s): tensors need multiples of %d rows.", len(unfit), unfit[0], LANES
        )
    return replace(spec, stored_as=stored_as)


def empty_model(spec: ModelSpec, dtype: torch.dtype) -> DecoderModel:
    """Create the model on the meta device, without memory for its weights; ``dtype`` is that of all numbers."""
    with torch.device("meta"):
        model = DecoderModel(spec).to(dtype)
    for name, runs in spec.stored_as.items():
        matrix = model.get_submodule(name)
        assert isinstance(matrix, Matrix)
        matrix.store_as(runs)
    for module in model.modules():
        if isinstance(module, Rotation | FixedNorm):
            module.compute(torch.device("meta"))  # float32, whatever the dtype
        # The selection of experts depends on small differences.
        if isinstance(module, Router) and module.correction is not None:
            module.correction = nn.Parameter(module.correction.float())
        if isinstance(module, Router) and module.factors is not None:
            module.factors = nn.Parameter(module.factors.float())
        if isinstance(module, GroupedAttention) and module.sinks is not None:
            module.sinks = nn.Parameter(module.sinks.float())
        if isinstance(module, GatedDeltaNet):
            wide = torch.promote_types(dtype, torch.float32)
            module.rates, module.shifts = (nn.Parameter(each.to(wide)) for each in (module.rates, module.shifts))
        if isinstance(module, RMSNorm) and module.wide and not isinstance(module, FixedNorm):
            module.weight = nn.Parameter(module.weight.to(torch.promote_types(dtype, torch.float32)))
    return model


def parameter_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of a model's weights, without loading it."""
    return sum(parameter.nbytes for parameter in empty_model(spec, dtype).parameters())


def target_of(model: DecoderModel, place: Place) -> tuple[Tensor, Format | None]:
    """What a tensor of a checkpoint fills: a view of numbers in the tensor's shape, or tiles of a format."""
    owner, _, name = place.parameter.rpartition(".")
    held: Matrix | Tensor = getattr(model.get_submodule(owner), name)
    run, whole, row = held.run_at(place.start) if isinstance(held, Matrix) else (None, held, place.start)
    whole = whole if place.expert is None else whole[place.expert]
    if run is not None and run.format is not None:
        return whole[row // LANES : -(-(row + place.shape[0]) // LANES)], run.format
    whole = whole.flatten(0, -2) if whole.dim() > 2 else whole
    return whole[row : row + place.shape[0]], None


def quantized_formats(places: Mapping[str, Place], kind: Format) -> dict[str, Format]:
    """The format of each tensor if matrices are quantized to ``kind`` as far as possible.

    The embedding and the output product get 8 bits, as do rows that do not consist of whole blocks of ``kind``, and the
    few rows that decide a single number per token or head.
    """
    eight, formats = FORMATS["q8_0"], {}
    for name, place in places.items():
        wanted = eight if name.endswith(_IN_EIGHT_BITS) else kind
        fitting = (each for each in (wanted, eight) if place.shape[-1] % each.columns == 0)
        chosen = next(fitting, None)
        if chosen is not None:
            formats[name] = chosen
    return formats


def fill(target: Tensor, kind: Format | None, numbers: Tensor, at: int = 0) -> None:
    """Write rows to what :func:`target_of` returned, from row ``at`` on, a multiple of 16."""
    if kind is None:
        target[at : at + len(numbers)] = numbers
        return
    step = rows_at_once(numbers.shape[1])
    for first in range(0, len(numbers), step):
        rows = quantize(kind, numbers[first : first + step])
        tile = (at + first) // LANES
        fill_tiles(target[tile : tile + -(-len(rows) // LANES)], kind, rows)


def fill_tiles(tiles: Tensor, kind: Format, rows: Tensor, order: Tensor | None = None) -> None:
    """Bring rows into tiles on any device; see :func:`snapstream.kernels.cpu.blocks.pack`."""
    on_host = tiles if tiles.device.type == "cpu" else torch.empty(tiles.shape, dtype=tiles.dtype)
    if cpu.available():
        pack(kind, rows, on_host, order)
    else:
        on_host = kind.pack(rows if order is None else rows[order])
    if on_host is not tiles:
        tiles.copy_(on_host)


def rows_at_once(columns: int) -> int:
    """How many rows are held as float32 at once, a multiple of 16."""
    return max(1, 2**24 // (columns * LANES)) * LANES


def formats_in_use(spec: ModelSpec) -> Iterator[str]:
    """Names of the formats of blocks that a model has, each once."""
    yield from dict.fromkeys(run.format.name for runs in spec.stored_as.values() for run in runs if run.format)
