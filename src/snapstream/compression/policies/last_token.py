"""``sage-kv``: only the last token of the prompt votes (SAGE-KV, arXiv 2503.08879)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from snapstream.compression.policies.attention import AttentionVotes


@dataclass(frozen=True, kw_only=True)
class LastTokenVotes(AttentionVotes):
    """Votes of one query."""

    name: ClassVar[str] = "sage-kv"

    @property
    def queries(self) -> int:
        """See :attr:`Policy.queries`."""
        return 1
