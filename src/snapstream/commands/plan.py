"""``snapstream plan``: computes memory without loading anything."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from snapstream.commands.options import (
    Budget,
    Json,
    MaxLength,
    Model,
    ModelArgument,
    Policy,
    SpeculativeOptions,
    chosen_model,
    count_or_size,
    longest_of,
    max_length,
    parse_budget,
    quiet,
    with_options,
)
from snapstream.config import DEFAULT_POLICY, MemoryBudget
from snapstream.config.engine import QUANTIZED
from snapstream.errors import ConfigurationError

if TYPE_CHECKING:
    from snapstream.engine.settings import Setup


@with_options
def plan(
    model: ModelArgument = None,
    model_option: Model = None,
    budget: Budget = None,
    policy: Policy = DEFAULT_POLICY,
    slots: Annotated[int, typer.Option(help="Sequences decoded concurrently.")] = 4,
    sessions: Annotated[
        str, typer.Option(help="Memory for conversations between turns: a size (2GiB), or how many of them.")
    ] = "0",
    max_model_len: MaxLength = None,
    memory: Annotated[
        float | None, typer.Option(help="Memory limit in GiB; also prints how many slots fit. Default: no limit.")
    ] = None,
    cache_memory: Annotated[
        float | None,
        typer.Option(help="GiB for caches alone, on all devices together; also prints how many slots fit."),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            help="Split the model over this many devices, and print what each holds, reads and sends per step."
        ),
    ] = None,
    attention: Annotated[
        str, typer.Option(help="With --devices: data-parallel (splits sequences) or tensor-parallel (splits heads).")
    ] = "data-parallel",
    as_json: Json = False,
    *,
    options: SpeculativeOptions,
) -> None:
    """Compute the memory for a model, a budget and a number of slots from config.json alone; nothing is loaded.

    The device need not be present. CUDA graphs keep their workspace allocated. The prefix cache takes what is left.
    """
    from snapstream.engine.memory.plan import gigabytes
    from snapstream.engine.memory.planner import plan_engine
    from snapstream.engine.settings import set_up

    _check_memory(memory, cache_memory, devices, options)
    name, length = chosen_model(model, model_option), max_length(max_model_len)
    config = options.config(max_model_len=length, slots=slots, sessions=count_or_size(sessions), prefix_cache=0)
    with quiet():
        parsed = parse_budget(budget, policy, longest_of(name, length))
        if devices is not None and isinstance(parsed, MemoryBudget):
            raise ConfigurationError(f"budget is {budget!r}; with devices, give a number of entries or a share")
        setup = set_up(name, parsed, config, must_exist=False)
    if devices is not None:
        _plan_devices(setup, devices, attention, cache_memory, as_json=as_json)
        return
    planned = plan_engine(setup, None if memory is None else int(memory * 2**30))
    ours, full = planned.ours, planned.full
    room = None if cache_memory is None else int(cache_memory * 2**30)
    if as_json:
        fields = asdict(ours) | {"total": ours.total, "steady": ours.steady}
        fields |= {"full_slots": full.slots, "total_full": full.total, "steady_full": full.steady}
        fields |= {"slots_that_fit": planned.slots_that_fit, "slots_that_fit_full": planned.slots_that_fit_full}
        if room is not None:
            fields |= {"slots_in_caches": ours.slots_in(room), "slots_in_caches_full": full.slots_in(room)}
        print(json.dumps(fields))
    else:
        kind = f"{setup.weight_formats} on {setup.device}, cache entries {ours.entry_type}"
        table = _table(setup, f"{slots} slots, up to {ours.max_model_len} tokens, {kind}")
        kept = ["weights", "slots", "staging", "sessions", "contexts", "prefixes", "drafter", "metadata"]
        rows = [*kept, "workspace", "steady"] if ours.keeps_workspace else [*kept, "steady", "workspace", "tokenizing"]
        for row in [*rows, "total"]:
            mine, theirs = getattr(ours, row), getattr(full, row)
            if mine or row not in ("sessions", "contexts", "prefixes", "drafter"):
                ratio = "" if mine == theirs else f"{theirs / mine:.2f}x less"
                table.add_row(_ROWS[row], gigabytes(mine), gigabytes(theirs), ratio)
        fitting = []
        if memory is not None:
            fitting.append((f"slots in {memory:g} GiB", planned.slots_that_fit or 0, planned.slots_that_fit_full or 0))
        if room is not None:
            counts = ours.slots_in(room), full.slots_in(room)
            fitting.append((f"slots in {cache_memory:g} GiB of caches", *counts))
        for label, many, few in fitting:
            table.add_row(label, str(many), str(few), f"{many / few:.2f}x as many" if many and few else "")
        Console().print(table)
    planned.check()


def _check_memory(
    memory: float | None, cache_memory: float | None, devices: int | None, options: SpeculativeOptions
) -> None:
    for option, given in (("memory", memory), ("cache-memory", cache_memory)):
        if given is not None and not 0 < given < 2**40:
            raise ConfigurationError(f"{option} is {given} GiB; it must be a positive number")
    if devices is not None and options.kv_dtype != "auto":
        raise ConfigurationError(
            f"kv_dtype is {options.kv_dtype!r}, which is for one device; with devices, leave it out"
        )
    if devices is not None and options.weights in QUANTIZED:
        raise ConfigurationError(
            f"weights is {options.weights!r}, which is for one device; with devices, give 'dense' or 'auto'"
        )
    if memory is not None and devices is not None:
        raise ConfigurationError("memory is for one device; with devices, give cache-memory, of all together")


def _table(setup: Setup, what: str) -> Table:
    """A table that compares the requested caches with full caches."""
    entries = setup.spec.groups[0].entries(setup.budget.capacity)
    table = Table(title=f"{setup.spec.architecture}, {what}", title_justify="left")
    for column in ("", f"cache of {entries}", f"full cache of {setup.max_model_len}", "ratio"):
        table.add_column(column, justify="left" if not column else "right")
    return table


def _plan_devices(setup: Setup, count: int, attention: str, cache_memory: float | None, *, as_json: bool) -> None:
    """Print what each of several devices holds, reads and sends, with the requested caches and with full ones."""
    from snapstream.engine.devices import Devices
    from snapstream.engine.memory.plan import gigabytes

    spec = replace(setup.spec, stored_as={})  # counted as numbers, which is what the paper divides
    devices = Devices(spec, setup.types.weights, count, attention)
    plans = []
    for entries in (setup.budget.capacity, setup.max_model_len):
        room = None if cache_memory is None else int(cache_memory * 2**30) // count
        sequences = setup.config.slots if room is None else devices.most_sequences(entries, room)
        plans.append(devices.plan(sequences, entries))
    ours, full = plans
    if as_json:
        print(json.dumps({"ours": asdict(ours), "full": asdict(full)}))
        return
    where = f"up to {setup.max_model_len} tokens, {devices.types} on {count} devices, {attention} attention"
    table = _table(setup, f"{where}; per device")
    many = f"{ours.sequences / full.sequences:.2f}x as many" if full.sequences else ""
    table.add_row("sequences in total", str(ours.sequences), str(full.sequences), many)
    for row, label in _DEVICE_ROWS.items():
        mine, theirs = getattr(ours, row), getattr(full, row)
        table.add_row(label, gigabytes(mine), gigabytes(theirs), "" if mine == theirs else _ratio(mine, theirs))
    each = [plan.read * count // plan.sequences if plan.sequences else 0 for plan in plans]
    table.add_row("all read per token", *map(gigabytes, each), _ratio(*each) if all(each) else "")
    Console().print(table)


def _ratio(mine: int, theirs: int) -> str:
    return f"{theirs / mine:.2f}x less" if mine < theirs else f"{mine / max(theirs, 1):.2f}x more"


_DEVICE_ROWS = {
    "weights": "holds weights",
    "caches": "holds caches",
    "read_weights": "reads weights",
    "read_caches": "reads caches",
    "sent": "sends",
}
_ROWS = {
    "weights": "weights",
    "slots": "caches of all slots",
    "staging": "staging cache (prefill)",
    "sessions": "sessions",
    "contexts": "contexts",
    "prefixes": "prefix cache",
    "drafter": "draft model",
    "metadata": "metadata",
    "steady": "= steady state",
    "workspace": "workspace (prefill)",
    "tokenizing": "tokenizing a long prompt",
    "total": "= peak",
}
