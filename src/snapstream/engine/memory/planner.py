"""Plans the engine's memory before anything is loaded.

The engine is built as it will be, but on the meta device, where tensors have no contents; what it allocates is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from snapstream.cache import QuantizedType, type_name
from snapstream.config import MIN_CAPACITY, CacheBudget
from snapstream.config.policy import ALL
from snapstream.engine.decode.workspace import decode_workspace, kept_by_steps
from snapstream.engine.memory.plan import EnginePlan, MemoryPlan
from snapstream.engine.prefill.staging import lanes, staging_length
from snapstream.engine.prefill.workspace import prefill_workspace
from snapstream.engine.requests.tokenizing import tokenizing_bytes
from snapstream.engine.runner import ModelRunner, smaller_budgets
from snapstream.engine.settings import Setup
from snapstream.errors import ConfigurationError
from snapstream.inference import in_inference_mode
from snapstream.kernels.counting import Counted
from snapstream.kernels.formats import FORMATS
from snapstream.kernels.products import keeps_blocks
from snapstream.kernels.uncompiled import without_compiler
from snapstream.models import DecoderModel
from snapstream.models.families import tensor_places
from snapstream.models.storage import empty_model, parameter_bytes, quantized_formats, with_formats

MOST_PREFIXES = 2 * 2**30
"""Maximum size of the prefix cache, unless the user asks for more."""
MOST_SLOTS = 2**20
"""Maximum number of slots that a plan suggests."""
LIBRARY_WORKSPACE = 64 * 2**20
"""Bytes that cuBLAS keeps on a CUDA device."""


def plan_engine(setup: Setup, available: int | None = None) -> EnginePlan:
    """Plan the memory of an engine; nothing is allocated.

    Args:
        setup: The engine.
        available: Bytes that it may use; ``None`` if unknown.
    """
    models = _models(setup)
    slots, length, chunk = setup.config.slots, setup.max_model_len, setup.chunk
    entries = setup.budget.capacity

    def size(slots: int = slots, entries: int = entries, length: int = length) -> int:
        changed = _changed(setup, slots, entries, length)
        return _plan(changed, models if length == setup.max_model_len else _models(changed)).total

    def most(of: Callable[[int], int], limit: int = MOST_SLOTS) -> int:
        return 0 if available is None else _largest(of, available, limit)

    ours = _plan(setup, models)
    advice = ""
    if available is not None and ours.weights > available:
        advice = "the weights alone do not fit; " + _smaller_weights(setup, available)
    elif available is not None and ours.total > available:
        hints = [("slots", most(lambda many: size(slots=many), slots))]
        if setup.spec.has_budget:
            budget = most(lambda many: size(entries=many + MIN_CAPACITY - 1), entries)
            hints.append(("budget", budget and budget + MIN_CAPACITY - 1))
        shorter = most(lambda chunks: size(length=chunks * chunk), -(-length // chunk)) * chunk
        hints.append(("max_model_len", shorter if entries <= shorter < length else 0))
        found = " or ".join(f"{name}={value}" for name, value in hints if value)
        if setup.config.kv_dtype == "auto" and isinstance(setup.types.cache, QuantizedType):  # chosen by the budget
            found = found.replace("budget=", f"kv_dtype={setup.types.cache} and budget=")
        if found:
            advice = f"it would fit with {found}"
        else:
            advice = "no single setting is enough; lower slots, budget and max_model_len together"
    full = _plan(_changed(setup, slots, length, length), models)
    prefixes = _prefixes_by_default(setup, None if available is None else available - ours.total)
    return EnginePlan(
        ours=replace(ours, prefixes=prefixes or ours.prefixes),
        full=replace(full, prefixes=prefixes or full.prefixes),
        available=available,
        advice=advice,
        most_slots=lambda entries: most(lambda many: size(slots=many, entries=entries)),
    )


def _changed(setup: Setup, slots: int, entries: int, length: int) -> Setup:
    """The setup with other numbers of slots, entries and tokens."""
    budget = setup.budget
    if entries != budget.capacity:
        try:
            budget = budget.resized(entries)
        except ConfigurationError:  # too few for the policy's window
            budget = CacheBudget.preset("full", max(MIN_CAPACITY, entries))
    drafter = setup.drafter
    if drafter is not None:
        shorter = min(length, drafter.max_model_len)
        drafter = _changed(drafter, slots, min(entries, shorter), shorter)
    spec, config = setup.spec.for_sequences_of(length), replace(setup.config, slots=slots)
    return replace(setup, spec=spec, config=config, budget=budget, max_model_len=length, drafter=drafter)


def _models(setup: Setup) -> list[DecoderModel]:
    """The model on the meta device, and the draft model, if there is one."""
    others = [] if setup.drafter is None else _models(setup.drafter)
    return [empty_model(setup.spec, setup.types.weights), *others]


@without_compiler()
@in_inference_mode
def _plan(setup: Setup, models: Sequence[DecoderModel], *, is_drafter: bool = False) -> MemoryPlan:
    """The plan of an engine with these models; see :func:`_models`."""
    spec, config, device = setup.spec, setup.config, setup.device
    model, *others = models
    slots, entries, length = config.slots, setup.budget.capacity, setup.max_model_len
    padded = staging_length(length, setup.chunk, continued=config.goes_on)
    of_lanes = (padded,) if is_drafter else lanes(padded, setup.chunk)
    counted = Counted()
    with counted:
        runner = ModelRunner(setup, model, of_lanes)
    held = counted.held
    prefill, decode = runner.prefiller, runner.decoder
    budgets = smaller_budgets(setup.budget, length // 2, setup.queries)
    reading = prefill_workspace(prefill, budgets, setup.types.cache, device)
    deciding = decode_workspace(decode, device)
    sizes = spec.sizes(setup.types.cache)
    saved = sizes.saved([group.window or entries for group in spec.groups])
    # Captured graphs keep the temporaries of steps separately from those of prefill.
    workspace = reading + deciding if setup.captured else max(reading, deciding)
    workspace += kept_by_steps(decode, device)
    workspace += saved if config.goes_on else 0  # a sequence on its way from its slot to a store
    return MemoryPlan(
        weights=sum(parameter.nbytes for parameter in model.parameters()),
        slots=decode.slot_bytes,
        staging=prefill.staging_bytes,
        workspace=workspace + (LIBRARY_WORKSPACE if device.type == "cuda" else 0),
        sessions=config.session_bytes(saved),
        contexts=config.context_bytes,
        prefixes=config.prefix_bytes(_full_bytes(setup)) or 0,
        drafter=0 if setup.drafter is None else _plan_of_drafter(setup.drafter, others),
        tokenizing=tokenizing_bytes(length) if device.type == "cpu" else 0,
        metadata=held - decode.slot_bytes - prefill.staging_bytes,
        slot_count=slots,
        budget=entries,
        cache_entries=spec.groups[0].entries(entries),
        max_model_len=length,
        lanes=of_lanes,
        bytes_per_token=spec.kv_bytes_per_token(setup.types.cache),
        slot_bytes=decode.slot_bytes // slots,
        weight_formats=setup.weight_formats,
        entry_type=type_name(setup.types.cache),
        keeps_workspace=setup.captured,
    )


def _plan_of_drafter(setup: Setup, models: Sequence[DecoderModel]) -> int:
    """Bytes of the draft model; it receives tokens, so it does not tokenize."""
    plan = _plan(setup, models, is_drafter=True)
    return plan.total - plan.tokenizing


def _full_bytes(setup: Setup) -> int:
    """Bytes of the longest prompt in the prefix cache; a state is kept for every chunk."""
    spec, entry_type, length = setup.spec, setup.types.of_prefixes, setup.max_model_len
    pieces = -(-length // setup.chunk)
    return length * spec.kv_bytes_per_token(entry_type) + pieces * spec.fixed_bytes(entry_type)


def _prefixes_by_default(setup: Setup, left: int | None) -> int:
    """Memory of the prefix cache, unless the user says how much: half of what is left, and no more than is of use."""
    if left is None or setup.config.prefix_bytes(0) is not None or setup.queries == ALL:
        return 0
    return max(0, min(left // 2, MOST_PREFIXES, setup.config.slots * _full_bytes(setup)))


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


def _largest(size: Callable[[int], int], available: int, most: int) -> int:
    """The largest number up to ``most`` whose size fits; 0 if none does.

    Sizes grow about linearly, so a few steps of the secant method are enough.
    """
    low, of_low = 1, size(1)
    if of_low > available:
        return 0
    high, of_high = 2, size(min(2, most))
    while of_high <= available and high < most:
        step = max(1, (of_high - of_low) // (high - low))
        reached = high + (available - of_high) // step + 1
        low, of_low, high = high, of_high, min(max(2 * high, reached), 8 * high, most)
        of_high = size(high)
    if of_high <= available:
        return min(high, most)
    while high - low > 1:
        guess = low + (available - of_low) * (high - low) // max(1, of_high - of_low)
        # One beside the guess: soon it is shown from both sides.
        middle = min(max(guess, low + 1), high - 1)
        of_middle = size(middle)
        if of_middle <= available:
            low, of_low = middle, of_middle
            if low + 1 < high and size(low + 1) > available:
                return low
        else:
            high, of_high = middle, of_middle
    return low
