"""``keydiff``: the tokens whose keys are least like the others (KeyDiff, arXiv 2504.15364)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from snapstream.compression.keys import key_differences
from snapstream.compression.policies.attention import require_kernel
from snapstream.compression.scoring import pool_votes
from snapstream.config.policy import LayerPrompt, Policy


@dataclass(frozen=True, kw_only=True)
class KeyDifferences(Policy):
    """Votes by key differences alone, without queries.

    What a later question needs is therefore as likely to be kept as what the end of the prompt attends to.

    Attributes:
        kernel: Odd width of the average along the sequence, which keeps neighbors, too; 1 disables it.
    """

    name: ClassVar[str] = "keydiff"
    pins_recent: ClassVar[bool] = True

    kernel: int = 3

    def __post_init__(self) -> None:
        """Check the width.

        Raises:
            ConfigurationError: It is invalid.
        """
        require_kernel("kernel", self.kernel)

    @property
    @override
    def queries(self) -> int:
        return 0

    @override
    def votes(self, prompt: LayerPrompt) -> Tensor:
        return key_differences(prompt.keys, prompt.layout, sink=prompt.sink)

    @override
    def smooth(self, votes: Tensor, prompt: LayerPrompt) -> Tensor:
        return pool_votes(votes, pooling="avg", kernel=self.kernel)
