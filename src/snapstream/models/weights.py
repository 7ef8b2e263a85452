"""Hugging Face checkpoints into our modules: checked first, then read straight into place."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from snapstream.errors import CheckpointError
from snapstream.kernels.cpu import rows_for_skinny_linear
from snapstream.models.llama import Linear, LlamaModel
from snapstream.models.rope import rope_frequencies
from snapstream.models.spec import ModelSpec, end_tokens

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


@dataclass(frozen=True)
class _Place:
    """Where one tensor of a checkpoint goes: rows ``start ..`` of a parameter."""

    parameter: str
    start: int
    shape: tuple[int, ...]


def resolve_config(model: str) -> Path:
    """Like :func:`resolve_checkpoint`, but of a hub id only the configuration is downloaded."""
    return _resolve(model, ["*.json"])


def resolve_checkpoint(model: str) -> Path:
    """Directory of a checkpoint: ``model`` itself, or the local copy of a hub id, downloaded if need be.

    Raises:
        CheckpointError: Neither a directory with a ``config.json`` nor a hub id that can be reached.
    """
    return _resolve(model, ["*.json", "*.safetensors", "*.jinja", "tokenizer*"])


def _resolve(model: str, patterns: list[str]) -> Path:
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise CheckpointError(f"{path} has no config.json; give the directory of a Hugging Face checkpoint")
        return path
    if path.exists() or model.startswith((".", "/", "~")) or model.count("/") != 1:
        raise CheckpointError(f"model {model!r} is neither a directory nor a hub id of the form owner/name")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(f"model {model!r} could not be fetched from the hub: {first_line(error)}") from error


def load_spec(checkpoint: Path) -> ModelSpec:
    """Read the configuration of a checkpoint.

    Raises:
        CheckpointError: Unreadable or unsupported.
    """
    from transformers import AutoConfig

    path = checkpoint / "config.json"
    raw = _read_json(path)
    names = raw.get("architectures") or [raw.get("model_type", "unknown")]
    try:
        return ModelSpec.from_config(AutoConfig.from_pretrained(checkpoint), _generation_ends(checkpoint))
    except CheckpointError:
        raise
    except Exception as error:  # transformers validates with exceptions of many kinds
        raise CheckpointError(f"{path} ({', '.join(map(str, names))}): {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def load_model(checkpoint: Path, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> LlamaModel:
    """Build the model and read its weights, one tensor at a time, into place.

    Names and shapes of all tensors are checked before the first one is read, so a bad checkpoint never loads halfway,
    and there is never a second copy of the weights in memory.

    Raises:
        CheckpointError: Missing, unexpected or misshaped tensors (named), or an unreadable file.
    """
    from safetensors import SafetensorError, safe_open

    places = _places(spec)
    files = _weight_files(checkpoint)
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        for file in files:
            with safe_open(file, framework="pt", device="cpu") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (not a mapping)
                    shapes[name] = tuple(tensors.get_slice(name).get_shape())
        _check(checkpoint, spec, places, shapes)
        with torch.device("meta"):
            model = LlamaModel(spec)
        model = model.to(dtype).to_empty(device=device)
        if spec.tied_embeddings:
            model.head.weight = model.embedding.weight
        # Frequencies are computed, not loaded, and stay float32 whatever the weights are.
        model.frequencies = rope_frequencies(spec.source)[0].to(device)
        parameters: dict[str, Tensor] = dict(model.named_parameters())
        for file in files:
            with safe_open(file, framework="pt", device="cpu") as tensors, torch.no_grad():
                for name in tensors.keys():  # noqa: SIM118
                    place = places.get(name)
                    if place is not None:
                        target = parameters[place.parameter]
                        target[place.start : place.start + place.shape[0]].copy_(tensors.get_tensor(name))
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{checkpoint}: weights could not be read: {first_line(error)}") from error
    for module in model.modules():
        if isinstance(module, Linear):
            module.skinny_rows = rows_for_skinny_linear(module.weight)
    return model.requires_grad_(False).eval()


def parameter_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of a model's weights, without loading it."""
    with torch.device("meta"):
        model = LlamaModel(spec)
    return sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize


def _generation_ends(checkpoint: Path) -> tuple[int, ...]:
    """End tokens of generation_config.json: chat models end a turn with other tokens than config.json names."""
    path = checkpoint / "generation_config.json"
    if not path.is_file():
        return ()
    return end_tokens(_read_json(path).get("eos_token_id"))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is not valid JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def _weight_files(checkpoint: Path) -> list[Path]:
    index, single = checkpoint / _INDEX, checkpoint / _SINGLE
    if index.is_file():
        weight_map = _read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index} is not an index of safetensors shards: it has no weight_map")
        shards = sorted(set(weight_map.values()))
        missing = [name for name in shards if not (checkpoint / name).is_file()]
        if missing:
            raise CheckpointError(f"{checkpoint}: shards named in {_INDEX} are missing: {_listing(missing)}")
        return [checkpoint / name for name in shards]
    if single.is_file():
        return [single]
    raise CheckpointError(
        f"{checkpoint} has neither {_SINGLE} nor {_INDEX}; weights load from safetensors only, "
        "convert others with transformers' save_pretrained"
    )


def _places(spec: ModelSpec) -> dict[str, _Place]:
    """Every tensor a checkpoint of this model must have, and where it goes."""
    places: dict[str, _Place] = {}

    def add(source: str, parameter: str, rows: int, columns: int | None = None, start: int = 0) -> None:
        places[source] = _Place(parameter, start, (rows,) if columns is None else (rows, columns))

    def add_linear(source: str, target: str, rows: int, columns: int, bias: bool, start: int = 0) -> None:
        add(f"{source}.weight", f"{target}.weight", rows, columns, start)
        if bias:
            add(f"{source}.bias", f"{target}.bias", rows, None, start)

    hidden, inner, head_dim = spec.hidden_size, spec.intermediate_size, spec.head_dim
    queries, keys = spec.heads * head_dim, spec.kv_heads * head_dim
    add("model.embed_tokens.weight", "embedding.weight", spec.vocab_size, hidden)
    add("model.norm.weight", "norm.weight", hidden)
    if not spec.tied_embeddings:
        add("lm_head.weight", "head.weight", spec.vocab_size, hidden)
    for layer in range(spec.layers):
        source, target = f"model.layers.{layer}", f"blocks.{layer}"
        add(f"{source}.input_layernorm.weight", f"{target}.attention_norm.weight", hidden)
        add(f"{source}.post_attention_layernorm.weight", f"{target}.feed_forward_norm.weight", hidden)
        attention, qkv = f"{source}.self_attn", f"{target}.attention.qkv"
        add_linear(f"{attention}.q_proj", qkv, queries, hidden, spec.qkv_bias)
        add_linear(f"{attention}.k_proj", qkv, keys, hidden, spec.qkv_bias, queries)
        add_linear(f"{attention}.v_proj", qkv, keys, hidden, spec.qkv_bias, queries + keys)
        add_linear(f"{attention}.o_proj", f"{target}.attention.output", hidden, queries, spec.output_bias)
        if spec.qk_norm:
            add(f"{attention}.q_norm.weight", f"{target}.attention.query_norm.weight", head_dim)
            add(f"{attention}.k_norm.weight", f"{target}.attention.key_norm.weight", head_dim)
        gate_up = f"{target}.feed_forward.gate_up"
        add_linear(f"{source}.mlp.gate_proj", gate_up, inner, hidden, spec.mlp_bias)
        add_linear(f"{source}.mlp.up_proj", gate_up, inner, hidden, spec.mlp_bias, inner)
        add_linear(f"{source}.mlp.down_proj", f"{target}.feed_forward.down", hidden, inner, spec.mlp_bias)
    return places


def _check(checkpoint: Path, spec: ModelSpec, places: dict[str, _Place], shapes: dict[str, tuple[int, ...]]) -> None:
    missing = sorted(set(places) - set(shapes))
    # Old checkpoints carry RoPE frequencies; tied ones may carry the output projection a second time.
    extra = sorted(
        name
        for name in set(shapes) - set(places)
        if not name.endswith("rotary_emb.inv_freq") and not (spec.tied_embeddings and name == "lm_head.weight")
    )
    misshaped = [
        f"{name} is {list(shapes[name])}, expected {list(place.shape)}"
        for name, place in places.items()
        if name in shapes and shapes[name] != place.shape
    ]
    problems = [
        f"{what}: {_listing(names)}"
        for what, names in (("missing", missing), ("unexpected", extra), ("of the wrong shape", misshaped))
        if names
    ]
    if problems:
        raise CheckpointError(
            f"{checkpoint}: the tensors do not match config.json ({spec.architecture}): {'; '.join(problems)}"
        )


def _listing(names: Iterable[str], most: int = 5) -> str:
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
