"""``sage-kv``: only the last token of the prompt votes (SAGE-KV, arXiv 2503.08879)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from snapstream.compression.policies.attention import AttentionVotes


@dataclass(frozen=True, kw_only=True)
class LastTokenVotes(AttentionVotes):
    """Votes of a single query, that of the last token."""

    name: ClassVar[str] = "sage-kv"

    @property
    @override
    def queries(self) -> int:
        return 1
