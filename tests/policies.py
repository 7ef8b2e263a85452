"""Policies that another package might bring, each with its oracle: votes of queries all over the prompt, and values."""

import math
from dataclasses import dataclass
from typing import ClassVar

import torch

from snapstream.config import LayerPrompt, Policy
from snapstream.config.policy import ALL

OWN = [
    *("full", "streaming", "sage-kv", "snapstream", "spans", "keydiff", "local-keydiff", "multiscale-keydiff"),
    *("mixed", "random"),
]
"""The policies that this package brings."""


@dataclass(frozen=True)
class SpreadVotes(Policy):
    """Every so many queries of the whole prompt vote, each for what it can see."""

    name: ClassVar[str] = "spread"

    every: int = 16

    @property
    def queries(self):
        return ALL

    def votes(self, prompt: LayerPrompt):
        B, H, Q, D = prompt.queries.shape
        N, L = prompt.keys.shape[1:3]
        grouped = prompt.queries.float().view(B, N, H // N, Q, D)
        logits = torch.einsum("bngqd,bnld->bngql", grouped, prompt.keys.float()) * prompt.scale
        key = torch.arange(L)
        position = prompt.layout.length[:, None] - Q + torch.arange(Q)
        seen = key <= position[..., None]
        weights = logits.masked_fill(~seen[:, None, None], float("-inf")).softmax(-1)
        votes = (position % self.every == 0) & (position >= prompt.layout.first_voter[:, None])
        return torch.where(votes[:, None, None, :, None], weights, 0.0).sum(3).mean(2)

    def naive_scores(self, queries, keys, values, budget):
        length, dim = keys.shape
        scores = dict.fromkeys(range(budget.sink, length - budget.recent), 0.0)
        for head in queries.double():
            for voter in range(0, length, self.every):
                weights = (keys[: voter + 1].double() @ head[voter] / math.sqrt(dim)).softmax(-1)
                for p in scores:
                    scores[p] += float(weights[p]) / len(queries) if p <= voter else 0.0
        return scores


@dataclass(frozen=True)
class LargeValues(Policy):
    """Tokens with large values are kept, whatever attention says."""

    name: ClassVar[str] = "large-values"
    needs_values: ClassVar[bool] = True

    @property
    def queries(self):
        return 0

    def votes(self, prompt: LayerPrompt):
        return prompt.values.float().norm(dim=-1)

    def naive_scores(self, queries, keys, values, budget):
        length = len(keys)
        return {p: float(values[p].double().norm()) for p in range(budget.sink, length - budget.recent)}


class NotAPolicy:
    """What somebody may register by mistake."""
