"""``snapstream-keydiff``: some places by the window's votes, others by how unlike the rest a key is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from snapstream.compression.keys import key_differences, take_in_turn
from snapstream.compression.policies.attention import require_kernel
from snapstream.compression.policies.window import WindowVotes
from snapstream.compression.scoring import pool_votes
from snapstream.config.checks import require_integer
from snapstream.config.policy import LayerPrompt
from snapstream.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class WindowVotesAndKeys(WindowVotes):
    """What the prompt's end looks at, and what the rest of the text is unlike.

    Attributes:
        key_kernel: Odd width of the average of keys' differences along the sequence; 1 switches it off.
        keys_per_vote: Places that keys get for each one that votes get.
    """

    name: ClassVar[str] = "snapstream-keydiff"
    pins_recent: ClassVar[bool] = True

    key_kernel: int = 3
    keys_per_vote: int = 2

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigurationError: A field that cannot work.
        """
        super().__post_init__()
        require_kernel("key_kernel", self.key_kernel)
        require_integer("cache budget: keys_per_vote", self.keys_per_vote)
        if self.keys_per_vote < 1:
            raise ConfigurationError(f"cache budget: keys_per_vote is {self.keys_per_vote}; give 1 or more")

    def smooth(self, votes: Tensor, prompt: LayerPrompt) -> Tensor:
        """See :meth:`Policy.smooth`."""
        differences = key_differences(prompt.keys, prompt.layout, sink=prompt.sink)
        by_keys = pool_votes(differences, pooling="avg", kernel=self.key_kernel)
        by_votes = super().smooth(votes, prompt)
        return take_in_turn(by_votes, by_keys, prompt.layout, sink=prompt.sink, others=self.keys_per_vote)
