"""Command-line options that several commands share."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Annotated

import typer
from rich.console import Console

from snapstream.assets import PACKAGED, SHIPPED, TASK_MODEL, is_shipped
from snapstream.config import DEFAULT_POLICY, CacheBudget, policy_names
from snapstream.errors import ConfigurationError
from snapstream.sizes import is_share, parse_share, parse_tokens

messages = Console(stderr=True)
"""Everything that is not the result of a command."""

MODEL_HELP = (
    f"Checkpoint directory, .gguf file, hub id, or a model by name ({', '.join([*SHIPPED, *PACKAGED])}). Default: the "
    "first."
)
# Panels in which --help shows the shared options; commands have more of their own.
MODEL, CACHE, ENGINE = "Model", "Cache", "Engine"

Model = Annotated[str | None, typer.Option("--model", "-m", help="The same as the argument.", rich_help_panel=MODEL)]
NamedModel = Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP, rich_help_panel=MODEL)]
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        "-b",
        help="Cache of a sequence: entries (512, 4k); a share (1/4, 25%) of the prompt's text, or of the longest "
        "sequence where there is no prompt; or a JSON object of CacheBudget fields. Default: a full cache.",
        rich_help_panel=CACHE,
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        help="What the budget keeps: mixed, snapstream (the paper's rule), local-keydiff, keydiff, sage-kv, streaming, "
        "random, full, or one that was installed.",
        rich_help_panel=CACHE,
    ),
]
MaxLength = Annotated[
    str | None,
    typer.Option(
        "--max-model-len",
        help="Longest prompt plus output, such as 4096 or 4k. Default: what the model allows.",
        rich_help_panel=MODEL,
    ),
]
Chunk = Annotated[
    int, typer.Option("--prefill-chunk", help="Prompt tokens per prefill launch.", rich_help_panel=ENGINE)
]
Dtype = Annotated[
    str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.", rich_help_panel=MODEL)
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=ENGINE)]
Speculative = Annotated[
    str,
    typer.Option(
        help="Guess tokens and verify several at a time, for the same output sooner where guesses are right: off, "
        "lookup (finds them in the prompt and the output so far), mtp (the checkpoint's own module), or draft-model.",
        rich_help_panel=ENGINE,
    ),
]
DraftModel = Annotated[
    str | None,
    typer.Option(help="A small model of the same tokenizer, for --speculative draft-model.", rich_help_panel=ENGINE),
]
SpeculativeTokens = Annotated[int, typer.Option(help="Most guesses per sequence and step.", rich_help_panel=ENGINE)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Compiled = Annotated[
    bool | None,
    typer.Option(
        "--compile/--eager",
        help="On CUDA, capture decode steps as graphs, or start sooner and decode slower. Default: capture.",
        show_default=False,
        rich_help_panel=ENGINE,
    ),
]

MOVED = {
    "--max-num-seqs": "--slots says how many sequences are decoded at a time",
    "--max-num-batched-tokens": "--prefill-chunk says how many prompt tokens are read at a time",
    "--gpu-memory-utilization": "--memory-fraction of serve says how much of the free memory may be used; what is held "
    "follows from --budget, --slots and --max-model-len, see `snapstream plan`",
    "--tensor-parallel-size": "the built-in engine uses one device; the vLLM plugin uses several (docs/vllm.md)",
    "--enforce-eager": "--eager captures no graphs on CUDA (on a CPU there are none anyway)",
    "--kv-cache-dtype": "--dtype is the dtype of weights and caches",
    "--kv-budget": "--budget is the cache of a sequence",
    "--ctx-size": "--max-model-len is the longest prompt plus output",
    "--context-length": "--max-model-len is the longest prompt plus output",
    "--max-new-tokens": "--max-tokens is the most tokens to generate",
    "--trust-remote-code": "code of a checkpoint is never run",
}
"""Options of other tools that people try, with what does the same here."""


def chosen_model(argument: str | None, option: str | None = None) -> str:
    """The model that was asked for as an argument or as an option.

    Raises:
        ConfigurationError: As both, and they differ.
    """
    if argument is not None and option is not None and argument != option:
        raise ConfigurationError(f"two models were given, {argument!r} and --model {option!r}; leave one out")
    return argument or option or TASK_MODEL.name


def eager(compiled: bool | None, device: str) -> bool:
    """Whether no graphs are to be captured, of what ``--compile`` or ``--eager`` says, if one was given.

    Raises:
        ConfigurationError: There is no such device.
    """
    from snapstream.engine.settings import choose_device

    if compiled and choose_device(device).type == "cpu":
        messages.print("--compile: on a CPU there is nothing to compile", highlight=False)
    return compiled is False


def max_length(text: str | None) -> int | None:
    """What ``--max-model-len`` says."""
    return None if text is None else parse_tokens(text, "max-model-len")


def is_json(budget: str | None) -> bool:
    """Whether this ``--budget`` is a JSON object, or meant to be one."""
    return budget is not None and budget.lstrip().startswith(("{", "[", '"'))


def parse_budget(budget: str | None, policy: str, whole: Callable[[], int]) -> CacheBudget | None:
    """The budget that ``--budget`` and ``--policy`` ask for; ``None`` for a full cache.

    Args:
        budget: What was given.
        policy: Name of a preset.
        whole: What a share is taken of, in tokens; called only for a share.

    Raises:
        ConfigurationError: They do not fit together.
    """
    if policy not in policy_names():
        raise ConfigurationError(f"unknown policy {policy!r}; allowed: {', '.join(policy_names())}")
    if budget is None:
        if policy not in (DEFAULT_POLICY, "full"):
            raise ConfigurationError(f"policy {policy} needs a --budget")
        return None
    if is_json(budget):
        if policy != DEFAULT_POLICY:
            raise ConfigurationError('give the policy inside a JSON budget: {"capacity": 2048, "policy": "streaming"}')
        return CacheBudget.parse(budget)
    if is_share(budget):
        entries = int(parse_share(budget, "budget") * whole())
    else:
        try:
            entries = parse_tokens(budget, "budget")
        except ConfigurationError:
            raise ConfigurationError(
                f"budget: {budget!r} is neither a number of entries (512, 4k; at least 16), nor a share (1/4, 25%), "
                "nor a JSON object"
            ) from None
    return CacheBudget.preset(policy, entries)


def longest_of(model: str, wanted: int | None) -> Callable[[], int]:
    """Longest sequence of an engine, read from the model's configuration when it is needed."""

    def read() -> int:
        from snapstream.engine.settings import choose_max_model_len
        from snapstream.models.files import resolve_config
        from snapstream.models.weights import load_spec

        with quiet():
            return choose_max_model_len(wanted, load_spec(resolve_config(model)).max_position)

    return read


def say_what_a_shipped_model_is(model: str) -> None:
    """A shipped model's answers must not pass for what the method does to a real one."""
    if is_shipped(model):
        messages.print(
            "This is a small model that ships with SnapStream. It answers questions about notes in generated texts, as "
            "in `snapstream demo`, and nothing else; --model takes a real one.",
            highlight=False,
            style="yellow",
        )


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
