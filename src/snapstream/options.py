"""Command-line options that several commands share."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, cast, get_args

import typer

from snapstream.assets import SHIPPED
from snapstream.config import CacheBudget, Preset
from snapstream.errors import ConfigurationError

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        help=f"Checkpoint directory, hub id, or shipped model ({', '.join(SHIPPED)}). Default: the first shipped one.",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        "-b",
        help="Cache entries per sequence, or a JSON object of CacheBudget fields. Default: a full cache.",
    ),
]
Policy = Annotated[str, typer.Option(help="What the budget keeps: snapstream, streaming, sage-kv, random or full.")]
MaxLength = Annotated[
    int | None, typer.Option("--max-model-len", help="Longest prompt plus output. Default: what the model allows.")
]
Dtype = Annotated[str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]


def parse_budget(budget: str | None, policy: str) -> CacheBudget | None:
    """The budget that ``--budget`` and ``--policy`` ask for; ``None`` for a full cache.

    Raises:
        ConfigurationError: They do not fit together.
    """
    if policy not in get_args(Preset):
        raise ConfigurationError(f"unknown policy {policy!r}; allowed: {', '.join(get_args(Preset))}")
    if budget is None:
        if policy not in ("snapstream", "full"):
            raise ConfigurationError(f"policy {policy} needs a --budget")
        return None
    try:
        entries = int(budget)
    except ValueError:
        pass
    else:
        return CacheBudget.preset(cast(Preset, policy), entries)
    if policy != "snapstream":
        raise ConfigurationError('give the policy inside a JSON budget: {"capacity": 2048, "policy": "streaming"}')
    return CacheBudget.parse(budget)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' own notes and progress bars off the terminal."""
    from transformers.utils import logging as transformers_logging

    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)
