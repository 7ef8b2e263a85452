"""``streaming``: sinks and recent tokens, nothing in between (StreamingLLM, arXiv 2309.17453)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from snapstream.config.policy import LayerPrompt, Policy


@dataclass(frozen=True)
class Streaming(Policy):
    """Sinks and recent tokens, without votes."""

    name: ClassVar[str] = "streaming"
    pins: ClassVar[bool] = False

    @property
    @override
    def queries(self) -> int:
        return 0

    @override
    def votes(self, prompt: LayerPrompt) -> Tensor:
        """Equal votes for all tokens, so any room for voted tokens goes to the earliest ones."""
        return torch.zeros(prompt.keys.shape[:3], dtype=torch.float32, device=prompt.keys.device)
