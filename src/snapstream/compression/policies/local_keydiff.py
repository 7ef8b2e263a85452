"""``local-keydiff``: the tokens whose keys are least like their neighbors'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from snapstream.compression.keys import key_differences
from snapstream.compression.policies.attention import require_kernel
from snapstream.compression.ranks import take_in_turn
from snapstream.compression.scoring import pool_votes
from snapstream.config.checks import require_integer
from snapstream.config.policy import LayerPrompt, Policy
from snapstream.errors import ConfigurationError

NEAR = 32
"""Default block size in tokens."""


def require_near(near: int) -> None:
    """Check the size of a block.

    Raises:
        ConfigurationError: It is not at least 1.
    """
    require_integer("cache budget: near", near)
    if near < 1:
        raise ConfigurationError(f"cache budget: near is {near}; a block has at least one token")


def by_itself_and_smoothed(differences: Tensor, kernel: int) -> list[Tensor]:
    """Smoothed differences, for answers that span several tokens, and raw ones, for single words that stand out."""
    return [pool_votes(differences, pooling="avg", kernel=kernel), differences]


@dataclass(frozen=True, kw_only=True)
class LocalKeyDifferences(Policy):
    """Votes by local key differences, without queries: for text that is stored before any question is known.

    Half of the pinned entries go to keys that stand out by themselves, half to keys that stand out together with their
    neighbors.

    Attributes:
        kernel: Odd width of the average along the sequence for the second half; 1 disables it.
        near: Block size in tokens; a key is compared with its own block and the two adjacent ones.
    """

    name: ClassVar[str] = "local-keydiff"
    pins_recent: ClassVar[bool] = True

    kernel: int = 5
    near: int = NEAR

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigurationError: A field has an invalid value.
        """
        require_kernel("kernel", self.kernel)
        require_near(self.near)

    @property
    @override
    def queries(self) -> int:
        return 0

    @override
    def votes(self, prompt: LayerPrompt) -> Tensor:
        return key_differences(prompt.keys, prompt.layout, sink=prompt.sink, near=self.near)

    @override
    def smooth(self, votes: Tensor, prompt: LayerPrompt) -> Tensor:
        lists = by_itself_and_smoothed(votes, self.kernel)
        return take_in_turn(lists, prompt.layout, sink=prompt.sink, most=prompt.top_k)
