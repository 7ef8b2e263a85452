"""Drafting with the model's own next-token module: it processes the tokens a step has accepted, and drafts the next.

Entry ``i`` of its cache is computed from the model's hidden state at token ``i`` and from token ``i + 1``. Its cache
therefore has as many entries as those of the model's layers, at the same places, and is compressed, reordered and saved
together with them. The module's step is part of every verification step: the tokens and hidden states of that step are
exactly the module's inputs, so no entry is ever missing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from snapstream.engine.decode.graphs import StaticGraph
from snapstream.engine.decode.programs import Programs
from snapstream.engine.decode.verification import Run
from snapstream.kernels.buffers import BufferView, Slots, StepBuffers
from snapstream.kernels.operations import Product
from snapstream.kernels.taking import Commit
from snapstream.models import DecoderModel


class Mtp:
    """Drafts the tokens after the next token of each slot.

    Attributes:
        device: The device it runs on.
    """

    def __init__(
        self,
        model: DecoderModel,
        programs: Programs,
        slots: int,
        *,
        sizes: Sequence[int],
        guesses: int,
        captured: bool,
    ) -> None:
        """Allocate the buffers.

        Args:
            model: A model with a next-token module.
            programs: The engine's programs.
            slots: Slots (``B``).
            sizes: Tokens per slot of each verification step that is built.
            guesses: Maximum number of draft tokens per slot.
            captured: Whether to capture CUDA graphs; ignored on other devices.
        """
        self.device = device = model.device
        self._steps = {tokens: _Step(model, programs, tokens) for tokens in sizes}
        # The latest draft tokens, and the hidden state that each one was predicted from.
        self._guesses = torch.zeros(slots, guesses, dtype=torch.int64, device=device)
        self._states = torch.zeros(slots, guesses, model.spec.hidden_size, dtype=programs.dtype, device=device)
        # Logits of one such state per slot, and what computes them.
        spec, dtype = model.spec, programs.dtype
        state, logits = BufferView("state", spec.hidden_size), BufferView("logits", spec.vocab_size)
        self._head = {
            view.buffer: torch.zeros(slots, view.size, dtype=dtype, device=device) for view in (state, logits)
        }
        every = Slots.that_see(torch.ones(slots, dtype=torch.int64, device=device), 1)
        work = StepBuffers(self._head, every, [], [], dtype)
        self._say = programs.run_of([Product(state, logits, model.head.weight.value)], work)
        self._looks = [
            StaticGraph(functools.partial(self._look, known), device, captured=captured) for known in range(guesses)
        ]

    def warm_up(self, pool: object = None) -> None:
        """Run and capture the graphs."""
        for look in self._looks:
            look.warm_up(pool)

    def follow(self, work: StepBuffers) -> Run:
        """Return the module's part of a step. It runs after tokens have been verified and before they are committed.

        Args:
            work: The step's buffers.
        """
        return functools.partial(self._follow, work, self._steps[work.slots.tokens])

    def guess(self, most: int) -> Tensor:
        """Draft ``most`` tokens after the next token of each slot of the last step; int64 ``[B, most]``."""
        for look in self._looks[:most]:
            look()
        return self._guesses[:, :most].clone()

    def _follow(self, work: StepBuffers, step: _Step) -> None:
        slots = work.slots
        assert slots.accepted is not None
        step.token.copy_(slots.taken[: slots.tokens].T)
        step.drafted.copy_(slots.accepted - 1)
        step.hidden.copy_(step.of_tokens(work))
        step.read()
        step.commit()
        last = (slots.accepted - 1).clamp(0, slots.tokens - 1)[:, None, None]
        self._states[:, 0] = step.made.gather(1, last.expand(-1, 1, step.made.shape[-1]))[:, 0]

    def _look(self, known: int) -> None:
        """Draft one more token, given ``known`` draft tokens; nothing is stored."""
        if known:
            step = self._steps[min(tokens for tokens in self._steps if tokens >= known)]
            step.token[:, :known] = self._guesses[:, :known]
            step.drafted.fill_(known - 1)
            step.hidden[:, :known] = self._states[:, :known]
            step.read()
            self._states[:, known] = step.made[:, known - 1]
        self._head["state"].copy_(self._states[:, known])
        self._say()
        self._guesses[:, known] = self._head["logits"].argmax(-1)


class _Step:
    """A step of the module over up to ``T`` tokens per slot.

    Attributes:
        token: The input tokens, int64 ``[B, T]``.
        drafted: Number of input tokens minus one, int64 ``[B]``.
        hidden: The model's hidden state before each token, ``[B, T, hidden]``.
        made: The module's own hidden states, ``[B, T, hidden]``.
        read: Runs the module.
        commit: Stores the entries of accepted tokens.
    """

    def __init__(self, model: DecoderModel, programs: Programs, tokens: int) -> None:
        slots, operations = programs.slots(tokens), list(model.mtp_operations())
        self.token, self.drafted = torch.zeros_like(slots.token), torch.zeros_like(slots.position)
        given = replace(slots, token=self.token, drafted=self.drafted)
        work = programs.work(operations, given, [model.spec.layers])
        self._normed = BufferView("normed", model.spec.hidden_size)
        self.hidden = work.buffers["hidden"].view(*self.token.shape, -1)
        self.made = self.of_tokens(work)
        self.read, self.commit = programs.run_of(operations, work), programs.run_of([Commit()], work)

    def of_tokens(self, work: StepBuffers) -> Tensor:
        """Normalized hidden states of all tokens of a step, ``[B, T, hidden]``; a view of the step's own memory."""
        states = self._normed.of(work.buffers)
        return states.view(len(self.token), -1, states.shape[-1])
