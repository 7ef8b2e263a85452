"""Saving and loading the compressed sequences of one engine."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from snapstream.cache import CompressedSequence
from snapstream.config.engine import QUANTIZED
from snapstream.engine.settings import Setup
from snapstream.errors import CacheFileError
from snapstream.models.fingerprint import fingerprint
from snapstream.models.rope import chosen_frequencies


class SequenceFiles:
    """Saves and loads sequences; may be called from any thread.

    Args:
        setup: The engine's setup.
        checkpoint: Directory of its model.
    """

    def __init__(self, setup: Setup, checkpoint: Path) -> None:
        self._setup, self._checkpoint = setup, checkpoint

    @functools.cached_property
    def model(self) -> str:
        """Fingerprint of model and tokenizer, and what settings change: formats of weights, LongRoPE's frequencies.

        See :func:`~snapstream.models.fingerprint.fingerprint`.
        """
        weights, spec = self._setup.config.weights, self._setup.spec
        named = (weights if weights in QUANTIZED else "", chosen_frequencies(spec.source, spec.longest))
        return "-".join((fingerprint(self._checkpoint), *filter(None, named)))

    def save(self, sequence: CompressedSequence, path: str | Path, *, note: str = "") -> None:
        """Write a compressed sequence, the ``saved`` of an output, to a file.

        Args:
            sequence: A sequence of this engine.
            path: File to write; an existing file is replaced atomically.
            note: Text to store in the file.

        Raises:
            CacheFileError: The file could not be written.
        """
        replace(sequence, note=note).save(path, model=self.model)

    def load(self, path: str | Path) -> CompressedSequence:
        """Read a compressed sequence, for ``add_request(past=...)``.

        Raises:
            CacheFileError: The file is missing, damaged or of another model, or its cache is larger than a slot, or its
                sequence as long as ``max_model_len``.
        """
        setup = self._setup
        sequence = CompressedSequence.load(
            path,
            model=self.model,
            groups=setup.spec.groups,
            dtype=setup.types.cache,
            device=setup.device,
        )
        if sequence.limit > setup.budget.capacity:
            raise CacheFileError(
                f"{path} holds a cache of up to {sequence.limit} entries, but a slot of this engine has "
                f"{setup.budget.capacity}; create the engine with a budget of at least {sequence.limit}"
            )
        if len(sequence.tokens) >= setup.max_model_len:
            raise CacheFileError(
                f"{path} holds a sequence of {len(sequence.tokens)} tokens, but max_model_len is "
                f"{setup.max_model_len}; raise it"
            )
        return sequence
