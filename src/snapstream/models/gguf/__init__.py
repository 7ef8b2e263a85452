"""GGUF, llama.cpp's single-file format for the configuration, weights and tokenizer of a model.

``container`` reads the header, ``parts`` finds the other files of a split model, ``configuration`` builds the model's
configuration, ``weights`` reads the tensors, and ``tokenizer`` builds the tokenizer.
"""

from __future__ import annotations

from pathlib import Path

from snapstream.models.gguf.configuration import load_gguf_spec
from snapstream.models.gguf.container import MAGIC
from snapstream.models.gguf.parts import part_names
from snapstream.models.gguf.tokenizer import load_gguf_tokenizer
from snapstream.models.gguf.weights import fill_model, stored_formats, stored_shapes, widened_types

__all__ = [
    "fill_model",
    "is_gguf",
    "load_gguf_spec",
    "load_gguf_tokenizer",
    "part_names",
    "stored_formats",
    "stored_shapes",
    "widened_types",
]


def is_gguf(checkpoint: str | Path) -> bool:
    """Whether a checkpoint is a GGUF file, by its first bytes or, as it may be damaged, by its suffix."""
    path = Path(checkpoint)
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC or path.suffix.lower() == ".gguf"
    except OSError:  # reading the file later reports the error
        return path.suffix.lower() == ".gguf"
