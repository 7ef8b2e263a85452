"""Older states of every slot, so that a saved sequence has the state after its last token.

A launch may decode past the end of a text. Keys and values of later tokens can be left out, but a state has taken in
all tokens. So each slot has a second state, which lags behind. A slot keeps the inputs since then, and a state is
brought up to any of these tokens by feeding them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from snapstream.cache import LayerCache, StateCache
from snapstream.config import EngineConfig
from snapstream.engine.decode.evicted import FURTHEST
from snapstream.engine.decode.programs import Programs
from snapstream.engine.decode.verification import Run
from snapstream.inference import in_inference_mode
from snapstream.kernels.buffers import Slots, StepBuffers, allocate_buffers
from snapstream.models.spec import ModelSpec


class Lagging:
    """The lagging states of all slots, and how many tokens each has taken in."""

    def __init__(
        self, spec: ModelSpec, programs: Programs, caches: Sequence[LayerCache], slots: Slots, most: int
    ) -> None:
        """Allocate memory.

        Args:
            spec: The model.
            programs: What runs operations here.
            caches: The slots' caches, one per layer.
            slots: State of the slots.
            most: Maximum number of tokens that a launch stores in a slot.
        """
        self._programs, self._slots, self._most = programs, slots, most
        self._number = [layer for group in spec.groups if group.has_state for layer in group.layers]
        held = [cache for cache in caches if isinstance(cache, StateCache)]
        self._current = held
        self._states = [StateCache([torch.zeros_like(one.matrices), one.tensors[1]]) for one in held]
        # Operations find their states by their place among those with a state.
        self._settling = [replace(each, layer=at) for at, each in enumerate(programs.settling())]
        self._taken_in = torch.zeros_like(slots.position)
        self._coming = torch.zeros_like(slots.position)
        self._advance = self._program(self._states, self._taken_in, self._coming, most)

    @property
    def nbytes(self) -> int:
        """Bytes of the lagging states; the recorded inputs are those of the slots."""
        return sum(one.matrices.nbytes for one in self._states)

    def _program(self, states: Sequence[StateCache], position: torch.Tensor, accepted: torch.Tensor, most: int) -> Run:
        """What feeds ``accepted`` of at most ``most`` inputs from ``position`` on to states."""
        slots = Slots.that_settle(position, accepted, most)
        dtype, device = self._programs.dtype, position.device
        parts = (part for each in self._settling for part in each.parts())
        buffers = allocate_buffers(parts, 1, dtype, device=device)  # which are not used
        return self._programs.run_of(self._settling, StepBuffers(buffers, slots, states, states, dtype))

    def warm_up(self) -> None:
        """Run what launches need once, while all slots are free."""
        self._coming.zero_()
        self._advance()

    @in_inference_mode
    def begin(self, slot: int, position: int) -> None:
        """Take over the state of a slot, which has taken in ``position`` tokens."""
        self._taken_in[slot].fill_(position)
        for lagging, current in zip(self._states, self._current, strict=True):
            lagging.matrices[slot].copy_(current.matrices[slot])

    @in_inference_mode
    def before_launch(self) -> None:
        """Follow the slots at a distance, so that no input is overwritten that a lagging state still needs."""
        behind = self._slots.position - FURTHEST - self._taken_in
        self._coming.copy_(behind.clamp(0, self._most))
        self._advance()
        self._taken_in.add_(self._coming)

    @in_inference_mode
    def states(self, slot: int, tokens: int, into: Sequence[LayerCache]) -> None:
        """Copy the states of a slot out of it, as they were after its first ``tokens`` tokens.

        Args:
            slot: Index of the slot.
            tokens: How many; at most :data:`FURTHEST` fewer than at the last launch.
            into: A cache of one row for each layer of the model.
        """
        first = int(self._taken_in[slot])
        assert first <= tokens, (first, tokens)
        copies = [StateCache([one.matrices[slot : slot + 1].clone(), one.row(slot).tensors[1]]) for one in self._states]
        device = self._taken_in.device
        if tokens > first:
            position, count = (torch.full((1,), each, device=device) for each in (first, tokens - first))
            self._program(copies, position, count, FURTHEST + self._most)()
        for layer, copied in zip(self._number, copies, strict=True):
            into[layer].put(copied, tokens)


def inputs_to_keep(config: EngineConfig) -> int:
    """Inputs that slots must keep besides those that a convolution looks back to."""
    most = max(config.decode_steps, config.guesses + 1)
    return FURTHEST + most if config.goes_on else config.guesses + 1
