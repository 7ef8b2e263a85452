"""``sage-kv``: only the last token of the prompt votes (SAGE-KV, arXiv 2503.08879)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from snapstream.compression.policies.window import check_pooling, window_votes
from snapstream.compression.scoring import pool_votes
from snapstream.config.policy import LayerPrompt, Normalize, Policy, Pooling


@dataclass(frozen=True)
class LastTokenVotes(Policy):
    """Votes of one query; the settings are those of :class:`~snapstream.compression.policies.window.WindowVotes`."""

    name: ClassVar[str] = "sage-kv"

    pooling: Pooling = "avg"
    kernel: int = 7
    normalize: Normalize = "all"

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigurationError: A field that cannot work.
        """
        check_pooling(self.pooling, self.kernel, self.normalize)

    @property
    def queries(self) -> int:
        """See :attr:`Policy.queries`."""
        return 1

    def votes(self, prompt: LayerPrompt) -> Tensor:
        """See :meth:`Policy.votes`."""
        return window_votes(prompt, 1, self.normalize)

    def smooth(self, votes: Tensor, prompt: LayerPrompt) -> Tensor:
        """See :meth:`Policy.smooth`."""
        return pool_votes(votes, pooling=self.pooling, kernel=self.kernel)
