"""What runs a step's operations, on which memory: by the kernels there are for them here."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from snapstream.attention import AttentionBackend
from snapstream.cache import LayerCache, StateCache
from snapstream.engine.decode.verification import Parts, Run
from snapstream.kernels.buffers import BufferView, Slots, StepBuffers, allocate_buffers
from snapstream.kernels.cpu.program import unsupported
from snapstream.kernels.operations import Operation
from snapstream.kernels.recurrence import Recur
from snapstream.kernels.sampling import SamplingState
from snapstream.kernels.taking import Advance, Commit, Draw, Verify
from snapstream.models import DecoderModel

logger = logging.getLogger(__name__)


class Programs:
    """Makes what runs steps of a model in the slots of an engine.

    Attributes:
        step: Steps of one token.
        reading: How many of its operations come before a token is chosen. They leave logits.
        dtype: Dtype of activations.
    """

    def __init__(
        self,
        model: DecoderModel,
        backend: AttentionBackend,
        dtype: torch.dtype,
        layers: Sequence[LayerCache],
        slots: Slots,
        logits: Tensor,
        sampling: SamplingState,
    ) -> None:
        """Prepare steps of one token per slot.

        Args:
            model: The model.
            backend: Attention.
            dtype: Dtype of activations.
            layers: The slots' caches.
            slots: Their state, with room for all guesses; steps of fewer tokens use the first columns.
            logits: Where steps of one token leave them, float32 ``[B, vocab]``.
            sampling: What the requests in the slots want.
        """
        self._backend, self._spec, self._layers, self._slots = backend, model.spec, layers, slots
        self._sampling = sampling
        self._operations, self.dtype = list(model.operations()), dtype
        self.reading = len(self._operations)
        self._logits = BufferView("logits", self._spec.vocab_size, dtype=torch.float32)
        every = [*self._operations, Draw(self._logits, sampling)]
        reason = unsupported(every, dtype, *(layer.entry_type for layer in layers))
        if reason and slots.token.device.type == "cpu":
            logger.warning("Decoding uses stock operations, which are slower than the CPU kernels: %s.", reason)
        work = self.work(every, self.slots(1), given={"logits": logits})
        self.step = backend.program(self._operations, work)
        if self.step.draws:
            self.step = backend.program(every, work)

    def settling(self) -> list[Recur]:
        """What brings the states of all layers that have one past accepted tokens."""
        return [replace(each, settles=True) for each in self._operations if isinstance(each, Recur)]

    def slots(self, tokens: int) -> Slots:
        """The state of the slots in steps of so many tokens."""
        few = replace(self._slots, token=self._slots.token[:, :tokens])
        return few if tokens > 1 else replace(few, drafted=None, accepted=None)

    def work(
        self,
        operations: Sequence[Operation],
        slots: Slots,
        layers: Sequence[int] | None = None,
        given: dict[str, Tensor] | None = None,
    ) -> StepBuffers:
        """What operations work on: caches of layers, the model's own if not said, and buffers for what is between."""
        layers = range(self._spec.own_caches) if layers is None else layers
        groups = [self._spec.group_of(layer) for layer in layers]
        (rows, tokens), device = slots.token.shape, slots.token.device
        parts = (part for each in operations for part in each.parts())
        buffers = allocate_buffers(parts, rows * tokens, self.dtype, given, device)
        caches = [self._layers[layer] for layer in layers]
        pending = [
            cache  # it has room for their inputs
            if isinstance(cache, StateCache)
            else cache.pending(tokens)
            for cache in caches
            if tokens > 1
        ]
        return StepBuffers(buffers, slots, caches, pending, self.dtype, groups)

    def run_of(self, operations: Sequence[Operation], work: StepBuffers) -> Run:
        """What runs a list of operations that read several tokens per slot."""
        return self._backend.program(operations, work).run

    def verification(self, tokens: int, follow: Callable[[StepBuffers], Run] | None) -> tuple[Parts, StepBuffers]:
        """A step that reads so many tokens per slot, by the same kernels as one that reads one.

        Args:
            tokens: At most so many, two or more.
            follow: Makes what comes, in every step, between noting what is right and keeping it.
        """
        every = [*self._operations, Verify(self._logits, self._sampling), *self.settling(), Commit(), Advance()]
        work = self.work(every, self.slots(tokens))
        program = self._backend.program(every, work)
        read = functools.partial(program.run, last=self.reading)
        look = functools.partial(program.run, last=self.reading + 1)
        settle: Run = functools.partial(program.run, first=self.reading + 1)
        greedy: Run = program.run
        if follow is not None:
            settle = _one_after_the_other(follow(work), settle)
            greedy = _one_after_the_other(look, settle)
        return Parts(program, read, settle, look, greedy), work


def _one_after_the_other(*runs: Run) -> Run:
    def run() -> None:
        for each in runs:
            each()

    return run
