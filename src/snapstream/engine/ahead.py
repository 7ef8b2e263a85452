"""The model's own next-token module in decoding: it reads what a step has made certain, and guesses on from there.

Entry ``i`` of its cache is made of the model's state at token ``i`` and of token ``i + 1``; so it has as many entries
as the model's layers, at the same places, and is compressed, turned and saved with them. Its step is part of every step
that verifies guesses: what that has read and taken is what the module needs, and no entry is ever missing.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from snapstream.cache import LayerCache
from snapstream.engine.graphs import StaticGraph
from snapstream.engine.programs import Programs
from snapstream.engine.verification import Run, most_tokens
from snapstream.kernels.operations import Commit
from snapstream.kernels.parts import Machine, Part
from snapstream.models import DecoderModel


class Ahead:
    """Guesses of what comes after the next token of each slot.

    Attributes:
        device: Where they are made.
    """

    def __init__(
        self, model: DecoderModel, programs: Programs, cache: LayerCache, *, guesses: int, captured: bool
    ) -> None:
        """Allocate what is between.

        Args:
            model: With a next-token module.
            programs: Of the engine.
            cache: The module's, ``[B, N, C, D]``.
            guesses: Most of each slot.
            captured: Capture graphs, on CUDA.
        """
        weight, slots = model.embedding.weight, len(cache.keys)
        self.device = device = weight.device
        self._model = model
        self._steps = {tokens: _Step(model, programs, cache, tokens) for tokens in most_tokens(guesses, device)}
        # What was guessed lately, and the state that each guess comes of.
        self._guesses = torch.zeros(slots, guesses, dtype=torch.int64, device=device)
        self._states = torch.zeros(slots, guesses, weight.shape[1], dtype=weight.dtype, device=device)
        self._looks = [
            StaticGraph(functools.partial(self._look, known), device, captured=captured) for known in range(guesses)
        ]

    def warm_up(self, pool: object = None) -> None:
        """Run and capture the graphs."""
        for look in self._looks:
            look.warm_up(pool)

    def follow(self, machine: Machine) -> Run:
        """What is run where it has been noted which tokens of a step are right, and before they are kept.

        Args:
            machine: Of the step.
        """
        return functools.partial(self._follow, machine, self._steps[machine.slots.tokens])

    def guess(self, most: int) -> Tensor:
        """Guesses after the next token of each slot that took part in the last step, int64 ``[B, most]``."""
        for look in self._looks[:most]:
            look()
        return self._guesses[:, :most].clone()

    def _follow(self, machine: Machine, step: _Step) -> None:
        slots = machine.slots
        assert slots.accepted is not None
        step.token.copy_(slots.taken[: slots.tokens].T)
        step.drafted.copy_(slots.accepted - 1)
        step.hidden.copy_(step.of_tokens(machine))
        step.read()
        step.commit()
        last = (slots.accepted - 1).clamp(0, slots.tokens - 1)[:, None, None]
        self._states[:, 0] = step.made.gather(1, last.expand(-1, 1, step.made.shape[-1]))[:, 0]

    def _look(self, known: int) -> None:
        """Guess one token more, where so many are guessed; nothing is stored."""
        if known:
            step = self._steps[min(tokens for tokens in self._steps if tokens >= known)]
            step.token[:, :known] = self._guesses[:, :known]
            step.drafted.fill_(known - 1)
            step.hidden[:, :known] = self._states[:, :known]
            step.read()
            self._states[:, known] = step.made[:, known - 1]
        self._guesses[:, known] = self._model.head(self._states[:, known]).argmax(-1)


class _Step:
    """The module reads up to so many tokens of each slot.

    Attributes:
        token: Those, int64 ``[B, T]``.
        drafted: How many there are, less one; int64 ``[B]``.
        hidden: States before each, ``[B, T, hidden]``.
        made: Its own states, the same.
        read: Reads.
        commit: Keeps the entries of tokens that are certain.
    """

    def __init__(self, model: DecoderModel, programs: Programs, cache: LayerCache, tokens: int) -> None:
        slots, operations = programs.slots(tokens), list(model.operations_ahead())
        self.token, self.drafted = torch.zeros_like(slots.token), torch.zeros_like(slots.position)
        machine = programs.machine(operations, replace(slots, token=self.token, drafted=self.drafted), [cache])
        self._normed = Part("normed", model.spec.hidden_size)
        self.hidden = machine.buffers["hidden"].view(*self.token.shape, -1)
        self.made = self.of_tokens(machine)
        self.read, self.commit = programs.run_of(operations, machine), programs.run_of([Commit()], machine)

    def of_tokens(self, machine: Machine) -> Tensor:
        """States of all tokens of a step, ``[B, T, hidden]``, in its own memory."""
        states = self._normed.of(machine.buffers)
        return states.view(len(self.token), -1, states.shape[-1])
