"""GGUF, the one-file format of llama.cpp: configuration, weights and tokenizer of a model.

``container`` reads a header, ``parts`` finds the other files of a split model, ``configuration`` says what model it
is, ``weights`` puts tensors into place, and ``tokenizer`` makes the tokenizer.
"""

from __future__ import annotations

from pathlib import Path

from snapstream.models.gguf.configuration import load_gguf_spec
from snapstream.models.gguf.container import MAGIC
from snapstream.models.gguf.parts import part_names
from snapstream.models.gguf.tokenizer import load_gguf_tokenizer
from snapstream.models.gguf.weights import fill, stored_shapes

__all__ = ["fill", "is_gguf", "load_gguf_spec", "load_gguf_tokenizer", "part_names", "stored_shapes"]


def is_gguf(checkpoint: str | Path) -> bool:
    """Whether a checkpoint is such a file, by its first bytes, or else by its name (it may be damaged)."""
    path = Path(checkpoint)
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC or path.suffix.lower() == ".gguf"
    except OSError:  # its reader says so
        return path.suffix.lower() == ".gguf"
