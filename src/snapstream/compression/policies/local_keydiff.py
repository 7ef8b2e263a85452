"""``local-keydiff``: the tokens whose keys are least like their neighbours'."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from snapstream.compression.keys import key_differences
from snapstream.compression.policies.attention import require_kernel
from snapstream.compression.ranks import take_in_turn
from snapstream.compression.scoring import pool_votes
from snapstream.config.checks import require_integer
from snapstream.config.policy import LayerPrompt, Policy
from snapstream.errors import ConfigurationError

NEAR = 32
"""Tokens of a block."""


def require_near(near: int) -> None:
    """Check the size of a block.

    Raises:
        ConfigurationError: Not at least 1.
    """
    require_integer("cache budget: near", near)
    if near < 1:
        raise ConfigurationError(f"cache budget: near is {near}; a block has at least one token")


def by_itself_and_smoothed(differences: Tensor, kernel: int) -> list[Tensor]:
    """Lists for answers of several tokens, whose neighbours must come along, and for words that stand out alone."""
    return [pool_votes(differences, pooling="avg", kernel=kernel), differences]


@dataclass(frozen=True, kw_only=True)
class LocalKeyDifferences(Policy):
    """No query is asked: for a text that is stored before anybody knows a question.

    Half of the places go to keys that stand out by themselves, half to those that do so with their neighbours.

    Attributes:
        kernel: Odd width of the average along the sequence for the second half; 1 switches it off.
        near: Tokens of a block; a key is compared with those of its own and of the ones beside it.
    """

    name: ClassVar[str] = "local-keydiff"
    pins_recent: ClassVar[bool] = True

    kernel: int = 5
    near: int = NEAR

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigurationError: A field that cannot work.
        """
        require_kernel("kernel", self.kernel)
        require_near(self.near)

    @property
    def queries(self) -> int:
        """See :attr:`Policy.queries`."""
        return 0

    def votes(self, prompt: LayerPrompt) -> Tensor:
        """See :meth:`Policy.votes`."""
        return key_differences(prompt.keys, prompt.layout, sink=prompt.sink, near=self.near)

    def smooth(self, votes: Tensor, prompt: LayerPrompt) -> Tensor:
        """See :meth:`Policy.smooth`."""
        lists = by_itself_and_smoothed(votes, self.kernel)
        return take_in_turn(lists, prompt.layout, sink=prompt.sink, most=prompt.top_k)
