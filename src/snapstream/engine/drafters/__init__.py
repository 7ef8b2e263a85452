"""Drafters for speculative decoding; one file each."""

from __future__ import annotations

from typing import Any

from snapstream.engine.drafters.base import Drafter
from snapstream.engine.drafters.draft_model import DraftModel
from snapstream.engine.drafters.lookup import PromptLookup
from snapstream.engine.drafters.next_token import NextToken
from snapstream.engine.prefill.staging import staging_length
from snapstream.engine.settings import Setup, load_tokenizer
from snapstream.errors import ConfigurationError
from snapstream.models import load_model, resolve_checkpoint

__all__ = ["DraftModel", "Drafter", "NextToken", "PromptLookup", "make_drafter"]


def make_drafter(setup: Setup, tokenizer: Any) -> Drafter | None:
    """Build the drafter of an engine.

    Args:
        setup: The engine's setup.
        tokenizer: The engine's tokenizer.

    Returns:
        The drafter; ``None`` without speculative decoding, or if the drafter is part of the model.

    Raises:
        ConfigurationError: The draft model has a different tokenizer.
        CheckpointError: The draft model's checkpoint is missing, corrupt or unsupported.
    """
    if setup.config.speculative == "lookup":
        return PromptLookup()
    small, name = setup.drafter, setup.config.draft_model
    if small is None or name is None:
        return None
    checkpoint = resolve_checkpoint(name)
    theirs = load_tokenizer(str(checkpoint)).get_vocab()
    other = [word for word, token in tokenizer.get_vocab().items() if theirs.get(word, token) != token]
    if other:
        raise ConfigurationError(
            f"draft_model {name} has a different tokenizer than the model: {len(other)} tokens have different ids, "
            f"such as {min(other)!r}; use a smaller model of the same family"
        )
    model = load_model(checkpoint, small.spec, small.types.weights, small.device)
    return DraftModel(small, model, longest=staging_length(small.max_model_len, small.chunk, continued=False))
