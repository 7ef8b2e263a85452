"""``snapstream``: the last tokens of the prompt vote by their attention (SnapKV, arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from snapstream.compression.policies.attention import AttentionVotes
from snapstream.config.checks import require_integer
from snapstream.config.policy import WINDOW
from snapstream.errors import ConfigurationError


def require_voters(name: str, number: int) -> None:
    """Check a number of voters.

    Raises:
        ConfigurationError: It is not at least 1.
    """
    require_integer(f"cache budget: {name}", number)
    if number < 1:
        raise ConfigurationError(f"cache budget: {name} is {number}; at least one token must vote")


@dataclass(frozen=True, kw_only=True)
class WindowVotes(AttentionVotes):
    """Votes of an observation window.

    Attributes:
        window: Last prompt tokens whose queries vote (``W``, the paper's ``L_obs``).
    """

    name: ClassVar[str] = "snapstream"

    window: int = WINDOW

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigurationError: A field has an invalid value.
        """
        require_voters("window", self.window)
        super().__post_init__()

    @classmethod
    @override
    def sized(cls, capacity: int) -> WindowVotes:
        """The policy with at most a quarter of ``capacity`` as voters."""
        return cls(window=min(cls.window, capacity // 4))

    @property
    @override
    def queries(self) -> int:
        return self.window
