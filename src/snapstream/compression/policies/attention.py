"""What the policies share whose votes are the attention of the last queries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torch import Tensor
from typing_extensions import override

from snapstream.compression.scoring import observation_votes, pool_votes
from snapstream.config.checks import require_integer
from snapstream.config.policy import LayerPrompt, Normalize, Policy, Pooling
from snapstream.errors import ConfigurationError


def require_kernel(name: str, width: int) -> None:
    """Check the width of an average along the sequence.

    Raises:
        ConfigurationError: It is not an odd number of at least 1.
    """
    require_integer(f"cache budget: {name}", width)
    if width < 1 or width % 2 == 0:
        raise ConfigurationError(f"cache budget: {name} is {width}; use an odd number, or 1 for no pooling")


@dataclass(frozen=True, kw_only=True)
class AttentionVotes(Policy):
    """Votes of the last :attr:`queries` tokens (paper, equation 3 and listing 6).

    Attributes:
        pooling: How votes are smoothed along the sequence, so that the neighbors of a kept token are kept, too.
        kernel: Odd width of that smoothing; 1 disables it.
        normalize: ``all``: the voters' softmax runs over the whole prompt (listing 6 of the paper, SnapKV's code);
            ``candidates``: over the evictable tokens only (equation 3).
    """

    pooling: Pooling = "avg"
    kernel: int = 7
    normalize: Normalize = "all"

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigurationError: A field has an invalid value.
        """
        for name, allowed in (("pooling", Pooling), ("normalize", Normalize)):
            if getattr(self, name) not in get_args(allowed):
                raise ConfigurationError(
                    f"cache budget: {name} is {getattr(self, name)!r}; allowed: {', '.join(get_args(allowed))}"
                )
        require_kernel("kernel", self.kernel)

    @override
    def votes(self, prompt: LayerPrompt) -> Tensor:
        queries = prompt.queries[:, :, -self.queries :]
        given = (queries, prompt.keys, prompt.layout)
        return observation_votes(*given, sink=prompt.sink, normalize=self.normalize, **prompt.attention)

    @override
    def smooth(self, votes: Tensor, prompt: LayerPrompt) -> Tensor:
        return pool_votes(votes, pooling=self.pooling, kernel=self.kernel)
