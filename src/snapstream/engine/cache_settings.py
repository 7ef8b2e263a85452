"""The cache of an engine's slots: the type of its entries, and how many there are."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TypeAlias

import torch

from snapstream.cache import EntryType, QuantizedType, type_name
from snapstream.cache.codes import BLOCK, rotation_of
from snapstream.config import MIN_CAPACITY, CacheBudget, MemoryBudget
from snapstream.errors import ConfigurationError
from snapstream.models.spec import ModelSpec
from snapstream.sizes import is_bytes, parse_bytes

logger = logging.getLogger(__name__)

Budget: TypeAlias = CacheBudget | MemoryBudget | int | str | None
"""What users may give: a budget, a number of entries, a size such as ``2GiB``, or ``None`` for a full cache."""
FEW_BITS = "int4"
"""Entries of a cache that has a budget in bytes and cannot hold everything: the type that answered most questions at
equal bytes (docs/experiments.md)."""


def choose_cache(
    budget: Budget, kv_dtype: str, dtype: torch.dtype, spec: ModelSpec, max_model_len: int, *, reads_codes: bool
) -> tuple[CacheBudget, EntryType]:
    """The cache budget of one slot, and the type of its entries.

    A budget in bytes with ``kv_dtype="auto"`` keeps the dtype of activations if sequences of ``max_model_len`` tokens
    fit; otherwise entries are codes of few bits, if the model's heads can have them.

    Args:
        budget: See :data:`Budget`.
        kv_dtype: One of :data:`~snapstream.config.engine.KV_DTYPES`.
        dtype: Dtype of activations.
        spec: The model, with windows as for sequences of ``max_model_len`` tokens.
        max_model_len: Maximum sequence length.
        reads_codes: Whether attention reads codes as they are; otherwise they would be slow, and are not chosen.

    Raises:
        ConfigurationError: The budget is invalid or too small, or the model's entries cannot have the type.
    """
    entry_type = choose_entry_type(kv_dtype, dtype, spec)
    if isinstance(budget, str) and is_bytes(budget):
        budget = MemoryBudget(parse_bytes(budget, "budget"))
    if not isinstance(budget, MemoryBudget):
        return choose_budget(budget, max_model_len), entry_type
    entries = entries_in(budget.nbytes, entry_type, spec)
    if kv_dtype == "auto" and entries < max_model_len and reads_codes and _can_be_codes(spec):
        entry_type = choose_entry_type(FEW_BITS, dtype, spec)
        entries = entries_in(budget.nbytes, entry_type, spec)
    if entries < MIN_CAPACITY:
        least = spec.fixed_cache_bytes(entry_type) + MIN_CAPACITY * spec.budget_bytes_per_token(entry_type)
        if not spec.has_budget:
            raise ConfigurationError(
                f"budget: the windows of this model alone take {least} bytes of a sequence, more than {budget.nbytes}"
            )
        raise ConfigurationError(
            f"budget: {budget.nbytes} bytes have room for {max(0, entries)} {type_name(entry_type)} entries per layer; "
            f"give at least {least} bytes for {MIN_CAPACITY}"
        )
    return budget.of(min(entries, max_model_len)), entry_type


def entries_in(nbytes: int, entry_type: EntryType, spec: ModelSpec) -> int:
    """How many entries per layer with a budget fit into so many bytes of one sequence; negative if even others do not.

    Sliding windows and states have their size whatever the budget. A model that has nothing else fits, or does not.
    """
    left = nbytes - spec.fixed_cache_bytes(entry_type)
    each = spec.budget_bytes_per_token(entry_type)
    if each == 0:
        return spec.max_position if left >= 0 else -1
    return left // each


def _can_be_codes(spec: ModelSpec) -> bool:
    """Whether the entries of all layers can be codes that kernels read."""
    return all(entry.size % BLOCK == 0 for entry in spec.entries) and _unsupported_rank(spec) is None


def choose_entry_type(name: str, dtype: torch.dtype, spec: ModelSpec, setting: str = "kv_dtype") -> EntryType:
    """The type of cache entries called ``name``; ``auto`` is the dtype of activations.

    Args:
        name: One of :data:`~snapstream.config.engine.KV_DTYPES`.
        dtype: Dtype of activations.
        spec: The model.
        setting: Where it was said.

    Raises:
        ConfigurationError: The model's entries cannot have it.
    """
    if name == "auto":
        return dtype
    kind = QuantizedType.named(name, dtype)
    if kind is None:
        number: torch.dtype = getattr(torch, name)
        return number
    for entry in spec.entries:
        reason = kind.unsupported(entry.size, None if entry.latent else entry.size)
        if reason:
            raise ConfigurationError(f"{setting} is {name!r}: {reason}; use int8")
    reason = _unsupported_rank(spec)
    if reason:
        raise ConfigurationError(f"{setting} is {name!r}: {reason}; use auto")
    # Latents have no values of their own.
    return replace(kind, values=kind.keys) if all(entry.latent for entry in spec.entries) else kind


def _unsupported_rank(spec: ModelSpec) -> str | None:
    """Why latents cannot be codes: a rotation must not mix their values with the rest of their keys."""
    mixed = [rotation_of(entry.size, latent=True) for entry in spec.entries if entry.latent]
    wrong = next((width for width in mixed if spec.value_size % width), None)
    return None if wrong is None else f"codes need latents whose rank is a multiple of {wrong}, not {spec.value_size}"


def choose_budget(budget: CacheBudget | int | str | None, max_model_len: int) -> CacheBudget:
    """The cache budget of one slot, which never has more entries than a sequence can have tokens.

    ``None`` means a cache for ``max_model_len`` tokens, so nothing is dropped. Requests can still ask for less.
    """
    if budget is None:
        return CacheBudget.preset("full", max_model_len)
    try:
        parsed = CacheBudget.parse(budget)
    except ConfigurationError as error:
        if isinstance(budget, str):
            raise ConfigurationError(f"{error}, nor a size such as 2GiB") from error
        raise
    if parsed.capacity <= max_model_len:
        return parsed
    logger.warning(
        "The budget of %d entries is more than max_model_len=%d tokens: caches are full caches, nothing is dropped.",
        parsed.capacity,
        max_model_len,
    )
    try:
        return parsed.resized(max_model_len)
    except ConfigurationError:  # too short for the policy's window: nothing will ever be dropped
        return CacheBudget.preset("full", max_model_len)
