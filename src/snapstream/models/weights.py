"""Loads Hugging Face checkpoints: checks them first, then reads each tensor directly into its parameter."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snapstream.errors import CheckpointError, ConfigurationError, first_line, listing
from snapstream.kernels.formats import FORMATS
from snapstream.models import gguf
from snapstream.models.decoder import DecoderModel
from snapstream.models.families import family_of, read_spec, tensor_places
from snapstream.models.files import read_json, weight_files
from snapstream.models.gguf import is_gguf, load_gguf_spec
from snapstream.models.joined import BLOCKS, SCALES, expert_parts, holds_experts
from snapstream.models.layers import FixedNorm
from snapstream.models.names import Place, may_be_ignored, name_within, scale_of
from snapstream.models.progress import with_progress
from snapstream.models.rope import Rotation
from snapstream.models.spec import ModelSpec, end_tokens
from snapstream.models.storage import empty_model, fill, quantized_formats, target_of, with_formats
from snapstream.pages import tensors_of_zeros

logger = logging.getLogger(__name__)


def load_spec(checkpoint: Path) -> ModelSpec:
    """Read the configuration of a checkpoint.

    Raises:
        CheckpointError: The checkpoint cannot be read, or is not supported.
    """
    if is_gguf(checkpoint):
        spec = load_gguf_spec(checkpoint)
        # Check now: the modules are created on the meta device, in these sizes, before weights are loaded.
        places = tensor_places(spec)
        _check(checkpoint, spec, places, gguf.stored_shapes(checkpoint, places), set())
        return spec
    from transformers import AutoConfig

    path = checkpoint / "config.json"
    raw = read_json(path)
    names = raw.get("architectures") or [raw.get("model_type", "unknown")]
    try:
        return read_spec(AutoConfig.from_pretrained(checkpoint, trust_remote_code=False), _generation_ends(checkpoint))
    except CheckpointError:
        raise
    except Exception as error:  # transformers validates with exceptions of many kinds
        raise CheckpointError(f"{path} ({', '.join(map(str, names))}): {first_line(error)}") from error


def load_model(checkpoint: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> DecoderModel:
    """Create the model and read its weights in place, one tensor at a time.

    Names and shapes of all tensors are checked before the first one is read, so an invalid checkpoint is never loaded
    partially. There is never a second copy of the weights in memory. Float8 weights with a scale per block are
    converted to ``dtype``.

    Raises:
        CheckpointError: Tensors are missing, unexpected or of the wrong shape, or a file cannot be read; the message
            names them.
        MemoryError: There is not enough memory for the weights.
    """
    from safetensors import SafetensorError

    if device.type == "cuda" and spec.has_dense_experts and dtype != torch.bfloat16:
        raise CheckpointError(f"mixtures of experts run in bfloat16 on CUDA, not in {dtype}; give dtype='bfloat16'")
    places = tensor_places(spec)
    if is_gguf(checkpoint):
        return _load_gguf(checkpoint, spec, places, dtype, device)
    files = weight_files(checkpoint)
    try:
        shapes: dict[str, tuple[int, ...]] = {}
        quantised: set[str] = set()
        for name, stored in _each_tensor(files, spec):
            shapes[name] = stored.shape
            if stored.is_float8:
                quantised.add(name)
        _check(checkpoint, spec, places, shapes, quantised)
        # Scales may be in other shards than their weights.
        wanted = {scale_of(name) for name in quantised}
        sources = _each_tensor(files, spec) if wanted else ()
        scales = {name: stored.read() for name, stored in sources if name in wanted}
        model = allocate_model(spec, dtype, device)
        with torch.no_grad():
            for name, stored in with_progress(_each_tensor(files, spec), len(shapes)):
                place = places.get(name)
                if place is not None:
                    tensor = stored.read()
                    if name in quantised:
                        tensor = dequantise(tensor, scales[scale_of(name)], spec.weight_block)
                    fill(*target_of(model, place), place.read(tensor))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{checkpoint}: weights could not be read: {first_line(error)}") from error
    return model


def _load_gguf(
    path: Path, spec: ModelSpec, places: dict[str, Place], dtype: torch.dtype, device: torch.device
) -> DecoderModel:
    """Like :func:`load_model`, from a GGUF file."""
    _check(path, spec, places, gguf.stored_shapes(path, places), set())
    model = allocate_model(spec, dtype, device)
    with torch.no_grad():
        gguf.fill_model(path, model, places)
    return model


def is_quantized(checkpoint: Path) -> bool:
    """Whether a checkpoint has weights in blocks that products read."""
    return is_gguf(checkpoint) and bool(gguf.stored_formats(checkpoint, tensor_places(load_spec(checkpoint))))


def with_chosen_formats(checkpoint: Path, spec: ModelSpec, weights: str) -> ModelSpec:
    """The same model with weights in the formats that the user wants.

    Args:
        checkpoint: The file, or for others than GGUF anything.
        spec: The model.
        weights: As in :class:`~snapstream.config.EngineConfig`.

    Raises:
        ConfigurationError: The weights are in blocks already, and cannot be quantized again.
    """
    if weights == "dense":
        return spec
    places = tensor_places(spec)
    stored = gguf.stored_formats(checkpoint, places) if is_gguf(checkpoint) else {}
    if weights == "auto":
        widened = gguf.widened_types(checkpoint, places) if is_gguf(checkpoint) else ()
        if widened:
            names = ", ".join(sorted(widened))
            logger.warning("Tensors of %s that are stored as %s are widened when they are loaded.", checkpoint, names)
        return with_formats(spec, stored) if stored else spec
    if stored:
        names = ", ".join(sorted({kind.name for kind in stored.values()}))
        raise ConfigurationError(
            f"weights is {weights!r}, but {checkpoint} is quantized already ({names}); give weights='auto' to use it "
            "as it is, or 'dense' to widen it"
        )
    return with_formats(spec, quantized_formats(places, FORMATS[weights]))


def dequantise(weight: Tensor, scale: Tensor, block: tuple[int, int] | None) -> Tensor:
    """Multiply every block of a float8 weight by its scale (DeepSeek-V3, arXiv 2412.19437, section 3.3).

    Args:
        weight: float8 ``[rows, columns]``.
        scale: float32 ``[ceil(rows / block[0]), ceil(columns / block[1])]``, or a single number.
        block: Rows and columns of a block; blocks at the edges may be smaller. ``None``: the weight is one.

    Returns:
        float32 ``[rows, columns]``.
    """
    if block is None:
        return weight.float() * scale.float()
    rows, columns = weight.shape
    each = scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return weight.float() * each


def allocate_model(spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> DecoderModel:
    """Create a model whose weights are allocated but not yet loaded."""
    model = _materialise(empty_model(spec, dtype), device)
    for module in model.modules():
        if isinstance(module, Rotation | FixedNorm):
            module.compute(device)
    return model.requires_grad_(False).eval()


def _materialise(model: DecoderModel, device: torch.device) -> DecoderModel:
    """Allocate memory for the weights; on a CPU, all of them in one block."""
    if device.type != "cpu":
        return model.to_empty(device=device)
    names, parameters = zip(*model.named_parameters(), strict=True)
    memory = tensors_of_zeros((tuple(parameter.shape), parameter.dtype) for parameter in parameters)
    model.load_state_dict(dict(zip(names, memory, strict=True)), strict=False, assign=True)  # tied ones have one name
    return model


@dataclass(frozen=True)
class _Stored:
    """A tensor in an open file."""

    shape: tuple[int, ...]
    is_float8: bool
    read: Callable[[], Tensor]


def _each_tensor(files: Sequence[Path], spec: ModelSpec) -> Iterator[tuple[str, _Stored]]:
    """Yield the names of all tensors of the model, and how to read them; of joined experts, one by one."""
    from safetensors import safe_open

    joined = family_of(spec.architecture).joined_experts
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            names = tensors.keys()
            for stored in names:
                name = name_within(stored) if spec.wrapped else stored
                if name is None or (joined and name.endswith(SCALES) and holds_experts(name.removesuffix(SCALES))):
                    continue
                part = tensors.get_slice(stored)
                if joined is None or not holds_experts(name):
                    read = functools.partial(tensors.get_tensor, stored)
                    yield name, _Stored(tuple(part.get_shape()), part.get_dtype() == "F8_E4M3", read)
                    continue
                wanted = stored.removesuffix(BLOCKS) + SCALES
                scales = functools.partial(_slice_of, tensors if wanted in names else None, files, wanted)
                for each in expert_parts(joined, name, part, scales):
                    yield each.name, _Stored(each.shape, False, each.read)


def _slice_of(tensors: Any, files: Sequence[Path], name: str) -> Any:
    """The slice of a tensor in an open file, or in whichever file has it.

    Raises:
        CheckpointError: None has it.
    """
    from safetensors import safe_open

    if tensors is not None:
        return tensors.get_slice(name)
    for file in files:
        with safe_open(file, framework="pt", device="cpu") as others:
            if name in others.keys():  # noqa: SIM118 (not a mapping)
                return others.get_tensor(name)
    raise CheckpointError(f"{files[0].parent}: the tensor {name} is missing")


def _generation_ends(checkpoint: Path) -> tuple[int, ...]:
    """End tokens from generation_config.json: chat models end a turn with tokens that config.json does not name."""
    path = checkpoint / "generation_config.json"
    if not path.is_file():
        return ()
    return end_tokens(read_json(path).get("eos_token_id"))


def _check(
    checkpoint: Path,
    spec: ModelSpec,
    places: dict[str, Place],
    shapes: dict[str, tuple[int, ...]],
    quantised: set[str],
) -> None:
    expected = {name: place.shape for name, place in places.items()}
    for name in quantised & set(places):
        shape, scale = places[name].shape, scale_of(name)
        if spec.weight_block is None:
            expected[scale] = (1,) if shapes.get(scale) == (1,) else ()
        else:
            rows, columns = spec.weight_block
            expected[scale] = (-(-shape[0] // rows), -(-shape[-1] // columns))
    missing = sorted(set(expected) - set(shapes))
    extra = sorted(name for name in set(shapes) - set(expected) if not may_be_ignored(name, spec))
    misshaped = [
        f"{name} is {list(shapes[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if name in shapes and shapes[name] != shape
    ]
    problems = [
        f"{what}: {listing(names)}"
        for what, names in (("missing", missing), ("unexpected", extra), ("of the wrong shape", misshaped))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{checkpoint}: the tensors do not match the configuration ({spec.architecture}): {'; '.join(problems)}"
        )
