"""The slow, obvious oracle: the method in float64, written from its definition with Python lists and concatenation.

Nothing here is padded, batched or of fixed shape, and nothing is shared with the package: a sequence is a list of
tokens, a cache is three lists, and a token is dropped by leaving it out.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(eq=False)
class NaiveCache:
    """One KV head of one layer: positions, keys and values of what is kept, as growing lists."""

    sink: list
    pinned: list
    ring: list
    sink_size: int
    ring_limit: int

    def append(self, token):
        """Store a decoded token; drop the oldest recent one if the ring is over its limit."""
        if len(self.sink) < self.sink_size:
            self.sink = [*self.sink, token]
            return
        self.ring = [*self.ring, token]
        if len(self.ring) > self.ring_limit:
            self.ring = self.ring[1:]

    def tokens(self):
        return [*self.sink, *self.pinned, *self.ring]


def naive_votes(queries: Tensor, keys: Tensor, budget, first_voter=0) -> dict[int, float]:
    """Score of every candidate of one KV head.

    queries [G, L, D] of the whole prompt, keys [L, D].
    """
    length, dim = keys.shape
    queries, keys = queries.double(), keys.double()
    candidates = list(range(budget.sink, length - budget.recent))
    voters = [p for p in range(length - budget.window, length) if p >= first_voter]
    votes = dict.fromkeys(candidates, 0.0)
    for head in range(queries.shape[0]):
        for voter in voters:
            seen = candidates if getattr(budget.policy, "normalize", "all") == "candidates" else list(range(voter + 1))
            logits = {p: float(queries[head, voter] @ keys[p]) / math.sqrt(dim) for p in seen}
            top = max(logits.values(), default=0.0)
            total = sum(math.exp(x - top) for x in logits.values())
            for p in candidates:
                votes[p] += math.exp(logits[p] - top) / total / queries.shape[0]
    return naive_pool(votes, budget)


def naive_pool(votes: dict[int, float], budget) -> dict[int, float]:
    """Smooth votes along the sequence."""
    kernel = getattr(budget.policy, "kernel", 1)  # policies without one do not smooth
    half = kernel // 2
    pooled = {}
    for p in votes:
        neighbours = [votes.get(p + d, 0.0) for d in range(-half, half + 1)]
        pooled[p] = max(neighbours) if getattr(budget.policy, "pooling", "avg") == "max" else sum(neighbours) / kernel
    return pooled


def naive_select(scores: dict[int, float], length: int, budget) -> tuple[list[int], list[int], list[int]]:
    """Positions of sinks, pinned and recent tokens, each in prompt order."""
    sink = list(range(min(budget.sink, length)))
    best = sorted(scores, key=lambda p: (-scores[p], p))[: budget.top_k]
    recent = list(range(max(budget.sink, length - budget.recent), length))
    return sink, sorted(best), recent


def naive_compress(queries: Tensor, keys: Tensor, budget, scores=None, first_voter=0, values=None) -> NaiveCache:
    """Compress one KV head's prompt. Tokens are positions; look keys and values up by them."""
    length = keys.shape[0]
    if scores is None and hasattr(budget.policy, "naive_scores"):  # a policy of a test, with an oracle of its own
        scores = budget.policy.naive_scores(queries, keys, values, budget)
    elif scores is None:
        scores = naive_votes(queries, keys, budget, first_voter)
    sink, pinned, recent = naive_select(scores, length, budget)
    spare = budget.top_k - len(pinned) if budget.ring == "elastic" else 0
    return NaiveCache(sink, pinned, recent, budget.sink, budget.recent + spare)


def naive_attention(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """One query [D] over keys and values [n, D], in float64."""
    query, keys, values = query.double(), keys.double(), values.double()
    logits = keys @ query / math.sqrt(query.shape[-1])
    weights = torch.exp(logits - logits.max())
    return weights @ values / weights.sum()
