"""Plans the engine's memory before anything is loaded."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from snapstream.cache import StateShape
from snapstream.compression.scoring import KEY_CHUNK
from snapstream.config import KEPT_QUERIES, MIN_CAPACITY
from snapstream.config.policy import ALL, rows_of_queries
from snapstream.engine.decode.evicted import kept_entries
from snapstream.engine.decode.verification import most_tokens
from snapstream.engine.prefill.prefill import ELSEWHERE, SCORED_ROWS
from snapstream.engine.prefill.staging import lanes, staging_length
from snapstream.engine.requests.tokenizing import tokenizing_bytes
from snapstream.engine.settings import Setup
from snapstream.errors import MemoryPlanError
from snapstream.kernels.formats import FORMATS
from snapstream.kernels.operations import ExpertProduct, GatedProduct, Product
from snapstream.kernels.parts import buffer_shapes
from snapstream.kernels.products import keeps_blocks, scratch_bytes
from snapstream.kernels.recurrence import chunk_bytes
from snapstream.kernels.widened import least_tokens, widened_numbers
from snapstream.models.families import tensor_places
from snapstream.models.spec import ModelSpec
from snapstream.models.storage import empty_model, parameter_bytes, quantized_formats, with_formats

SAMPLING_BYTES = 56
"""Bytes per vocabulary token and slot while a token is sampled: sorted logits, their order, and noise."""
DRAWING_BYTES = 16
"""Bytes per vocabulary token that the native loop keeps for every token that it draws at once; on a CPU."""
CHOICE_BYTES = 80
"""Bytes per token and KV head while a layer is compressed: three kinds of votes, copies of them, and their orders."""
MOST_PREFIXES = 2 * 2**30
"""Maximum size of the prefix cache, unless the user asks for more."""
LIBRARY_WORKSPACE = 64 * 2**20
"""Bytes that cuBLAS keeps on a CUDA device."""


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
        workspace: Largest temporaries: those of a prefill chunk, of one layer's votes, or of sampling.
        sessions: Caches of conversations between turns, for the maximum number of sessions.
        contexts: Maximum size of all contexts.
        prefixes: Full caches of the prefix cache.
        drafter: Everything of the draft model.
        tokenizing: Memory of the tokenizer for a long text; 0 on CUDA, because it is in host memory.
        metadata: Per-slot state, sampling parameters, token counts, and buffers of decode steps and of a chunk.
        slot_count: Number of slots.
        cache_entries: Entries per slot in layers with a budget; in a model without any, of its first window.
        max_model_len: Maximum sequence length.
        lanes: Tokens that each lane has room for; see :func:`snapstream.engine.prefill.staging.lanes`.
        bytes_per_token: Bytes of keys and values of one token over all layers.
        slot_bytes: Bytes of the caches of one slot, and of what they keep for the sake of saved sequences.
        weight_formats: Formats of the weights, for people.
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
    cache_entries: int
    max_model_len: int
    lanes: tuple[int, ...]
    bytes_per_token: int
    slot_bytes: int
    weight_formats: str
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
        slots_that_fit: Maximum number of slots that fit into ``available``; ``None`` if that is unknown.
        slots_that_fit_full: The same with full caches.
        advice: Which settings would fit, if these do not.
    """

    ours: MemoryPlan
    full: MemoryPlan
    available: int | None
    slots_that_fit: int | None
    slots_that_fit_full: int | None
    advice: str

    def summary(self) -> str:
        """A summary in one line, compared with full caches."""
        plan, full = self.ours, self.full
        compared = plan.slots < full.slots
        caches = "1 cache" if plan.slot_count == 1 else f"{plan.slot_count} caches"
        return (
            f"memory: weights {gigabytes(plan.weights)} ({plan.weight_formats}), "
            f"{caches} of {plan.cache_entries} entries {gigabytes(plan.slots)}"
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


def plan_engine(setup: Setup, available: int | None = None) -> EnginePlan:
    """Plan the memory of an engine; nothing is allocated.

    Args:
        setup: The engine.
        available: Bytes that it may use; ``None`` if unknown.
    """
    fixed = fixed_sizes(setup)
    slots, length, chunk = setup.config.slots, setup.max_model_len, setup.chunk
    entries = setup.budget.capacity

    def fits(slots: int | None = None, entries: int | None = None, length: int | None = None) -> bool:
        planned = _plan(setup, fixed, slots=slots, entries=entries, length=length)
        return available is not None and planned.total <= available

    def most_slots(entries: int) -> int | None:
        return None if available is None else _largest(lambda many: fits(slots=many, entries=entries))

    ours = _plan(setup, fixed)
    advice = ""
    if available is not None and not fits():
        hints = [("slots", _largest(lambda many: fits(slots=many)))]
        if setup.spec.has_budget:
            budget = _largest(lambda many: fits(entries=many))
            hints.append(("budget", budget if budget >= MIN_CAPACITY else 0))
        shorter = _largest(lambda chunks: fits(length=chunks * chunk)) * chunk
        hints.append(("max_model_len", shorter if entries <= shorter < length else 0))
        found = " or ".join(f"{name}={value}" for name, value in hints if value)
        if fixed.weights > available:
            advice = "the weights alone do not fit; " + _smaller_weights(setup, available)
        elif found:
            advice = f"it would fit with {found}"
        else:
            advice = "no single setting is enough; lower slots, budget and max_model_len together"
    prefixes = _prefixes_by_default(setup, None if available is None else available - ours.total)
    full = _plan(setup, fixed, slots=slots, entries=length)
    return EnginePlan(
        ours=replace(ours, prefixes=prefixes or ours.prefixes),
        full=replace(full, prefixes=prefixes or full.prefixes),
        available=available,
        slots_that_fit=most_slots(entries),
        slots_that_fit_full=most_slots(length),
        advice=advice,
    )


def _smaller_weights(setup: Setup, available: int) -> str:
    """How weights would fit that do not."""
    dtype = setup.types.weights
    if dtype.itemsize > 2 and parameter_bytes(setup.spec, torch.bfloat16) < available:
        return "in bfloat16 they would (dtype)"
    if keeps_blocks(setup.device, dtype) and not setup.spec.stored_as:
        for name in ("q8_0", "q4_k", "q4_0"):  # rows that blocks of 256 do not fit have 8 bits in the second
            formats = quantized_formats(tensor_places(setup.spec), FORMATS[name])
            if parameter_bytes(with_formats(setup.spec, formats), dtype) < available:
                return f"in {name} they would (weights)"
    return "vLLM splits a model across devices (docs/vllm.md)"


def _plan(
    setup: Setup,
    fixed: FixedSizes,
    *,
    slots: int | None = None,
    entries: int | None = None,
    length: int | None = None,
    is_drafter: bool = False,
) -> MemoryPlan:
    """The plan of an engine, optionally with other numbers of slots, entries or tokens than its settings."""
    spec, config, types = setup.spec, setup.config, setup.types
    item = types.activations.itemsize
    slots = config.slots if slots is None else slots
    entries = setup.budget.capacity if entries is None else entries
    length = setup.max_model_len if length is None else length
    spec = spec.for_sequences_of(length)
    chunk, sizes = setup.chunk, spec.sizes(types.cache)
    slot_bytes = sizes.of_slot(entries) + _evicted(setup)
    padded = staging_length(length, chunk, continued=config.goes_on)
    of_lanes = (padded,) if is_drafter else lanes(padded, chunk)
    queries = setup.queries
    entry_bytes = max(entry.nbytes(types.activations) for entry in spec.entries)
    long = least_tokens(setup.device, types.activations)
    widened = fixed.widened if long is not None and padded >= long else 0
    multiplied = min(chunk, long - 1) if widened and long is not None and setup.device.type == "cuda" else chunk
    chunk_temporaries = chunk * (fixed.temporaries + 4 * 8)  # plus tokens and positions
    chunk_temporaries += multiplied * fixed.scratch
    if not (setup.device.type == "cpu" and keeps_blocks(setup.device, types.activations)):  # a CPU's kernels need none
        chunk_temporaries += sum(chunk_bytes(shape, chunk, item) for shape in _states_of(spec))
    is_special = spec.has_sinks or spec.attention_cap > 0
    sizes_of_heads = (spec.heads, spec.largest_head, types.activations)
    chunk_temporaries += setup.backend.prefill_bytes(chunk, padded, *sizes_of_heads, is_special=is_special)
    if setup.device.type == "cpu" and (widened or fixed.has_numbers):  # the library packs a weight before the product
        chunk_temporaries += 2 * spec.largest_inner * spec.hidden_size * item
    voters = KEPT_QUERIES if queries == ALL else queries
    # Logits or directions of a chunk of keys; then three kinds of votes, copies of them, and their orders.
    of_chunk = max(spec.heads * voters * 4 * 2, spec.kv_heads * spec.head_dim * 4 * 3) * min(padded, KEY_CHUNK)
    votes = of_chunk + spec.kv_heads * padded * CHOICE_BYTES
    # The kept entries of one layer are gathered before they are copied to the slot.
    leaving = entries * entry_bytes if spec.has_budget else 0
    scores = min(chunk, SCORED_ROWS) * spec.vocab_size * 4 * 3
    reading = max(chunk_temporaries, votes + leaving, scores)
    sampling = slots * spec.vocab_size * SAMPLING_BYTES
    at_once = min(slots, torch.get_num_threads()) if setup.device.type == "cpu" else 0
    return MemoryPlan(
        weights=fixed.weights,
        slots=slots * slot_bytes,
        staging=sum(_staging(setup, spec, entries) for entries in of_lanes) + widened * item + spec.hidden_size * item,
        # Captured graphs keep the temporaries of sampling separately from those of prefill.
        workspace=(reading + sampling if setup.captured else max(reading, sampling))
        + (LIBRARY_WORKSPACE if setup.device.type == "cuda" else 0),
        sessions=config.session_bytes(sizes.saved([group.window or entries for group in spec.groups])),
        contexts=config.context_bytes,
        prefixes=config.prefix_bytes(_full_bytes(setup, length)) or 0,
        drafter=0 if setup.drafter is None else _plan_of_drafter(setup.drafter, slots, entries, length),
        tokenizing=tokenizing_bytes(length) if setup.device.type == "cpu" else 0,
        # Token counts, a bias, logits and two flags per vocabulary token. Then the permanent buffers of a chunk and of
        # a step, those of attention and those of everything after it.
        metadata=(slots + 1) * (spec.vocab_size * 14 + 100)
        + chunk * (fixed.buffers + 8)
        + slots * fixed.step
        + at_once * spec.vocab_size * DRAWING_BYTES
        + setup.backend.decode_bytes(slots, spec.heads, spec.value_size, _most_entries(spec, entries))
        + _verifying(setup, fixed, slots, entries),
        slot_count=slots,
        cache_entries=spec.groups[0].entries(entries),
        max_model_len=length,
        lanes=of_lanes,
        bytes_per_token=spec.kv_bytes_per_token(types.cache),
        slot_bytes=slot_bytes,
        weight_formats=setup.weight_formats,
        keeps_workspace=setup.captured,
    )


def _staging(setup: Setup, spec: ModelSpec, entries: int) -> int:
    """Bytes of a lane with room for so many tokens: :class:`snapstream.engine.prefill.staging.Staging`."""
    dtype = setup.types.activations
    shapes = [torch.Size((entry.heads, entries, spec.values_of(entry))) for entry in spec.entries]
    together = sum if spec.shared_from else max  # layers without a cache read those of all groups
    packed = together(math.prod(setup.backend.packed_shape(values, dtype)) for values in shapes)
    states = [group for group in spec.groups if group.has_state]
    one_state = max((group.nbytes(group.window or 0, dtype) // len(group.layers) for group in states), default=0)
    queries = spec.heads * rows_of_queries(setup.queries, entries) * spec.entries[0].size
    staged = entries * together(entry.nbytes(dtype) for entry in spec.entries)
    return staged + one_state + (packed + entries * spec.hidden_size + queries) * dtype.itemsize


def _most_entries(spec: ModelSpec, capacity: int) -> int:
    return max(group.entries(capacity) for group in spec.groups if not group.has_state)


def _states_of(spec: ModelSpec) -> list[StateShape]:
    return [group.entry for group in spec.groups if isinstance(group.entry, StateShape)]


def _evicted(setup: Setup) -> int:
    """Bytes per slot of what :mod:`~snapstream.engine.decode.evicted` and ``lagging`` keep for saved sequences."""
    config, dtype = setup.config, setup.types.cache
    if not config.goes_on:
        return 0
    held = kept_entries(max(config.decode_steps, config.guesses + 1))
    groups = (group for group in setup.spec.groups if not group.has_budget)
    return sum(group.nbytes(0 if group.has_state else held, dtype) for group in groups)


def _full_bytes(setup: Setup, length: int) -> int:
    """Bytes of a prompt of ``length`` tokens in the prefix cache; a state is kept for every chunk."""
    spec, dtype = setup.spec, setup.types.activations
    return length * spec.kv_bytes_per_token(dtype) + -(-length // setup.chunk) * spec.state_bytes(dtype)


def _prefixes_by_default(setup: Setup, left: int | None) -> int:
    """Memory of the prefix cache, unless the user says how much: half of what is left, and no more than is of use."""
    if left is None or setup.config.prefix_bytes(0) is not None or setup.queries == ALL:
        return 0
    useful = setup.config.slots * _full_bytes(setup, setup.max_model_len)
    return max(0, min(left // 2, MOST_PREFIXES, useful))


def _plan_of_drafter(setup: Setup, slots: int, entries: int, length: int) -> int:
    """Bytes of the draft model, for as many slots and entries as the model has."""
    length = min(length, setup.max_model_len)
    entries = min(entries, length)
    plan = _plan(setup, fixed_sizes(setup), slots=slots, entries=entries, length=length, is_drafter=True)
    return plan.total - plan.tokenizing  # it receives tokens, so it does not tokenize


def _verifying(setup: Setup, fixed: FixedSizes, slots: int, entries: int) -> int:
    """Bytes of verification steps: pending entries, logits and buffers, for each size of step."""
    spec, item, guesses = setup.spec, setup.types.activations.itemsize, setup.config.guesses
    rows = slots * sum(most_tokens(guesses, setup.device))
    attending = setup.backend.decode_bytes(rows, spec.heads, spec.value_size, _most_entries(spec, entries))
    held = rows * (spec.kv_bytes_per_token(setup.types.cache) + spec.vocab_size * 4 + fixed.step) + attending
    if spec.reads_ahead:  # the next-token module's step, and its hidden states
        held += rows * (fixed.step + 5 * spec.hidden_size * item) + attending
    return held


@dataclass(frozen=True)
class FixedSizes:
    """Bytes that depend on the model alone.

    Attributes:
        weights: Model parameters.
        buffers: Buffers between operations, per token; without hidden states and logits.
        temporaries: Most that exists within an operation, per token.
        scratch: What products with blocks need besides, per token that they multiply.
        step: All that a token takes while a step processes it; without logits.
        widened: Numbers of the weights of one layer that long prompts widen, not bytes.
        has_numbers: Whether any weight of a product is not in blocks.
    """

    weights: int
    buffers: int
    temporaries: int
    scratch: int
    step: int
    widened: int
    has_numbers: bool


def fixed_sizes(setup: Setup) -> FixedSizes:
    """Measure a model that is not loaded."""
    spec, dtype = setup.spec, setup.types.activations
    model = empty_model(spec, setup.types.weights)
    operations = [*model.operations(), *(model.enter_ahead() if spec.reads_ahead else ())]
    shapes = buffer_shapes((part for each in operations for part in each.parts()), dtype)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    buffers = sum(shape.nbytes for name, shape in shapes.items() if name not in ELSEWHERE)
    products = (each for each in operations if isinstance(each, Product | GatedProduct | ExpertProduct))
    scratch = max(scratch_bytes(each.weight, setup.device) for each in products)
    temporaries = _temporaries(spec, dtype.itemsize)
    step = buffers + temporaries + scratch + spec.hidden_size * dtype.itemsize
    widened = 0
    if spec.stored_as and least_tokens(setup.device, dtype) is not None:
        widened = max(widened_numbers(model.operations_of(layer)) for layer in range(spec.cached_layers))
    return FixedSizes(weights, buffers, temporaries, scratch, step, widened, model.multiplies_numbers)


def _temporaries(spec: ModelSpec, item: int) -> int:
    """Bytes that exist within an operation for one token: a product before it is gated, added or copied, for example.

    Args:
        spec: The model.
        item: Bytes of an element; some sums are float32 in any case.
    """
    hidden, heads = spec.hidden_size, spec.heads
    angles = 4 * (spec.largest_head if spec.latent is None else spec.latent.rope) * 4
    attention = heads * spec.value_size * item
    if spec.latent is None:
        gates = heads if spec.gates_attention else 0
        mixed = (entry.size + entry.heads * entry.value for entry in _states_of(spec))
        attended = ((gates + heads + 2 * entry.heads) * entry.size for entry in spec.entries)
        projections = max(*attended, *mixed, 0) * item
    else:
        shape = spec.latent
        projections = heads * (shape.nope + shape.rank + shape.value) * item
    feed_forward = 2 * spec.largest_inner * item
    if spec.layer_inputs is not None:  # rows of the table
        feed_forward = max(feed_forward, spec.layers * spec.layer_inputs.size * (item + 4))
    if spec.experts is not None:
        many, width = spec.experts.chosen, spec.experts.inner
        choosing = spec.experts.count * 4 * 4
        biases = 2 if spec.experts.biased else 1  # of each row's expert, gathered beside the rows
        gathered, combined = many * max(hidden, 2 * width) * item * biases, many * hidden * (item + 4) + hidden * 4
        feed_forward = max(feed_forward, choosing, 2 * spec.experts.shared_inner * item, gathered, combined)
    return angles + max(attention, projections, feed_forward, 2 * hidden * item)


def _largest(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, if every smaller one fits too; 0 if none does."""
    low, high = 0, 1
    while fits(high) and high < 2**40:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def available_memory(device: torch.device, fraction: float) -> int | None:
    """Bytes that the engine may use: ``fraction`` of the device's free memory; ``None`` if that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * fraction)
    free = _free_host_memory()
    return None if free is None else int(free * fraction)


def gigabytes(size: int) -> str:
    """Format a number of bytes, such as ``96.0 KiB``, ``812.0 MiB`` or ``1.95 GiB``."""
    if size < 2**20:
        return f"{size / 2**10:.1f} KiB"
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"


def _free_address_space() -> list[int]:
    """Bytes that the process may still allocate, if it has a limit (``ulimit -v``)."""
    try:
        import resource
    except ImportError:  # Unix only
        return []
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    status = Path("/proc/self/statm")
    if limit == resource.RLIM_INFINITY or not status.exists():
        return []
    return [max(0, limit - int(status.read_text().split()[0]) * resource.getpagesize())]


def _free_host_memory() -> int | None:
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    maximum, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if maximum.exists() and used.exists() and maximum.read_text().strip() != "max":
        # Cached file pages count as used, but are freed when memory is needed.
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        limits.append(int(maximum.read_text()) - int(used.read_text()) + int(stat.get("inactive_file", 0)))
    limits += _free_address_space()
    if not limits and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)
