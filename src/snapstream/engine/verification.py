"""A decode step that reads several tokens of each slot: the next one, and guesses of those after it.

What comes of it is what single steps would give, token for token: a token is taken after each guess just as if the
guess had been taken before, and what was taken after a wrong one is forgotten. Entries of the cache are written only
for tokens that are certain. A drawn token depends on its seed, its position and the tokens before it alone, and a guess
is right if it is the token that is drawn, so this is the usual rule of speculative sampling for guesses that come
without a distribution (arXiv 2211.17192, section 2.3): the distribution of the output is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapstream.engine.graphs import StaticGraph
from snapstream.engine.sampler import Sampled, SamplingState, sample
from snapstream.kernels.operations import accept
from snapstream.kernels.parts import Machine

Run = Callable[[], None]


@dataclass(frozen=True)
class Parts:
    """What a step is made of.

    Attributes:
        read: Reads all tokens; leaves logits.
        settle: Keeps what was accepted, and goes on behind it.
        look: Reads, and takes the most likely tokens.
        greedy: All of it.
    """

    read: Run
    settle: Run
    look: Run
    greedy: Run


class Verification:
    """Steps of up to ``T`` tokens per slot."""

    def __init__(self, parts: Parts, machine: Machine, sampling: SamplingState, *, captured: bool) -> None:
        """Wrap what a step is made of.

        Args:
            parts: Of a step, on the machine.
            machine: The slots, with ``T`` tokens each.
            sampling: How their tokens are drawn.
            captured: Capture steps as CUDA graphs.
        """
        device = machine.slots.token.device
        self._parts, self._machine, self._sampling = parts, machine, sampling
        self._stops_early = device.type == "cpu"
        self._greedy_step = StaticGraph(parts.greedy, device, captured=captured)
        self._look_step = StaticGraph(parts.look, device, captured=captured)
        self._sampled_step = StaticGraph(self._draw, device, captured=captured)

    def warm_up(self, pool: object = None) -> None:
        """Run and capture the graphs; all slots are free before and after."""
        for graph in (self._greedy_step, self._look_step, self._sampled_step):
            graph.warm_up(pool)

    def greedy(self) -> Tensor:
        """Take the most likely tokens; returns them, ``[T, B]``, and they are the caller's."""
        self._greedy_step()
        return self._machine.slots.taken[: self._machine.slots.tokens].clone()

    def look(self) -> Tensor:
        """The same, but nothing is stored, and the next step begins where this one has."""
        self._look_step()
        return self._machine.slots.taken[: self._machine.slots.tokens].clone()

    def sampled(self) -> list[Sampled]:
        """Draw tokens; returns those after each token, as many as may be certain, and they are the caller's."""
        drawn: list[Sampled] = self._sampled_step()
        return [Sampled(*(tensor.clone() for tensor in each)) for each in drawn]

    def _draw(self) -> list[Sampled]:
        self._parts.read()
        slots = self._machine.slots
        logits = self._machine.buffers["logits"].view(*slots.token.shape, -1)
        certain, drawn, used = slots.active, list[Sampled](), slots.used()
        for t in range(slots.tokens):
            drawn.append(sample(logits[:, t], self._sampling, slots.position + 1 + t, certain, slots.forced[:, t]))
            if t + 1 < slots.tokens:
                certain = used[:, t + 1] & certain & (slots.token[:, t + 1] == drawn[-1].tokens)
                if self._stops_early and not certain.any():
                    break
        tokens = [each.tokens for each in drawn]
        accept(slots, torch.stack(tokens + tokens[-1:] * (slots.tokens - len(tokens)), 1))
        self._parts.settle()
        return drawn


def most_tokens(guesses: int, device: torch.device) -> Sequence[int]:
    """Tokens per slot of the steps there are, for up to so many guesses; none for none.

    A CPU works on the tokens there are, so one kind of step does for all; a graph works on as many as it was made for.
    """
    if not guesses:
        return ()
    if device.type == "cpu":
        return (guesses + 1,)
    return (*(2**n for n in range(1, guesses.bit_length()) if 2**n <= guesses), guesses + 1)
