"""``mixed``: places go in turn to votes of a window, to votes of the last token, and to keys unlike the others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from snapstream.compression.keys import key_differences
from snapstream.compression.policies.attention import require_kernel
from snapstream.compression.policies.window import WindowVotes
from snapstream.compression.ranks import take_in_turn
from snapstream.compression.scoring import pool_votes
from snapstream.config.policy import LayerPrompt


@dataclass(frozen=True, kw_only=True)
class Mixed(WindowVotes):
    """Three ways of choosing fail on different questions, so each has a third of the places.

    Votes of a window (SnapKV) keep what several words of a question ask for, but are spread where the question is
    shorter than the window. Votes of the last token (SAGE-KV) are not, but it may ask for one thing only. A key unlike
    the others (KeyDiff) is kept for what nobody has asked for yet. What each keeps, and all together: docs/accuracy.md.

    Attributes:
        key_kernel: Odd width of the average of keys' differences along the sequence; 1 switches it off.
    """

    name: ClassVar[str] = "mixed"
    pins_recent: ClassVar[bool] = True

    window: int = 16
    key_kernel: int = 5

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigurationError: A field that cannot work.
        """
        super().__post_init__()
        require_kernel("key_kernel", self.key_kernel)

    def votes(self, prompt: LayerPrompt) -> Tensor:
        """The window's, the last token's, and the keys', ``[3, B, N, L]``."""
        last = replace(prompt, queries=prompt.queries[:, :, -1:])
        differences = key_differences(prompt.keys, prompt.layout, sink=prompt.sink)
        return torch.stack([super().votes(prompt), super().votes(last), differences])

    def smooth(self, votes: Tensor, prompt: LayerPrompt) -> Tensor:
        """See :meth:`Policy.smooth`."""
        window, last, differences = votes
        lists = [super().smooth(window, prompt), super().smooth(last, prompt)]
        lists.append(pool_votes(differences, pooling="avg", kernel=self.key_kernel))
        return take_in_turn(lists, prompt.layout, sink=prompt.sink, most=prompt.top_k)
