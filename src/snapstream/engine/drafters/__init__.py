"""Who guesses tokens for speculative decoding; one file each."""

from snapstream.engine.drafters.base import Drafter
from snapstream.engine.drafters.lookup import PromptLookup

__all__ = ["Drafter", "PromptLookup"]
