"""Conversations on several replicas behind the router, simulated: what affinity by prefix gains, and how much it takes.

The router's own code chooses the replicas. A replica is a clock: it takes a chunk of a prompt and a launch of decode
steps in turn, as the engine does, with the times of Qwen2.5-Coder-0.5B (Q4_K_M) on two cores of an AMD EPYC (Zen 4):
docs/benchmarks.md. Its prefix cache forgets the conversation that was used least recently. Conversations begin as a
Poisson process, with a text; the user reads an answer before asking the next question::

    python -m benchmarks.replicas                # a few minutes on one core
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from snapstream.routing.affinity import Affinity, Marks
from snapstream.routing.instances import Instance, Pool

PER_TOKEN, PER_SQUARE = 1.375e-3, 1.4e-7
"""Seconds of prefill per token, and per token squared: 602 and 397 tokens per second at 2,048 and 8,192."""
STEP, PER_ROW = 10.3e-3, 2.2e-3
"""Seconds of a decode step, and more of it per sequence: 12.5 ms for one, 28 ms for eight."""
CHUNK, STEPS, SLOTS = 512, 4, 8
CACHE = 2**30 // 12288
"""Tokens in a prefix cache of 1 GiB."""
PIECE = 256
"""Tokens per mark; the router's marks are 1,024 characters apart."""
TEXT, QUESTION, ANSWER, TURNS, READING = 8000, 100, 150, 5, 30.0
"""Means: tokens of a text, a question and an answer, turns, and seconds between an answer and the next question."""
LONGEST = 24000
"""Tokens of the longest texts."""
SEEDS = 3


@dataclass
class Conversation:
    """A text and the turns about it."""

    number: int
    draw: random.Random  # one per conversation, so that every rule gets the same conversations
    turns: int = 0
    tokens: int = 0  # of the prompt of its next turn
    answer: int = 0
    turn: int = 0
    asked: float = 0.0
    instance: Instance | None = None

    def __post_init__(self) -> None:
        """Draw a text."""
        self.turns = 1 + round(self.draw.expovariate(1 / (TURNS - 1)))
        self.tokens = min(int(self.draw.expovariate(1 / TEXT)), LONGEST)
        self.ask()

    def ask(self) -> float:
        """Draw the next question and its answer; seconds until the question is asked."""
        self.tokens += self.answer + 1 + int(self.draw.expovariate(1 / QUESTION))
        self.answer = 1 + int(self.draw.expovariate(1 / ANSWER))
        return self.draw.expovariate(1 / READING)


@dataclass
class Replica:
    """A server of its own."""

    waiting: deque[Conversation] = field(default_factory=deque)
    prefill: tuple[Conversation, int] | None = None  # and how many tokens have been read
    running: dict[int, tuple[Conversation, int]] = field(default_factory=dict)  # and how many are to come
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)  # tokens by conversation
    is_awake: bool = False
    asked: int = 0  # tokens of prompts, and how many of them were in the cache
    found: int = 0

    def step(self) -> tuple[float, list[Conversation], list[Conversation]]:
        """Seconds of a step, who gets a first token at its end, and whose answer ends."""
        took, begun, ended = 0.0, [], []
        if self.prefill is None and self.waiting and len(self.running) < SLOTS:
            one = self.waiting.popleft()
            self.prefill = one, self.cache.get(one.number, 0)
            self.asked, self.found = self.asked + one.tokens, self.found + self.cache.get(one.number, 0)
        if self.prefill is not None:
            one, done = self.prefill
            end = min(done + CHUNK, one.tokens)
            took += PER_TOKEN * (end - done) + PER_SQUARE * (end**2 - done**2)
            self.prefill = one, end
            if end == one.tokens:
                self.prefill, self.running[one.number] = None, (one, one.answer)
                self.keep(one)
                begun.append(one)
        if self.running:
            took += STEPS * (STEP + PER_ROW * len(self.running))
            for number, (one, left) in list(self.running.items()):
                self.running[number] = one, left - STEPS
                if left <= STEPS:
                    del self.running[number]
                    ended.append(one)
        return took, begun, ended

    def keep(self, one: Conversation) -> None:
        """Keep a prompt that has been read."""
        self.cache[one.number] = one.tokens
        self.cache.move_to_end(one.number)
        while sum(self.cache.values()) > CACHE:
            self.cache.popitem(last=False)


Choose = Callable[[Pool, Conversation, Marks], Instance]


def by_affinity(weight: float) -> Choose:
    """The router's choice."""
    affinity = Affinity(weight)

    def choose(pool: Pool, one: Conversation, marks: Marks) -> Instance:
        found = pool.choose((), affinity.advantages(marks, pool.instances))
        assert found is not None
        affinity.remember(marks, found)
        return found

    return choose


def always_the_same(pool: Pool, one: Conversation, marks: Marks) -> Instance:
    """Each conversation has an instance, drawn once, whatever it has to do."""
    return one.instance or random.choice(pool.instances)


CHOICES: dict[str, Callable[[], Choose]] = {
    "fewest requests (0)": lambda: by_affinity(0.0),
    **{f"affinity {weight:g}": lambda weight=weight: by_affinity(weight) for weight in (1.0, 2.0, 4.0, 8.0, 16.0)},
    "always the same": lambda: always_the_same,
}


def simulate(
    choose: Choose, replicas: int, rate: float, conversations: int, seed: int
) -> tuple[list[float], list[float], float]:
    """Seconds to the first token of first and of later turns, and the share of prompts that was found in caches."""
    random.seed(seed)
    draw = random.Random(seed)
    pool = Pool([str(number) for number in range(replicas)])
    servers = {instance: Replica() for instance in pool.instances}
    for instance in pool.instances:
        instance.is_well = True
    order = itertools.count()
    events: list[tuple[float, int, Conversation | Instance]] = []
    at, first, later = 0.0, list[float](), list[float]()
    for number in range(conversations):
        at += draw.expovariate(rate * replicas)
        heapq.heappush(events, (at, next(order), Conversation(number, random.Random(draw.random()))))
    while events:
        now, _, event = heapq.heappop(events)
        if isinstance(event, Conversation):
            one = event
            one.asked = now
            pieces = [f"{one.number} {piece}".encode() for piece in range(one.tokens // PIECE)]
            instance = one.instance = choose(pool, one, Marks(pieces))
            instance.busy += 1
            server = servers[instance]
            server.waiting.append(one)
        else:
            instance, server = event, servers[event]
            server.is_awake = False
        if server.is_awake or not (server.waiting or server.prefill or server.running):
            continue
        took, begun, ended = server.step()
        for one in begun:
            (later if one.turn else first).append(now + took - one.asked)
        for one in ended:
            instance.busy -= 1
            one.turn += 1
            if one.turn < one.turns:
                heapq.heappush(events, (now + took + one.ask(), next(order), one))
        server.is_awake = True
        heapq.heappush(events, (now + took, next(order), instance))
    return first, later, sum(one.found for one in servers.values()) / sum(one.asked for one in servers.values())


def rows(replicas: list[int], rates: list[float], conversations: int) -> Iterator[str]:
    """The table, line by line."""
    yield (
        "| replicas | conversations per hour and replica | choice | first token of a first turn, median, s | 99th "
        "| of a later turn, median | 99th | of prompts, found in caches |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for count, rate in itertools.product(replicas, rates):
        for name, make in CHOICES.items():
            runs = [simulate(make(), count, rate / 3600, conversations * count, seed) for seed in range(SEEDS)]
            first, later = (list(itertools.chain(*(run[part] for run in runs))) for part in range(2))
            cells = " | ".join(f"{cell:.1f}" for cell in (*quantiles(first), *quantiles(later)))
            share = statistics.mean(run[2] for run in runs)
            yield f"| {count} | {rate:g} | {name} | {cells} | {100 * share:.0f} % |"


def quantiles(values: list[float]) -> tuple[float, float]:
    """The median and the 99th percentile."""
    return statistics.median(values), statistics.quantiles(values, n=100)[98]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 8, 32])
    parser.add_argument("--rates", type=float, nargs="+", default=[30.0, 60.0])
    parser.add_argument("--conversations", type=int, default=100, help="per replica")
    options = parser.parse_args()
    for line in rows(options.replicas, options.rates, options.conversations):
        print(line, flush=True)


if __name__ == "__main__":
    main()
