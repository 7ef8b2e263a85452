"""Who guesses tokens for speculative decoding; one file each."""

from __future__ import annotations

from typing import Any

from snapstream.engine.drafters.base import Drafter
from snapstream.engine.drafters.draft_model import DraftModel
from snapstream.engine.drafters.lookup import PromptLookup
from snapstream.engine.drafters.next_token import NextToken
from snapstream.engine.prefill import staging_length
from snapstream.engine.settings import Setup, load_tokenizer
from snapstream.errors import ConfigurationError
from snapstream.models import load_model, resolve_checkpoint

__all__ = ["DraftModel", "Drafter", "NextToken", "PromptLookup", "make_drafter"]


def make_drafter(setup: Setup, tokenizer: Any) -> Drafter | None:
    """The drafter that an engine is set up with; ``None`` if there is none, or it is part of the model.

    Args:
        setup: Of the engine.
        tokenizer: The engine's.

    Raises:
        ConfigurationError: The small model has another tokenizer.
        CheckpointError: Its checkpoint is missing, corrupt or unsupported.
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
            f"draft_model {name} has another tokenizer than the model: {len(other)} words have other numbers, such as "
            f"{min(other)!r}; give a smaller model of the same family"
        )
    model = load_model(checkpoint, small.spec, small.dtype, small.device)
    padded = staging_length(small.max_model_len, small.config.prefill_chunk, continued=False)
    return DraftModel(small, model, padded=padded)
