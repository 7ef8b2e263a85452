"""Compressed sequences of one engine in files."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

from snapstream.cache import CompressedSequence
from snapstream.engine.settings import Setup
from snapstream.errors import CacheFileError
from snapstream.models.fingerprint import fingerprint


class SequenceFiles:
    """Saves and loads sequences; may be called from any thread.

    Args:
        setup: The engine.
        checkpoint: Its model's directory.
    """

    def __init__(self, setup: Setup, checkpoint: Path) -> None:
        self._setup, self._checkpoint = setup, checkpoint

    @functools.cached_property
    def model(self) -> str:
        """Tells models and tokenizers apart, see :func:`~snapstream.models.fingerprint.fingerprint`."""
        return fingerprint(self._checkpoint)

    def save(self, sequence: CompressedSequence, path: str | Path, *, note: str = "") -> None:
        """Write a compressed sequence, the ``saved`` of an output, to a file.

        Args:
            sequence: Of this engine.
            path: Replaced in one step if it is there.
            note: Kept with it.

        Raises:
            CacheFileError: It could not be written.
        """
        replace(sequence, note=note).save(path, model=self.model)

    def load(self, path: str | Path) -> CompressedSequence:
        """Read a compressed sequence, to be given to ``add_request`` as ``past``.

        Raises:
            CacheFileError: No such file, a damaged one, one of another model, or with a larger cache than a slot has.
        """
        setup = self._setup
        sequence = CompressedSequence.load(
            path,
            model=self.model,
            shape=setup.spec.entry,
            layers=setup.spec.cached_layers,
            dtype=setup.dtype,
            device=setup.device,
        )
        if sequence.layout.limit > setup.budget.capacity:
            raise CacheFileError(
                f"{path} holds a cache of up to {sequence.layout.limit} entries, a slot of this engine "
                f"{setup.budget.capacity}; make the engine with a budget of at least that"
            )
        if len(sequence.tokens) >= setup.max_model_len:
            raise CacheFileError(
                f"{path} goes on after {len(sequence.tokens)} tokens; max_model_len is {setup.max_model_len}, raise it"
            )
        return sequence
