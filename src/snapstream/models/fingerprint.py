"""A fingerprint that identifies a checkpoint."""

from __future__ import annotations

import hashlib
from pathlib import Path

from snapstream.models.gguf import part_names


def fingerprint(checkpoint: Path) -> str:
    """A SHA-256 that distinguishes checkpoints without reading them completely.

    It covers the configuration, tokenizer and chat template in full. For weight files it covers names, sizes and
    samples: the first MiB, which names the tensors, and 64 evenly spaced blocks of 64 KiB. For a ``.gguf`` file the
    first 32 MiB are read instead of one, because they hold everything except the weights; a split model is sampled in
    all its parts.
    """
    digest = hashlib.sha256()
    if checkpoint.is_file():
        for part in part_names(checkpoint):
            if part.is_file():  # a whole model may have the name of a part
                _sample(digest, part, 1 << 25)
        return digest.hexdigest()
    for path in sorted(path for pattern in ("*.json", "*.jinja", "*.model") for path in checkpoint.glob(pattern)):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode() + path.read_bytes())
    for path in sorted(checkpoint.glob("*.safetensors")):
        digest.update(path.name.encode())
        _sample(digest, path, 1 << 20)
    return digest.hexdigest()


def _sample(digest: hashlib._Hash, path: Path, head: int) -> None:
    size = path.stat().st_size
    digest.update(f" {size}\n".encode())
    with path.open("rb") as file:
        digest.update(file.read(head))
        for block in range(64):
            file.seek(max(0, size - (1 << 16)) * block // 63)  # the last one ends with the file
            digest.update(file.read(1 << 16))
