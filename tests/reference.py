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
    stay: int = 0

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


class NaiveState:
    """The state of a layer of Gated DeltaNet, and all inputs so far; see snapstream/kernels/recurrence.py."""

    def __init__(self, operation):
        self.operation, self.inputs = operation, []
        size = operation.target.heads, operation.key_size, operation.target.size
        self.matrices = torch.zeros(size, dtype=torch.float64)

    def take(self, x: Tensor) -> Tensor:
        """The outputs ``[heads, value]`` of the next token."""
        o, (heads, key, value) = self.operation, self.matrices.shape
        self.inputs = [*self.inputs, x.double()]
        channels = len(x) - 2 * heads
        mixed = torch.zeros(channels, dtype=torch.float64)
        for back, earlier in enumerate(reversed(self.inputs[-len(o.taps) :])):
            mixed += o.taps[-1 - back].double() * earlier[:channels]
        mixed = mixed / (1 + torch.exp(-mixed))
        outputs = []
        for head in range(heads):
            mine = head % o.key_heads if o.in_turn else head * o.key_heads // heads
            query, k = (mixed[(at + mine) * key :][:key] for at in (0, o.key_heads))
            query, k = (each / math.sqrt(float(each @ each) + 1e-6) for each in (query, k))
            v = mixed[2 * o.key_heads * key + head * value :][:value]
            strength = 1 / (1 + math.exp(-float(x[channels + head])))
            softplus = math.log1p(math.exp(float(x[channels + heads + head]) + float(o.shifts[head])))
            self.matrices[head] *= math.exp(float(o.rates[head]) * softplus)
            self.matrices[head] += strength * torch.outer(k, v - k @ self.matrices[head])
            outputs.append(query @ self.matrices[head] / math.sqrt(key))
        return torch.stack(outputs)


def naive_votes(queries: Tensor, keys: Tensor, budget, first_voter=0, **how) -> dict[int, float]:
    """Score of every candidate of one KV head, by a policy that lets queries vote.

    queries [G, L, D] of the whole prompt, keys [L, D].
    """
    return naive_smooth(naive_raw_votes(queries, keys, budget, first_voter, **how), budget)


def naive_raw_votes(queries: Tensor, keys: Tensor, budget, first_voter=0, **how) -> list[dict[int, float]]:
    """Attention of the window to every candidate; for spans that of more voters, under mixed keys' differences, too.

    how: cap and sinks, see below.
    """
    window = getattr(budget.policy, "window", budget.window)
    votes = [naive_attention_votes(queries, keys, budget, first_voter, window, **how)]
    if budget.policy.name == "spans":
        votes.append(
            naive_attention_votes(queries, keys, budget, first_voter, budget.policy.voters, largest=True, **how)
        )
        votes.append(naive_key_differences(keys, budget, budget.policy.near))
    if budget.policy.name == "mixed":
        votes.append(naive_key_differences(keys, budget, budget.policy.near))
    return votes


def naive_attention_votes(
    queries: Tensor, keys: Tensor, budget, first_voter, window, *, largest=False, cap=0.0, sinks=None
) -> dict[int, float]:
    """Attention of the last tokens to every candidate: their sum, or the largest share of attention to candidates.

    cap: logits are cap * tanh(logits / cap). sinks: one more logit per head [G], in a softmax over the whole prompt.
    """
    length, dim = keys.shape
    queries, keys = queries.double(), keys.double()
    candidates = naive_candidates(length, budget)
    voters = [p for p in range(length - window, length) if p >= first_voter]
    over_all = not largest and getattr(budget.policy, "normalize", "all") == "all"
    shares_end = length - budget.policy.window if budget.policy.name == "spans" else length
    votes = dict.fromkeys(candidates, 0.0)
    for head in range(queries.shape[0]):
        of_head = dict.fromkeys(candidates, 0.0)
        for voter in voters:
            seen, sink = list(range(voter + 1)), -math.inf if sinks is None else float(sinks[head])
            if not over_all:
                sink = -math.inf
                seen = [p for p in candidates if p <= voter and p < shares_end]
            logits = {p: float(queries[head, voter] @ keys[p]) / math.sqrt(dim) for p in seen}
            logits = {p: cap * math.tanh(x / cap) if cap else x for p, x in logits.items()}
            top = max(*logits.values(), sink) if logits else 0.0
            total = sum(math.exp(x - top) for x in logits.values()) + math.exp(sink - top)
            for p in candidates:
                if p in logits:
                    share = math.exp(logits[p] - top) / total
                    of_head[p] = max(of_head[p], share) if largest else of_head[p] + share
        for p in candidates:
            votes[p] += of_head[p] / queries.shape[0]
    return votes


def naive_smooth(votes: list[dict[int, float]], budget) -> dict[int, float]:
    """Scores of votes."""
    policy = budget.policy
    pooled = naive_pool(votes[0], getattr(policy, "kernel", 1), getattr(policy, "pooling", "avg"))
    if not votes[0]:  # nothing is chosen
        return pooled
    if policy.name == "spans":
        shift = (policy.span + 1) // 4 if policy.shift is None else policy.shift
        long = naive_pool(votes[1], policy.span, shift=shift)
        short = naive_pool(votes[1], policy.span // 4 * 2 + 1, shift=shift // 2)
        keys = [votes[2]] if policy.key_turns else []
        keeps_half = 2 * (budget.top_k - naive_given_later(budget)) >= len(votes[0])
        return naive_in_turn([pooled, long, short, *keys], (1, 1, 1, 1 if keeps_half else policy.key_turns))
    if policy.name != "mixed":
        return pooled
    return naive_in_turn([pooled, naive_pool(votes[1], policy.key_kernel), votes[1]])


def naive_in_turn(lists: list[dict[int, float]], every=(1, 1, 1)) -> dict[int, float]:
    """Scores by which the best of several lists come in turn, those of a list only every so many turns."""
    orders = [sorted(scores, key=lambda p, scores=scores: (-scores[p], p)) for scores in lists]
    turns = list(zip(orders, every, strict=False))
    return {p: -min(order.index(p) * each for order, each in turns) for p in lists[0]}


def naive_candidates(length: int, budget) -> list[int]:
    """Positions that may be pinned: where some would be in the ring, recent ones as well if the policy says so."""
    return list(range(budget.sink, length if naive_selects_recent(length, budget) else length - budget.recent))


def naive_selects_recent(length: int, budget) -> bool:
    """Whether recent tokens are candidates. In the paper's ring, they never are if the prompt fits."""
    places = budget.sink + budget.top_k - naive_given_later(budget)
    return (
        budget.policy.pins_recent
        and budget.top_k > 0
        and length > (budget.capacity if budget.ring == "paper" else places)
    )


def naive_pool(votes: dict[int, float], kernel: int, pooling: str = "avg", shift: int = 0) -> dict[int, float]:
    """Smooth votes along the sequence; a token's score is that of the one ``shift`` tokens before it."""
    half = kernel // 2
    pooled = {}
    for p in votes:
        neighbours = [votes.get(p - shift + d, 0.0) for d in range(-half, half + 1)]
        pooled[p] = max(neighbours) if pooling == "max" else sum(neighbours) / kernel
    return pooled


def naive_key_differences(keys: Tensor, budget, near=None) -> dict[int, float]:
    """One minus the cosine of every candidate's key to the mean direction of all, or of those in blocks near it."""
    directions = {p: keys[p].double() / keys[p].double().norm() for p in naive_candidates(len(keys), budget)}
    differences = {}
    for p, direction in directions.items():
        mean = sum(other for q, other in directions.items() if near is None or abs(q // near - p // near) <= 1)
        differences[p] = 1 - float(direction @ mean / mean.norm())
    return differences


def naive_scores(queries: Tensor, keys: Tensor, values, budget, first_voter=0, **how) -> dict[int, float]:
    """Score of every candidate of one KV head under any policy that tests know."""
    policy = budget.policy
    if hasattr(policy, "naive_scores"):  # a policy of a test, with an oracle of its own
        return policy.naive_scores(queries, keys, values, budget)
    if policy.name == "keydiff":
        return naive_pool(naive_key_differences(keys, budget), policy.kernel)
    if policy.name == "local-keydiff":
        differences = naive_key_differences(keys, budget, policy.near)
        return naive_in_turn([naive_pool(differences, policy.kernel), differences])
    if policy.name == "multiscale-keydiff":
        near, whole = (naive_key_differences(keys, budget, blocks) for blocks in (policy.near, None))
        return naive_in_turn([naive_pool(near, policy.kernel), near, naive_pool(whole, policy.whole_kernel)])
    return naive_votes(queries, keys, budget, first_voter, **how)


def naive_pins(budget, length: int) -> tuple[set[int], set[int]]:
    """Tokens after the sinks that are certainly kept, and those that compete for what is left of half of the places.

    Spans are kept whole while they fit, in the given order; the tokens of the others compete.
    """
    room, certain, competing = budget.top_k // 2, set(), set()
    for start, end in budget.pin:
        span = {token for token in range(start, end) if budget.sink <= token < length}
        if len(span - certain) <= room:
            room -= len(span - certain)
            certain |= span
        else:
            competing |= span
    return certain, competing - certain


def naive_select(
    scores: dict[int, float], length: int, budget, pins=None, end: int | None = None
) -> tuple[list[int], list[int], list[int]]:
    """Positions of sinks, pinned and recent tokens, each in prompt order; pins are among those before ``end``."""
    certain, competing = naive_pins(budget, length) if pins is None else pins
    end = max(certain | competing, default=-1) + 1 if end is None else end
    sink = list(range(min(budget.sink, length)))
    places = budget.top_k - naive_given_later(budget)
    fits = length <= budget.capacity  # nothing is dropped
    wanted = max(length - budget.recent, end) if budget.ring == "paper" else length
    number = min(wanted - budget.sink, places) if fits else places
    if fits and end <= budget.sink + number and not naive_selects_recent(length, budget):  # nothing is chosen
        best = list(range(budget.sink, budget.sink + max(number, 0)))
    else:
        every = dict.fromkeys(range(budget.sink, length), -math.inf) | scores if certain or competing else scores
        ranks = {p: (p not in certain, -every[p], p) for p in certain | competing}
        first = sorted(ranks, key=ranks.__getitem__)[: budget.top_k // 2]
        best = sorted(every, key=lambda p: (p not in first, -every[p], p))[:number]
    others = [p for p in range(budget.sink, length) if p not in best]
    return sink, sorted(best), others[-budget.recent - naive_given_later(budget) :]


def naive_compress(
    queries: Tensor, keys: Tensor, budget, scores=None, first_voter=0, values=None, pins=None, end=None, **how
) -> NaiveCache:
    """Compress one KV head's prompt. Tokens are positions; look keys and values up by them."""
    length = keys.shape[0]
    if scores is None:
        scores = naive_scores(queries, keys, values, budget, first_voter, **how)
    sink, pinned, recent = naive_select(scores, length, budget, pins, end)
    spare = budget.top_k - len(pinned) if budget.ring != "paper" else 0
    return NaiveCache(sink, pinned, recent, budget.sink, budget.recent + spare)


def naive_renew(cache: NaiveCache, keys: dict[int, Tensor], budget, length: int, position: int) -> None:
    """Before the token at ``position`` is stored, give pinned places anew if it is time; ``length`` is the prompt's.

    What the prompt has pinned stays, three quarters of the places at most. All behind it compete for the others by
    their keys, but for the newest few, which have to stay in the ring. It is time when a token that has not competed is
    about to be dropped: when a cache is full whose prompt fitted, and otherwise when the ring has lost what did.
    """
    newest, later = min(16, budget.recent // 2), naive_given_later(budget)
    waiting = 0 if budget.policy.pins_recent else budget.recent
    has_competed = length > budget.capacity or naive_selects_recent(length, budget)
    first = length + budget.recent + later - waiting if has_competed else budget.capacity
    if position < first or (position - first) % (budget.recent - newest):
        return
    if position == first:
        cache.stay = len(cache.pinned)
    stay = cache.stay
    behind = [*cache.pinned[stay:], *cache.ring]
    judged = behind[:-newest]
    directions = [keys[p].double() / keys[p].double().norm() for p in judged]
    mean = sum(directions)
    scores = naive_pool({at: 1 - float(d @ mean / mean.norm()) for at, d in enumerate(directions)}, 3)
    places = len(behind) - budget.recent
    best = sorted(scores, key=lambda at: (-scores[at], at))[:places]
    cache.pinned = [*cache.pinned[:stay], *(behind[at] for at in sorted(best))]
    cache.ring = [p for at, p in enumerate(behind) if at not in best]
    cache.ring_limit = budget.recent


def naive_given_later(budget) -> int:
    """Pinned places that a prompt does not get."""
    return budget.top_k // 4 if budget.ring == "resnap" else 0


def naive_attention(query: Tensor, keys: Tensor, values: Tensor, cap: float = 0.0, sink=None) -> Tensor:
    """One query [D] over keys and values [n, D], in float64; a sink is an extra logit, without a value."""
    query, keys, values = query.double(), keys.double(), values.double()
    logits = keys @ query / math.sqrt(query.shape[-1])
    if cap:
        logits = cap * torch.tanh(logits / cap)
    if sink is not None:
        logits, values = torch.cat((logits, sink.double()[None])), torch.cat((values, torch.zeros_like(values[:1])))
    weights = torch.exp(logits - logits.max())
    return weights @ values / weights.sum()
