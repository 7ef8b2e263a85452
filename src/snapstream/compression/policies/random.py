"""``random``: a random choice in place of the voted one, as a baseline at equal budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from snapstream.compression.scoring import random_votes
from snapstream.config.checks import require_integer
from snapstream.config.policy import LayerPrompt, Policy


@dataclass(frozen=True)
class RandomVotes(Policy):
    """Uniform random votes, different for each layer and KV head.

    Attributes:
        seed: Makes the choice reproducible.
    """

    name: ClassVar[str] = "random"

    seed: int = 0

    def __post_init__(self) -> None:
        """Check the seed.

        Raises:
            ConfigurationError: It is not an integer.
        """
        require_integer("cache budget: seed", self.seed)

    @property
    @override
    def queries(self) -> int:
        return 0

    @override
    def votes(self, prompt: LayerPrompt) -> Tensor:
        heads, length = prompt.keys.shape[1:3]
        layer = prompt.layer
        if not isinstance(layer, Tensor):
            layer = torch.full((), layer, dtype=torch.int64, device=prompt.keys.device)
        seed = layer * 7_919 + self.seed
        return random_votes(heads, length, seed=seed).expand(len(prompt.keys), -1, -1)
