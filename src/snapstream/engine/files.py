"""Saving and loading the compressed sequences of one engine."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

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
        of_prefixes: Whether sequences are pieces of prompts from a staging cache; they never go into a slot.
    """

    def __init__(self, setup: Setup, checkpoint: Path, *, of_prefixes: bool = False) -> None:
        self._setup, self._checkpoint, self._of_prefixes = setup, checkpoint, of_prefixes

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
        setup, described = self._setup, CompressedSequence.describe(path)
        if described.get("model") == self.model:  # otherwise, that is what is wrong
            self.check(path, described)
        entry_type = setup.types.of_prefixes if self._of_prefixes else setup.types.cache
        return CompressedSequence.load(
            path, model=self.model, groups=setup.spec.groups, entry_type=entry_type, device=setup.device
        )

    def check(self, path: str | Path, described: Mapping[str, Any]) -> None:
        """Check that a sequence fits into this engine, by the metadata of its file.

        Raises:
            CacheFileError: Its cache is larger than a slot, or it is as long as ``max_model_len``.
        """
        setup = self._setup
        if self._of_prefixes:
            return
        try:
            limit, tokens = int(described["layouts"][0]["limit"]), int(described["tokens"])
        except (LookupError, TypeError, ValueError):
            return  # loading it will tell
        if setup.spec.has_budget and limit > setup.budget.capacity:
            raise CacheFileError(
                f"{path} holds a cache of up to {limit} entries, but a slot of this engine has "
                f"{setup.budget.capacity}; create the engine with a budget of at least {limit}"
            )
        if tokens >= setup.max_model_len:
            raise CacheFileError(
                f"{path} holds a sequence of {tokens} tokens, but max_model_len is {setup.max_model_len}; raise it"
            )
