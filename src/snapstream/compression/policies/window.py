"""``snapstream``: the last tokens of the prompt vote by their attention (SnapKV, arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

from torch import Tensor

from snapstream.compression.scoring import observation_votes, pool_votes
from snapstream.config.checks import require_integer
from snapstream.config.policy import WINDOW, LayerPrompt, Normalize, Policy, Pooling
from snapstream.errors import ConfigurationError


@dataclass(frozen=True)
class WindowVotes(Policy):
    """Votes of an observation window (paper, equation 3 and listing 6).

    Attributes:
        window: Last prompt tokens whose queries vote (``W``, the paper's ``L_obs``).
        pooling: How votes are smoothed along the sequence, so that neighbours of a winner are kept with it.
        kernel: Odd width of that smoothing; 1 switches it off.
        normalize: ``all``: the voters' softmax runs over the whole prompt (listing 6 of the paper, SnapKV's code);
            ``candidates``: over the evictable tokens only (equation 3).
    """

    name: ClassVar[str] = "snapstream"

    window: int = WINDOW
    pooling: Pooling = "avg"
    kernel: int = 7
    normalize: Normalize = "all"

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigurationError: A field that cannot work.
        """
        require_integer("cache budget: window", self.window)
        if self.window < 1:
            raise ConfigurationError(f"cache budget: window is {self.window}; at least one token must vote")
        check_pooling(self.pooling, self.kernel, self.normalize)

    @classmethod
    def sized(cls, capacity: int) -> WindowVotes:
        """A quarter of a small cache is the number of voters."""
        return cls(window=min(WINDOW, capacity // 4))

    @property
    def queries(self) -> int:
        """See :attr:`Policy.queries`."""
        return self.window

    def votes(self, prompt: LayerPrompt) -> Tensor:
        """See :meth:`Policy.votes`."""
        return window_votes(prompt, self.window, self.normalize)

    def smooth(self, votes: Tensor, prompt: LayerPrompt) -> Tensor:
        """See :meth:`Policy.smooth`."""
        return pool_votes(votes, pooling=self.pooling, kernel=self.kernel)


def window_votes(prompt: LayerPrompt, window: int, normalize: Normalize) -> Tensor:
    """Votes of the last ``window`` queries; see :func:`~snapstream.compression.scoring.observation_votes`."""
    queries = prompt.queries[:, :, -window:]
    return observation_votes(
        queries, prompt.keys, prompt.layout, sink=prompt.sink, scale=prompt.scale, normalize=normalize
    )


def check_pooling(pooling: Pooling, kernel: int, normalize: Normalize) -> None:
    """Check what policies that vote have in common.

    Raises:
        ConfigurationError: A value that cannot work.
    """
    for name, value, allowed in (("pooling", pooling, Pooling), ("normalize", normalize, Normalize)):
        if value not in get_args(allowed):
            raise ConfigurationError(f"cache budget: {name} is {value!r}; allowed: {', '.join(get_args(allowed))}")
    require_integer("cache budget: kernel", kernel)
    if kernel < 1 or kernel % 2 == 0:
        raise ConfigurationError(f"cache budget: kernel is {kernel}; use an odd number, or 1 for no pooling")
