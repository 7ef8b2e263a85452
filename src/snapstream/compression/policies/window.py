"""``snapstream``: the last tokens of the prompt vote by their attention (SnapKV, arXiv 2404.14469)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from snapstream.compression.policies.attention import AttentionVotes
from snapstream.config.checks import require_integer
from snapstream.config.policy import WINDOW
from snapstream.errors import ConfigurationError


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
        require_integer("cache budget: window", self.window)
        if self.window < 1:
            raise ConfigurationError(f"cache budget: window is {self.window}; at least one token must vote")
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
