"""GGUF, the one-file format of llama.cpp: configuration, weights and tokenizer of a model.

``container`` reads what is in a file, ``configuration`` says what model it is, ``weights`` puts tensors into place, and
``tokenizer`` makes the tokenizer.
"""

from __future__ import annotations

from pathlib import Path

from snapstream.models.gguf.configuration import load_gguf_spec
from snapstream.models.gguf.tokenizer import load_gguf_tokenizer
from snapstream.models.gguf.weights import fill, stored_shapes

__all__ = ["fill", "is_gguf", "load_gguf_spec", "load_gguf_tokenizer", "stored_shapes"]


def is_gguf(checkpoint: str | Path) -> bool:
    """Whether a checkpoint is such a file, by its name."""
    path = Path(checkpoint)
    return path.suffix == ".gguf" and path.is_file()
