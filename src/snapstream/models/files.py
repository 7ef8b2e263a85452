"""Locates a checkpoint and its files; downloads only the needed files of a hub repository."""

from __future__ import annotations

import json
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from snapstream.assets import PACKAGED, SHIPPED
from snapstream.errors import CheckpointError, first_line, listing
from snapstream.models.gguf import is_gguf

_CONFIGURATION = ("config.json", "generation_config.json")
_TOKENIZER = (
    "tokenizer*",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
_HUB = "hf://"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def resolve_config(model: str) -> Path:
    """Like :func:`resolve_checkpoint`, but for a hub id, only the configuration is downloaded."""
    return _local(model) or _fetch(model, _CONFIGURATION)


def resolve_checkpoint(model: str) -> Path:
    """The directory or GGUF file of a checkpoint.

    Args:
        model: A path, the name of a shipped or packaged model, or a hub id, which is downloaded if it is not cached.

    Raises:
        CheckpointError: It is neither a directory with a ``config.json``, nor a GGUF file, nor a known name, nor a hub
            id that can be downloaded.
    """
    path = _local(model)
    if path is not None:
        return path
    fetched = _fetch(model, (*_CONFIGURATION, *_TOKENIZER, INDEX))
    # A repository may also have the same weights in other formats, which are not downloaded.
    index = fetched / INDEX
    return _fetch(model, _shards(index) if index.is_file() else (SINGLE,))


def _local(model: str) -> Path | None:
    """The path of a local checkpoint; ``None`` for a hub id.

    Raises:
        CheckpointError: It is neither.
    """
    if model.startswith(_HUB):
        return None
    path = Path(model).expanduser()
    if is_gguf(path):
        return path
    if path.is_dir():
        if not (path / "config.json").is_file():
            files = sorted(file.name for file in path.iterdir() if is_gguf(file))
            raise CheckpointError(
                f"{path} has no config.json; give the directory of a Hugging Face checkpoint, or a GGUF file itself"
                + (f": {listing([str(path / name) for name in files])}" if files else "")
            )
        return path
    if model in SHIPPED:
        return SHIPPED[model]
    if model in PACKAGED:
        return PACKAGED[model].find()
    if path.exists():
        raise CheckpointError(f"{path} is neither a directory nor a GGUF file: it does not begin with the bytes 'GGUF'")
    # A hub id looks like a relative path, but has no file suffix, and its owner is not a local directory.
    is_path = model.startswith((".", "/", "~")) or path.suffix.lower() in (".gguf", ".safetensors")
    if is_path or model.count("/") != 1 or path.parent.is_dir():
        raise CheckpointError(_not_found(model, path))
    return None


def _not_found(model: str, path: Path) -> str:
    by_name = [*SHIPPED, *PACKAGED]
    hints = []
    if not path.parent.is_dir():
        hints.append(f"there is no directory {path.parent}")
    else:
        near = get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], 3)
        names = [str(path.with_name(name)) for name in near] + get_close_matches(model, by_name, 1)
        hints += [f"did you mean {' or '.join(names)}?"] if names else []
    if model.count("/") == 1 and model[0] not in "./~":
        hints.append(f"for a model on the hub, give {_HUB}{model}")
    return (
        f"model {model!r} is neither a directory, nor a .gguf file, nor a hub id of the form owner/name, nor a model "
        f"by name ({', '.join(by_name)}){': ' if hints else ''}{'; '.join(hints)}"
    )


def _fetch(model: str, patterns: Iterable[str]) -> Path:
    """Fetch some files of a hub repository, from the local cache or the network.

    Raises:
        CheckpointError: The hub cannot be reached, or the repository is not a Transformers checkpoint.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    repository = model.removeprefix(_HUB)
    try:
        path = Path(snapshot_download(repository, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"model {model!r} is neither a local file nor a local directory, and could not be fetched from the hub: "
            f"{first_line(error)}"
        ) from error
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"the hub repository {repository} has no config.json; if it has GGUF files, download one and give its path"
        )
    return path


def read_json(path: Path) -> dict[str, Any]:
    """Read the object in a JSON file.

    Raises:
        CheckpointError: The file cannot be read, or does not contain a JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {first_line(error)}") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {first_line(error)}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return value


def weight_files(checkpoint: Path) -> list[Path]:
    """The safetensors files of a checkpoint: the shards in its index, or its single file.

    Raises:
        CheckpointError: There are no such files, or some are missing; the message names them.
    """
    index, single = checkpoint / INDEX, checkpoint / SINGLE
    if index.is_file():
        shards = _shards(index)
        missing = [name for name in shards if not (checkpoint / name).is_file()]
        if missing:
            raise CheckpointError(f"{checkpoint}: shards named in {INDEX} are missing: {listing(missing)}")
        return [checkpoint / name for name in shards]
    if single.is_file():
        return [single]
    raise CheckpointError(
        f"{checkpoint} has neither {SINGLE} nor {INDEX}; weights load from safetensors only, "
        "convert other formats with transformers' save_pretrained"
    )


def _shards(index: Path) -> list[str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise CheckpointError(f"{index} is not an index of safetensors shards: it has no weight_map")
    return sorted(set(weight_map.values()))
