"""``keydiff``: the tokens whose keys are least like the others (KeyDiff, arXiv 2504.15364)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from snapstream.compression.keys import key_differences
from snapstream.compression.policies.attention import require_kernel
from snapstream.compression.scoring import pool_votes
from snapstream.config.policy import LayerPrompt, Policy


@dataclass(frozen=True, kw_only=True)
class KeyDifferences(Policy):
    """No query is asked, so what a later question needs is as likely to be kept as what the prompt's end looks at.

    Attributes:
        kernel: Odd width of the average along the sequence, so that neighbours are kept; 1 switches it off.
    """

    name: ClassVar[str] = "keydiff"
    pins_recent: ClassVar[bool] = True

    kernel: int = 3

    def __post_init__(self) -> None:
        """Check the width.

        Raises:
            ConfigurationError: It cannot work.
        """
        require_kernel("kernel", self.kernel)

    @property
    def queries(self) -> int:
        """See :attr:`Policy.queries`."""
        return 0

    def votes(self, prompt: LayerPrompt) -> Tensor:
        """See :meth:`Policy.votes`."""
        return key_differences(prompt.keys, prompt.layout, sink=prompt.sink)

    def smooth(self, votes: Tensor, prompt: LayerPrompt) -> Tensor:
        """See :meth:`Policy.smooth`."""
        return pool_votes(votes, pooling="avg", kernel=self.kernel)
