"""``mixed``: window votes and keys that differ from their neighbors share the pinned entries."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from snapstream.compression.keys import key_differences
from snapstream.compression.policies.attention import require_kernel
from snapstream.compression.policies.local_keydiff import NEAR, by_itself_and_smoothed, require_near
from snapstream.compression.policies.multiscale_keydiff import MultiscaleKeyDifferences
from snapstream.compression.policies.window import WindowVotes
from snapstream.compression.ranks import take_in_turn
from snapstream.config.policy import LayerPrompt, Policy


@dataclass(frozen=True, kw_only=True)
class Mixed(WindowVotes):
    """A third of the pinned entries go to window votes, the rest to key differences: they fail on different questions.

    Window votes (SnapKV) keep what a question at the end of the prompt asks for, if it names it. Key differences keep
    what has not been asked for yet, and what the question does not name. docs/accuracy.md shows what each keeps alone
    and what they keep together.

    Attributes:
        key_kernel: Odd width of the average of key differences along the sequence, for half of the entries that go to
            keys.
        near: Block size in tokens; a key is compared with its own block and the two adjacent ones.
    """

    name: ClassVar[str] = "mixed"
    pins_recent: ClassVar[bool] = True

    window: int = 16
    key_kernel: int = 5
    near: int = NEAR

    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigurationError: A field has an invalid value.
        """
        super().__post_init__()
        require_kernel("key_kernel", self.key_kernel)
        require_near(self.near)

    @property
    @override
    def for_contexts(self) -> Policy:
        """Key differences alone: a text that is stored does not end with a question."""
        return MultiscaleKeyDifferences(kernel=self.key_kernel, near=self.near)

    @override
    def votes(self, prompt: LayerPrompt) -> Tensor:
        """Window votes and key differences, ``[2, B, N, L]``."""
        differences = key_differences(prompt.keys, prompt.layout, sink=prompt.sink, near=self.near)
        return torch.stack([super().votes(prompt), differences])

    @override
    def smooth(self, votes: Tensor, prompt: LayerPrompt) -> Tensor:
        window, differences = votes
        lists = [super().smooth(window, prompt), *by_itself_and_smoothed(differences, self.key_kernel)]
        return take_in_turn(lists, prompt.layout, sink=prompt.sink, most=prompt.top_k)
