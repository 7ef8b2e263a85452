"""``mixed``: places go in turn to votes of a window and to keys unlike their neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from snapstream.compression.keys import key_differences
from snapstream.compression.policies.attention import require_kernel
from snapstream.compression.policies.local_keydiff import (
    NEAR,
    LocalKeyDifferences,
    by_itself_and_smoothed,
    require_near,
)
from snapstream.compression.policies.window import WindowVotes
from snapstream.compression.ranks import take_in_turn
from snapstream.config.policy import LayerPrompt, Policy


@dataclass(frozen=True, kw_only=True)
class Mixed(WindowVotes):
    """Votes and keys fail on different questions, so a third of the places goes to the one, the rest to the other.

    Votes of a window (SnapKV) keep what a question at the prompt's end asks for, if its words say so. A key unlike its
    neighbours is kept for what nobody has asked for yet, and for what the question does not name. docs/accuracy.md says
    what each keeps alone, and what they keep together.

    Attributes:
        key_kernel: Odd width of the average of keys' differences along the sequence, for half of what goes to keys.
        near: Tokens of a block; a key is compared with those of its own and of the ones beside it.
    """

    name: ClassVar[str] = "mixed"
    pins_recent: ClassVar[bool] = True

    window: int = 16
    key_kernel: int = 5
    near: int = NEAR

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigurationError: A field that cannot work.
        """
        super().__post_init__()
        require_kernel("key_kernel", self.key_kernel)
        require_near(self.near)

    @property
    def for_contexts(self) -> Policy:
        """Keys alone: nobody asks at the end of a text that is stored."""
        return LocalKeyDifferences(kernel=self.key_kernel, near=self.near)

    def votes(self, prompt: LayerPrompt) -> Tensor:
        """The window's and the keys', ``[2, B, N, L]``."""
        differences = key_differences(prompt.keys, prompt.layout, sink=prompt.sink, near=self.near)
        return torch.stack([super().votes(prompt), differences])

    def smooth(self, votes: Tensor, prompt: LayerPrompt) -> Tensor:
        """See :meth:`Policy.smooth`."""
        window, differences = votes
        lists = [super().smooth(window, prompt), *by_itself_and_smoothed(differences, self.key_kernel)]
        return take_in_turn(lists, prompt.layout, sink=prompt.sink, most=prompt.top_k)
