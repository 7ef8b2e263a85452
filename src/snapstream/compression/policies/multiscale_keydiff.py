"""``multiscale-keydiff``: the tokens whose keys are least like their neighbors', or least like all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from snapstream.compression.keys import key_differences
from snapstream.compression.policies.attention import require_kernel
from snapstream.compression.policies.local_keydiff import LocalKeyDifferences, by_itself_and_smoothed
from snapstream.compression.ranks import take_in_turn
from snapstream.compression.scoring import pool_votes
from snapstream.config.policy import LayerPrompt


@dataclass(frozen=True, kw_only=True)
class MultiscaleKeyDifferences(LocalKeyDifferences):
    """Key differences to a token's neighborhood and to the whole text share the pinned entries; needs no queries.

    A fact that is hidden in unrelated text stands out from its neighborhood; what a text is about stands out from the
    whole of it. Two thirds of the entries go to the neighborhood, as in ``local-keydiff``, and a third to the text, as
    in ``keydiff``. docs/experiments.md shows what each keeps alone.

    Attributes:
        whole_kernel: Odd width of the average of differences to the whole text along the sequence; 1 disables it.
    """

    name: ClassVar[str] = "multiscale-keydiff"

    whole_kernel: int = 3

    @override
    def __post_init__(self) -> None:
        """Check every field.

        Raises:
            ConfigurationError: A field has an invalid value.
        """
        super().__post_init__()
        require_kernel("whole_kernel", self.whole_kernel)

    @override
    def votes(self, prompt: LayerPrompt) -> Tensor:
        """Differences to the neighborhood and to the whole text, ``[2, B, N, L]``."""
        whole = key_differences(prompt.keys, prompt.layout, sink=prompt.sink)
        return torch.stack([super().votes(prompt), whole])

    @override
    def smooth(self, votes: Tensor, prompt: LayerPrompt) -> Tensor:
        near, whole = votes
        pooled = pool_votes(whole, pooling="avg", kernel=self.whole_kernel)
        lists = [*by_itself_and_smoothed(near, self.kernel), pooled]
        return take_in_turn(lists, prompt.layout, sink=prompt.sink, most=prompt.top_k)
