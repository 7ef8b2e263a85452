"""The plan of an engine's memory, and what it says to people."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from snapstream.errors import MemoryPlanError


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose. All except ``workspace`` and ``tokenizing`` are allocated at the start and kept.

    Attributes:
        weights: Model parameters.
        slots: Compressed caches and states of all slots, and what a saved sequence needs besides: entries that a window
            has lost, and older states.
        staging: Memory for the prompts that are being prefilled, one per lane: the cache of one layer (of each group,
            where layers share caches), its values in multiplication order, the hidden states of all tokens, and the
            last queries.
        workspace: Largest temporaries: those of a prefill chunk, of one layer's votes, or of a decode step; with
            sessions or contexts, also the copy of one sequence that is saved.
        sessions: Caches of conversations between turns, for the maximum number of sessions.
        contexts: Maximum size of all contexts.
        prefixes: Full caches of the prefix cache.
        drafter: Everything of the draft model.
        tokenizing: Memory of the tokenizer for a long text; 0 on CUDA, because it is in host memory.
        metadata: Per-slot state, sampling parameters, token counts, and buffers of decode steps and of a chunk.
        slot_count: Number of slots.
        budget: Entries per slot that were asked for.
        cache_entries: Entries per slot in layers with a budget; in a model without any, of its first window.
        max_model_len: Maximum sequence length.
        lanes: Tokens that each lane has room for; see :func:`snapstream.engine.prefill.staging.lanes`.
        bytes_per_token: Bytes of keys and values of one token over all layers.
        slot_bytes: Bytes of the caches of one slot, and of what they keep for the sake of saved sequences.
        weight_formats: Formats of the weights, for people.
        entry_type: Type of cache entries, for people.
        keeps_workspace: Whether the workspace stays allocated. On CUDA, captured graphs and torch's allocator keep it,
            so it is part of the steady state.
    """

    weights: int
    slots: int
    staging: int
    workspace: int
    sessions: int
    contexts: int
    prefixes: int
    drafter: int
    tokenizing: int
    metadata: int
    slot_count: int
    budget: int
    cache_entries: int
    max_model_len: int
    lanes: tuple[int, ...]
    bytes_per_token: int
    slot_bytes: int
    weight_formats: str
    entry_type: str
    keeps_workspace: bool

    @property
    def total(self) -> int:
        """Peak memory, during prefill."""
        kept = self.weights + self.slots + self.staging + self.sessions + self.contexts + self.prefixes
        return kept + self.drafter + self.metadata + self.workspace + self.tokenizing

    @property
    def steady(self) -> int:
        """Memory while no prompt is being prefilled."""
        return self.total if self.keeps_workspace else self.total - self.workspace - self.tokenizing

    def slots_in(self, cache_memory: int) -> int:
        """Maximum number of slots whose caches alone fit into ``cache_memory`` bytes."""
        return cache_memory // self.slot_bytes


@dataclass(frozen=True)
class EnginePlan:
    """The memory plan of an engine, next to that of the same engine with full caches.

    Attributes:
        ours: Plan with the requested caches.
        full: Plan with full caches of ``max_model_len`` entries.
        available: Bytes that the engine may use; ``None`` if unknown.
        advice: Which settings would fit, if these do not.
        most_slots: Maximum number of slots with so many entries that fit into ``available``.
    """

    ours: MemoryPlan
    full: MemoryPlan
    available: int | None
    advice: str
    most_slots: Callable[[int], int] = field(repr=False, compare=False)

    @property
    def slots_that_fit(self) -> int | None:
        """Maximum number of slots that fit into ``available``; ``None`` if that is unknown."""
        return None if self.available is None else self.most_slots(self.ours.budget)

    @property
    def slots_that_fit_full(self) -> int | None:
        """The same with full caches."""
        return None if self.available is None else self.most_slots(self.full.budget)

    def summary(self) -> str:
        """A summary in one line, compared with full caches."""
        plan, full = self.ours, self.full
        compared = plan.slots < full.slots
        caches = "1 cache" if plan.slot_count == 1 else f"{plan.slot_count} caches"
        return (
            f"memory: weights {gigabytes(plan.weights)} ({plan.weight_formats}), "
            f"{caches} of {plan.cache_entries} entries ({plan.entry_type}) {gigabytes(plan.slots)}"
            + (f" (full caches of {plan.max_model_len}: {gigabytes(full.slots)})" if compared else "")
            + f", staging {gigabytes(plan.staging)}, "
            + (f"sessions {gigabytes(plan.sessions)}, " if plan.sessions else "")
            + (f"contexts {gigabytes(plan.contexts)}, " if plan.contexts else "")
            + (f"prefix cache {gigabytes(plan.prefixes)}, " if plan.prefixes else "")
            + (f"drafter {gigabytes(plan.drafter)}, " if plan.drafter else "")
            + f"metadata {gigabytes(plan.metadata)}; peak {gigabytes(plan.total)}"
            + (f" (full: {gigabytes(full.total)})" if compared else "")
        )

    def check(self) -> None:
        """Check that the engine fits into the available memory.

        Raises:
            MemoryPlanError: It does not; the message says what it needs, and which setting would fit.
        """
        plan = self.ours
        if self.available is None or plan.total <= self.available:
            return
        parts = {"weights": plan.weights, f"{plan.slot_count} slots": plan.slots, "staging": plan.staging}
        parts |= {"workspace": plan.workspace, "metadata": plan.metadata, "tokenizing": plan.tokenizing}
        parts |= {"sessions": plan.sessions}
        parts |= {"contexts": plan.contexts, "prefix cache": plan.prefixes, "drafter": plan.drafter}
        listed = ", ".join(f"{name} {gigabytes(size)}" for name, size in parts.items() if size)
        kept = plan.sessions + plan.contexts + plan.prefixes
        advice = self.advice
        if kept and plan.total - kept <= self.available:
            advice = f"it would fit without sessions, contexts and prefix cache; or {advice}"
        raise MemoryPlanError(
            f"the engine needs {gigabytes(plan.total)} ({listed}), {gigabytes(self.available)} are available; {advice}"
        )


def gigabytes(size: int) -> str:
    """Format a number of bytes, such as ``96.0 KiB``, ``812.0 MiB`` or ``1.95 GiB``."""
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"
