"""What the engine will hold, computed before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from snapstream.compression.scoring import KEY_CHUNK
from snapstream.config import MIN_CAPACITY, CacheBudget, EngineConfig
from snapstream.engine.prefill import staging_length
from snapstream.errors import MemoryPlanError
from snapstream.models.spec import ModelSpec
from snapstream.models.weights import parameter_bytes


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose. Peak of a prefill is the total; without ``workspace`` it is the steady state.

    Attributes:
        weights: Model parameters.
        slots: Compressed caches of all slots.
        staging: The dense cache of the one prompt being read, the window's queries, and one compressed sequence on
            its way to a slot. All but that sequence is allocated once and kept.
        workspace: Largest temporaries of a prefill chunk, of the votes and of sampling.
        sessions: Caches of conversations kept between turns, when there are as many as allowed.
        metadata: Per-slot state, sampling parameters and token counts.
        full_slots: What the slots would take with a full cache of ``max_model_len`` tokens each.
        slot_count: Slots.
        cache_entries: Entries per slot.
        max_model_len: Longest sequence.
        padded_len: Tokens of the staging cache: ``max_model_len`` in whole chunks.
        prefill_chunk: Tokens of a chunk.
        bytes_per_token: Keys and values of one token over all layers.
        available: Bytes the plan may use; ``None`` if unknown.
    """

    weights: int
    slots: int
    staging: int
    workspace: int
    sessions: int
    metadata: int
    full_slots: int
    slot_count: int
    cache_entries: int
    max_model_len: int
    padded_len: int
    prefill_chunk: int
    bytes_per_token: int
    available: int | None

    @property
    def total(self) -> int:
        """Peak, while a prompt is read."""
        return self.steady + self.workspace

    @property
    def steady(self) -> int:
        """What stays while no prompt is being read."""
        return self.weights + self.slots + self.staging + self.sessions + self.metadata

    @property
    def total_full(self) -> int:
        """Peak of the same engine with full caches."""
        return self.total - self.slots + self.full_slots

    def summary(self) -> str:
        """One line for people, with a full cache beside."""
        return (
            f"memory: weights {gigabytes(self.weights)}, {self.slot_count} caches of {self.cache_entries} entries "
            f"{gigabytes(self.slots)} (full caches of {self.max_model_len}: {gigabytes(self.full_slots)}), "
            f"staging {gigabytes(self.staging)}, "
            + (f"sessions {gigabytes(self.sessions)}, " if self.sessions else "")
            + f"metadata {gigabytes(self.metadata)}; peak {gigabytes(self.total)} "
            f"(full: {gigabytes(self.total_full)})"
        )

    def slots_that_fit(self, *, full: bool = False) -> int | None:
        """Most slots that fit ``available``, with this cache or a full one; ``None`` if no limit is known."""
        if self.available is None:
            return None
        return max(0, self.slots_in(self.available - (self.total - self.slots), full=full))

    def slots_in(self, cache_memory: int, *, full: bool = False) -> int:
        """Most slots whose caches alone, small or full, fit so many bytes."""
        return cache_memory // ((self.full_slots if full else self.slots) // self.slot_count)

    def check(self) -> None:
        """Refuse what does not fit.

        Raises:
            MemoryPlanError: Says by how much, and which setting would fit.
        """
        if self.available is None or self.total <= self.available:
            return
        fixed = self.total - self.slots
        hints = []
        if self.slots_that_fit():
            hints.append(f"slots={self.slots_that_fit()}")
        entries = (self.available - fixed) // (self.slot_count * self.bytes_per_token)
        if entries >= MIN_CAPACITY:
            hints.append(f"budget={entries}")
        spare = self.available - (self.total - self.padded_len * self.bytes_per_token)
        shorter = spare // self.bytes_per_token // self.prefill_chunk * self.prefill_chunk
        if self.cache_entries <= shorter < self.max_model_len:
            hints.append(f"max_model_len={shorter}")
        if hints:
            advice = f"it would fit with {' or '.join(hints)}"
        elif self.weights > self.available:
            advice = "the weights alone do not fit; use a smaller model or dtype"
        else:
            advice = "no single setting is enough; lower slots, budget and max_model_len together"
        raise MemoryPlanError(
            f"the engine needs {gigabytes(self.total)} (weights {gigabytes(self.weights)}, {self.slot_count} slots "
            f"{gigabytes(self.slots)}, staging {gigabytes(self.staging)}, workspace {gigabytes(self.workspace)}, "
            f"metadata {gigabytes(self.metadata)}), {gigabytes(self.available)} are available; {advice}"
        )


def plan_memory(
    spec: ModelSpec,
    config: EngineConfig,
    budget: CacheBudget,
    *,
    max_model_len: int,
    dtype: torch.dtype,
    available: int | None = None,
    masked_prefill: bool = False,
) -> MemoryPlan:
    """Compute what an engine with these settings holds.

    Args:
        spec: The model.
        config: The engine.
        budget: The cache of one slot.
        max_model_len: Longest sequence; the staging cache has this length.
        dtype: Of weights and caches.
        available: Bytes the plan may use.
        masked_prefill: Whether the attention backend makes a mask over the whole staging cache.
    """
    item = dtype.itemsize
    per_token = spec.kv_bytes_per_token(dtype)
    capacity, chunk = budget.capacity, config.prefill_chunk
    padded = staging_length(max_model_len, chunk, continued=config.sessions > 0)
    window = spec.layers * spec.heads * budget.queries * spec.head_dim * item
    inner = 2 * spec.intermediate_size
    if spec.experts is not None:  # a row for each expert of a token: what goes in, what is inside, what comes out
        inner = max(inner, spec.experts.chosen * (2 * spec.hidden_size + 3 * spec.experts.inner))
    wide = max(inner, (spec.heads + 2 * spec.kv_heads) * spec.head_dim) + 4 * spec.hidden_size
    chunk_temporaries = chunk * wide * item + 2 * chunk * spec.heads * spec.head_dim * (4 + item)
    if masked_prefill:
        chunk_temporaries += chunk * padded * (spec.heads // spec.kv_heads) * (1 + 4)
    votes = spec.heads * budget.queries * min(padded, KEY_CHUNK) * 4 * 2 + spec.kv_heads * padded * (4 + 8 * 2)
    sampling = 6 * config.slots * spec.vocab_size * 4
    return MemoryPlan(
        weights=parameter_bytes(spec, dtype),
        slots=config.slots * capacity * per_token,
        staging=padded * per_token + window + capacity * per_token,
        workspace=max(chunk_temporaries, votes, sampling),
        sessions=config.sessions * capacity * (per_token + spec.layers * spec.kv_heads * 4),
        # Token counts, a bias and two flags per token of the vocabulary.
        metadata=(config.slots + 1) * (spec.vocab_size * 10 + 100),
        full_slots=config.slots * max_model_len * per_token,
        slot_count=config.slots,
        cache_entries=capacity,
        max_model_len=max_model_len,
        padded_len=padded,
        prefill_chunk=chunk,
        bytes_per_token=per_token,
        available=available,
    )


def available_memory(device: torch.device, fraction: float) -> int | None:
    """Bytes the engine may plan with on a device: ``fraction`` of what is free now; ``None`` if it cannot be told."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * fraction)
    free = _free_host_memory()
    return None if free is None else int(free * fraction)


def gigabytes(size: int) -> str:
    """A size for people: ``812.0 MiB``, ``1.95 GiB``."""
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"


def _free_host_memory() -> int | None:
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    maximum, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if maximum.exists() and used.exists() and maximum.read_text().strip() != "max":
        # Cached file pages count as used but are given up when memory is asked for.
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        limits.append(int(maximum.read_text()) - int(used.read_text()) + int(stat.get("inactive_file", 0)))
    if not limits and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)
