"""Command-line options shared by several commands."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, get_type_hints

import typer
from rich.console import Console
from typing_extensions import override

from snapstream.assets import PACKAGED, SHIPPED, TASK_MODEL, is_shipped
from snapstream.config import DEFAULT_POLICY, CacheBudget, EngineConfig, MemoryBudget, policy_names
from snapstream.config.engine import QUANTIZED
from snapstream.errors import ConfigurationError
from snapstream.sizes import is_bytes, is_share, parse_bytes, parse_share, parse_tokens

messages = Console(stderr=True)
"""Console for everything except the result of a command."""

MODEL_HELP = (
    f"Checkpoint directory, .gguf file, hub id, or a model by name ({', '.join([*SHIPPED, *PACKAGED])}). Default: the "
    "first."
)
# Panels of the shared options in --help; commands have further ones.
MODEL, CACHE, ENGINE = "Model", "Cache", "Engine"

Model = Annotated[str | None, typer.Option("--model", "-m", help="The same as the argument.", rich_help_panel=MODEL)]
NamedModel = Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP, rich_help_panel=MODEL)]
ModelArgument = Annotated[str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP)]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget",
        "-b",
        help="Cache size per sequence: entries (512, 4k); a share (1/4, 25%) of the prompt's text, or of "
        "--max-model-len if there is no prompt; a size (2GiB), which also chooses the type of entries; or a JSON "
        "object of CacheBudget fields. Default: a full cache.",
        rich_help_panel=CACHE,
    ),
]
Policy = Annotated[
    str,
    typer.Option(
        help="Which tokens the budget keeps: spans, snapstream (the paper's rule), mixed, multiscale-keydiff, "
        "local-keydiff, keydiff, sage-kv, streaming, random, full, or the policy of an installed package.",
        rich_help_panel=CACHE,
    ),
]
MaxLength = Annotated[
    str | None,
    typer.Option(
        "--max-model-len",
        help="Maximum length of prompt plus output, such as 4096 or 4k. Default: what the model allows.",
        rich_help_panel=MODEL,
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]

Compiled = Annotated[
    bool | None,
    typer.Option(
        "--compile/--eager",
        help="On CUDA, capture decode steps as graphs (--compile), or start sooner but decode slower (--eager). "
        "Default: --compile.",
        show_default=False,
        rich_help_panel=ENGINE,
    ),
]


@dataclass(frozen=True)
class EngineOptions:
    """Settings of the engine that every command has; see :func:`with_options`."""

    prefill_chunk: Annotated[
        int | None,
        typer.Option(
            help="Prompt tokens per prefill launch. Default: 512 on a CPU, 2048 on a GPU.", rich_help_panel=ENGINE
        ),
    ] = None
    dtype: Annotated[
        str, typer.Option(help="auto (the checkpoint's), float32, bfloat16 or float16.", rich_help_panel=MODEL)
    ] = "auto"
    weights: Annotated[
        str,
        typer.Option(
            help="Format of weights: auto (as the checkpoint stores them), dense (numbers of --dtype), or "
            f"{', '.join(QUANTIZED)} (quantized while loading).",
            rich_help_panel=MODEL,
        ),
    ] = "auto"
    kv_dtype: Annotated[
        str,
        typer.Option(
            help="Type of cache entries: auto (that of activations, or what a budget in bytes chooses; for `ask`, that "
            "of the file), float32, bfloat16, float16, int8, int4, or one for keys and one for values: int8/int4, "
            "int4/int8.",
            rich_help_panel=MODEL,
        ),
    ] = "auto"
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.", rich_help_panel=ENGINE)] = "auto"

    def config(self, **more: Any) -> EngineConfig:
        """The engine's settings: these and ``more``."""
        return EngineConfig(**(asdict(self) | more))


@dataclass(frozen=True)
class SpeculativeOptions(EngineOptions):
    """:class:`EngineOptions` plus speculative decoding."""

    speculative: Annotated[
        str,
        typer.Option(
            help="Speculative decoding: draft tokens and verify several per step, for the same output sooner. off, "
            "lookup (drafts from the prompt and the output so far), mtp (the checkpoint's own module), or draft-model.",
            rich_help_panel=ENGINE,
        ),
    ] = "off"
    speculative_tokens: Annotated[
        int, typer.Option(help="Maximum number of draft tokens per sequence and step.", rich_help_panel=ENGINE)
    ] = 7
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="A small model with the same tokenizer, for --speculative draft-model.", rich_help_panel=ENGINE
        ),
    ] = None


@dataclass(frozen=True)
class DecodingOptions(SpeculativeOptions):
    """:class:`SpeculativeOptions` plus whether graphs are captured."""

    compiled: Compiled = None

    @override
    def config(self, **more: Any) -> EngineConfig:
        given = asdict(self)
        del given["compiled"]
        return EngineConfig(**(given | {"enforce_eager": eager(self.compiled, self.device)} | more))


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command one option for each field of its parameters that are dataclasses of options."""
    signature = inspect.signature(command, eval_str=True)
    parameters: list[inspect.Parameter] = []
    groups: dict[str, list[str]] = {}
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if not (isinstance(kind, type) and issubclass(kind, EngineOptions)):
            parameters.append(parameter)
            continue
        hints = get_type_hints(kind, include_extras=True)
        groups[parameter.name] = [field.name for field in fields(kind)]
        parameters += [
            parameter.replace(name=field.name, annotation=hints[field.name], default=field.default)
            for field in fields(kind)
        ]

    @functools.wraps(command)
    def run(**given: Any) -> None:
        made = {
            name: signature.parameters[name].annotation(**{field: given.pop(field) for field in names})
            for name, names in groups.items()
        }
        command(**given, **made)

    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


MOVED = {
    "--max-num-seqs": "--slots is the number of sequences that are decoded concurrently",
    "--max-num-batched-tokens": "--prefill-chunk is the number of prompt tokens per prefill launch",
    "--gpu-memory-utilization": "--memory-fraction of serve is the share of the free memory that may be used; how much "
    "is used follows from --budget, --slots and --max-model-len, see `snapstream plan`",
    "--tensor-parallel-size": "the built-in engine uses one device; the vLLM plugin uses several (docs/vllm.md)",
    "--enforce-eager": "--eager does not capture graphs on CUDA (a CPU uses no graphs)",
    "--kv-cache-dtype": "--kv-dtype is the type of cache entries",
    "--cache-type-k": "--kv-dtype is the type of cache entries: of both, or KEYS/VALUES",
    "--cache-type-v": "--kv-dtype is the type of cache entries: of both, or KEYS/VALUES",
    "--kv-budget": "--budget is the cache size per sequence",
    "--ctx-size": "--max-model-len is the maximum length of prompt plus output",
    "--context-length": "--max-model-len is the maximum length of prompt plus output",
    "--max-new-tokens": "--max-tokens is the maximum number of tokens to generate",
    "--trust-remote-code": "code of a checkpoint is never run",
}
"""Options of other tools that people try, with their equivalents."""


def chosen_model(argument: str | None, option: str | None = None) -> str:
    """The model that was given as an argument or as an option.

    Raises:
        ConfigurationError: Both were given, and they differ.
    """
    if argument is not None and option is not None and argument != option:
        raise ConfigurationError(f"two models were given, {argument!r} and --model {option!r}; leave one out")
    return argument or option or TASK_MODEL.name


def eager(compiled: bool | None, device: str) -> bool:
    """Whether graphs are not captured, from ``--compile`` and ``--eager``; ``None`` if neither was given.

    Raises:
        ConfigurationError: There is no such device.
    """
    from snapstream.engine.settings import choose_device

    if compiled and choose_device(device).type == "cpu":
        messages.print("--compile: on a CPU there is nothing to compile", highlight=False)
    return compiled is False


def max_length(text: str | None) -> int | None:
    """Parse ``--max-model-len``."""
    return None if text is None else parse_tokens(text, "max-model-len")


def count_or_size(text: str) -> int | str:
    """A number, or a size such as ``2GiB``, which the engine parses."""
    return int(text) if text.removeprefix("-").isdecimal() else text


def is_json(budget: str | None) -> bool:
    """Whether this ``--budget`` is JSON, or meant to be."""
    return budget is not None and budget.lstrip().startswith(("{", "[", '"'))


def parse_budget(budget: str | None, policy: str, whole: Callable[[], int]) -> CacheBudget | MemoryBudget | None:
    """Build the budget from ``--budget`` and ``--policy``; ``None`` for a full cache.

    Args:
        budget: Value of ``--budget``.
        policy: Name of a policy.
        whole: Returns the number of tokens that a share refers to; called only for a share.

    Raises:
        ConfigurationError: One of them is invalid, or they do not fit together.
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
    if is_bytes(budget):
        return MemoryBudget(parse_bytes(budget, "budget"), policy)
    if is_share(budget):
        entries = int(parse_share(budget, "budget") * whole())
    else:
        try:
            entries = parse_tokens(budget, "budget")
        except ConfigurationError:
            raise ConfigurationError(
                f"budget: {budget!r} is neither a number of entries (512, 4k; at least 16), nor a share (1/4, 25%), "
                "nor a size (512MiB, 2GiB), nor a JSON object"
            ) from None
    return CacheBudget.preset(policy, entries)


def longest_of(model: str, wanted: int | None) -> Callable[[], int]:
    """Return a function that determines the engine's ``max_model_len`` from the model's configuration."""

    def read() -> int:
        from snapstream.engine.settings import choose_max_model_len
        from snapstream.models.files import resolve_config
        from snapstream.models.weights import load_spec

        with quiet():
            return choose_max_model_len(wanted, load_spec(resolve_config(model)).max_position)

    return read


def say_what_a_shipped_model_is(model: str) -> None:
    """Warn about a shipped model, whose answers must not be mistaken for the method's effect on a real one."""
    if is_shipped(model):
        messages.print(
            "This is a small model that ships with SnapStream. It answers questions about notes in generated texts, as "
            "in `snapstream demo`, and nothing else; use --model for a real one.",
            highlight=False,
            style="yellow",
        )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppress the messages of transformers, without importing it."""
    library, name = logging.getLogger("transformers"), "TRANSFORMERS_VERBOSITY"  # which it reads when it is imported
    level, stated, was_there = library.level, os.environ.get(name), "transformers" in sys.modules
    library.setLevel(logging.ERROR)
    os.environ[name] = "error"
    try:
        yield
    finally:
        del os.environ[name]
        os.environ.update({} if stated is None else {name: stated})
        if not was_there and "transformers" in sys.modules:  # the level that it would have set itself
            wanted = logging.getLevelName((stated or "warning").upper())
            level = wanted if isinstance(wanted, int) else logging.WARNING
        library.setLevel(level)
