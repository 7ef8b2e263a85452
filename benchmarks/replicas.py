"""Conversations on several replicas behind the router, simulated: what affinity by prefix gains, and how much it takes.

The router's own code chooses the replicas. A replica is a clock: it takes a chunk of a prompt and a launch of decode
steps in turn, as the engine does, with the times of Qwen2.5-Coder-0.5B (Q4_K_M) on two cores of an AMD EPYC (Zen 4):
docs/benchmarks.md. Its prefix cache forgets the conversation that was used least recently. Conversations begin as a
Poisson process, with a text; the user reads an answer before asking the next question::

    python -m benchmarks.replicas                # four minutes on one core
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

PER_TOKEN, PER_PAIR = 1.6e-3, 1.1e-7
"""Seconds of prefill per token, and per token and token before it: 602 and 397 tokens per second at 2,048 and 8,192."""
STEP, PER_ROW = 10.3e-3, 2.2e-3
"""Seconds of a decode step, and more of it per sequence: 12.5 ms for one, 28 ms for eight."""
CHUNK, STEPS, SLOTS = 512, 4, 8
CACHE = 2**30 // 12288
"""Tokens in a prefix cache of 1 GiB."""
PIECE = 256
"""Tokens per mark; the router's marks are 1,024 characters apart."""
TEXT, QUESTION, ANSWER, TURNS, READING = 8000, 100, 150, 5, 30.0
"""Means: tokens of a text, a question and an answer, turns, and seconds between an answer and the next question."""


@dataclass
class Conversation:
    """A text and the turns about it."""

    number: int
    turns: int
    tokens: int  # of the prompt of its next turn
    answer: int
    asked: float = 0.0
    instance: Instance | None = None


@dataclass
class Replica:
    """A server of its own."""

    waiting: deque[Conversation] = field(default_factory=deque)
    prefill: tuple[Conversation, int] | None = None  # and how many tokens have been read
    running: dict[int, tuple[Conversation, int]] = field(default_factory=dict)  # and how many are to come
    cache: OrderedDict[int, int] = field(default_factory=OrderedDict)  # tokens by conversation
    is_awake: bool = False

    def step(self) -> tuple[float, list[Conversation], list[Conversation]]:
        """Seconds of a step, who gets a first token at its end, and whose answer ends."""
        took, begun, ended = 0.0, [], []
        if self.prefill is None and self.waiting and len(self.running) < SLOTS:
            one = self.waiting.popleft()
            self.prefill = one, self.cache.get(one.number, 0)
        if self.prefill is not None:
            one, done = self.prefill
            end = min(done + CHUNK, one.tokens)
            took += PER_TOKEN * (end - done) + PER_PAIR * (end**2 - done**2)
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


def simulate(choose: Choose, replicas: int, rate: float, conversations: int) -> tuple[list[float], list[float], float]:
    """Seconds to the first token of first and of later turns, and the share of prompts that was found in caches."""
    random.seed(0)
    draw = random.Random(1)
    pool = Pool([str(number) for number in range(replicas)])
    servers = {instance: Replica() for instance in pool.instances}
    for instance in pool.instances:
        instance.is_well = True
    order = itertools.count()
    events: list[tuple[float, int, Conversation | Instance]] = []
    at, first, later, found, asked = 0.0, list[float](), list[float](), 0, 0
    for number in range(conversations):
        at += draw.expovariate(rate * replicas)
        turns, text = 1 + int(draw.expovariate(1 / (TURNS - 1))), int(draw.expovariate(1 / TEXT)) + QUESTION
        heapq.heappush(events, (at, next(order), Conversation(number, turns, min(text, 3 * TEXT), 0)))
    turn_of: dict[int, int] = dict.fromkeys(range(conversations), 0)
    while events:
        now, _, event = heapq.heappop(events)
        if isinstance(event, Conversation):
            one = event
            one.asked, one.answer = now, 1 + int(draw.expovariate(1 / ANSWER))
            pieces = [f"{one.number} {piece}".encode() for piece in range(one.tokens // PIECE)]
            instance = one.instance = choose(pool, one, Marks(pieces))
            instance.busy += 1
            server = servers[instance]
            found, asked = found + server.cache.get(one.number, 0), asked + one.tokens
            server.waiting.append(one)
        else:
            instance, server = event, servers[event]
            server.is_awake = False
        if server.is_awake or not (server.waiting or server.prefill or server.running):
            continue
        took, begun, ended = server.step()
        for one in begun:
            (later if turn_of[one.number] else first).append(now + took - one.asked)
        for one in ended:
            instance.busy -= 1
            turn_of[one.number] += 1
            if turn_of[one.number] < one.turns:
                one.tokens += one.answer + 1 + int(draw.expovariate(1 / QUESTION))
                pause = draw.expovariate(1 / READING)
                heapq.heappush(events, (now + took + pause, next(order), one))
        server.is_awake = True
        heapq.heappush(events, (now + took, next(order), instance))
    return first, later, found / asked


def rows(replicas: list[int], rates: list[float], conversations: int) -> Iterator[str]:
    """The table, line by line."""
    yield (
        "| replicas | conversations per hour and replica | choice | first token of a first turn, median, s | 99th "
        "| of a later turn, median | 99th | of prompts, found in caches |"
    )
    yield "|---|---|---|---|---|---|---|---|"
    for count, rate in itertools.product(replicas, rates):
        for name, make in CHOICES.items():
            first, later, share = simulate(make(), count, rate / 3600, conversations * count)
            cells = " | ".join(f"{cell:.1f}" for cell in (*quantiles(first), *quantiles(later)))
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
