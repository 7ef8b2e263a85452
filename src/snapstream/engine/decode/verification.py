"""A decode step that processes several tokens per slot: the next one, and draft tokens after it.

Its output is the same, token for token, as that of single steps. A token is taken after each draft token as if that had
been accepted, and tokens taken after a wrong one are discarded. Cache entries are written only for accepted tokens.

A drawn token depends only on its seed, its position and the tokens before it, and a draft token is accepted if it
equals the drawn token. This is the standard rule of speculative sampling for draft tokens without a distribution (arXiv
2211.17192, section 2.3), so the distribution of the output is unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from snapstream.engine.decode.graphs import StaticGraph
from snapstream.kernels.buffers import StepBuffers
from snapstream.kernels.sampling import Sampled, SamplingState, sample
from snapstream.kernels.stock import Program
from snapstream.kernels.taking import accept

Run = Callable[[], None]


@dataclass(frozen=True)
class Parts:
    """The parts of a step.

    Attributes:
        program: Runs all of it, except drawing.
        read: Processes all tokens and leaves logits.
        settle: Stores the accepted tokens and advances past them.
        look: Processes all tokens and takes the most likely ones, without storing anything.
        greedy: The whole greedy step: ``look``, then ``settle``.
    """

    program: Program
    read: Run
    settle: Run
    look: Run
    greedy: Run


class Verification:
    """Steps of up to ``T`` tokens per slot."""

    def __init__(self, parts: Parts, work: StepBuffers, sampling: SamplingState, *, captured: bool) -> None:
        """Wrap the parts of a step.

        Args:
            parts: The parts of a step on ``work``.
            work: The step's buffers and slots, with ``T`` tokens per slot.
            sampling: Sampling state of the slots.
            captured: Whether to capture steps as CUDA graphs.
        """
        device = work.slots.token.device
        self.program = parts.program
        self._parts, self._work, self._sampling = parts, work, sampling
        self._stops_early = device.type == "cpu"
        self._greedy_step = StaticGraph(parts.greedy, device, captured=captured)
        self._look_step = StaticGraph(parts.look, device, captured=captured)
        self._sampled_step = StaticGraph(self._draw, device, captured=captured)

    def warm_up(self, pool: object = None) -> None:
        """Run and capture the graphs; all slots are free before and after."""
        for graph in (self._greedy_step, self._look_step, self._sampled_step):
            graph.warm_up(pool)

    def greedy(self) -> Tensor:
        """Take the most likely tokens and store the accepted ones; returns a copy of the tokens, ``[T, B]``."""
        self._greedy_step()
        return self._work.slots.taken[: self._work.slots.tokens].clone()

    def look(self) -> Tensor:
        """Take the most likely tokens without storing anything; the next step starts where this one did."""
        self._look_step()
        return self._work.slots.taken[: self._work.slots.tokens].clone()

    def sampled(self) -> list[Sampled]:
        """Draw tokens and store the accepted ones.

        Returns:
            Per place, a copy of the tokens drawn there; places past the last accepted token may be missing.
        """
        drawn: list[Sampled] = self._sampled_step()
        return [Sampled(*(tensor.clone() for tensor in each)) for each in drawn]

    def _draw(self) -> list[Sampled]:
        self._parts.read()
        slots = self._work.slots
        logits = self._work.buffers["logits"].view(*slots.token.shape, -1)
        certain, drawn, used = slots.active, list[Sampled](), slots.used()
        for t in range(slots.tokens):
            position, forced = slots.position + 1 + t, slots.forced[:, t]
            drawn.append(sample(logits[:, t], self._sampling, position, certain, forced, t))
            if t + 1 < slots.tokens:
                certain = used[:, t + 1] & certain & (slots.token[:, t + 1] == drawn[-1].tokens)
                if self._stops_early and not certain.any():
                    break
        tokens = [each.tokens for each in drawn]
        accept(slots, torch.stack(tokens + tokens[-1:] * (slots.tokens - len(tokens)), 1))
        self._parts.settle()
        return drawn


def most_tokens(guesses: int, device: torch.device) -> Sequence[int]:
    """Tokens per slot of each verification step that is built, for at most ``guesses`` draft tokens.

    On a CPU, a step only processes the tokens that are in use, so one step serves all numbers. A CUDA graph always
    processes the number it was captured for, so there are several. Without draft tokens, there are no steps.
    """
    if not guesses:
        return ()
    if device.type == "cpu":
        return (guesses + 1,)
    return (*(2**n for n in range(1, guesses.bit_length()) if 2**n <= guesses), guesses + 1)
