"""``streaming``: sinks and recent tokens, nothing in between (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from snapstream.config.policy import LayerPrompt, Policy


@dataclass(frozen=True)
class Streaming(Policy):
    """Nobody votes."""

    name: ClassVar[str] = "streaming"
    pins: ClassVar[bool] = False

    @property
    def queries(self) -> int:
        """See :attr:`Policy.queries`."""
        return 0

    def votes(self, prompt: LayerPrompt) -> Tensor:
        """All alike; so if a cache has room for voted tokens, the first ones get it."""
        return torch.zeros(prompt.keys.shape[:3], dtype=torch.float32, device=prompt.keys.device)
