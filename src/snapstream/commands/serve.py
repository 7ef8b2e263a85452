"""``snapstream serve``: the OpenAI-compatible server."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, get_args

import typer

from snapstream.assets import EXAMPLE, PACKAGED, PROSE, is_shipped
from snapstream.commands.options import (
    CACHE,
    ENGINE,
    MODEL,
    Budget,
    DecodingOptions,
    MaxLength,
    Model,
    ModelArgument,
    Policy,
    chosen_model,
    count_or_size,
    longest_of,
    max_length,
    parse_budget,
    quiet,
    with_options,
)
from snapstream.config import DEFAULT_POLICY
from snapstream.errors import ConfigurationError, missing_extra
from snapstream.serving.logs import LogFormat, configure
from snapstream.serving.settings import Example, ServerSettings
from snapstream.sizes import parse_bytes, parse_seconds

logger = logging.getLogger(__name__)


NETWORK, LIMITS = "Network", "Limits"


@with_options
def serve(
    model: ModelArgument = None,
    model_option: Model = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(help="A file with a Jinja chat template. Default: the model's own.", rich_help_panel=MODEL),
    ] = None,
    tool_parser: Annotated[
        str,
        typer.Option(
            help="How the model writes calls of tools: auto (by its chat template), hermes, qwen3_coder, llama3_json, "
            "pythonic, mistral, mistral_args, deepseek, deepseek_v31, gemma4, functiongemma, or gpt_oss.",
            rich_help_panel=MODEL,
        ),
    ] = "auto",
    reasoning_parser: Annotated[
        str,
        typer.Option(
            help="auto: reasoning between the tags that the chat template shows is apart from the text; none: it is "
            "part of it.",
            rich_help_panel=MODEL,
        ),
    ] = "auto",
    max_model_len: MaxLength = None,
    budget: Budget = None,
    policy: Policy = DEFAULT_POLICY,
    slots: Annotated[int, typer.Option(help="Sequences decoded concurrently.", rich_help_panel=CACHE)] = 8,
    sessions: Annotated[
        str,
        typer.Option(
            help="Memory for conversations that keep their cache between turns: a size (2GiB), or how many of them.",
            rich_help_panel=CACHE,
        ),
    ] = "8",
    session_ttl: Annotated[
        float, typer.Option(help="Seconds a session is kept after its last turn.", rich_help_panel=CACHE)
    ] = 600,
    session_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory for sessions that do not fit in memory, and for all sessions when the server stops; the "
            "next server continues them. It contains the text of conversations.",
            rich_help_panel=CACHE,
        ),
    ] = None,
    session_disk: Annotated[
        float, typer.Option(min=0.001, max=2**20, help="Maximum size of this directory in GiB.", rich_help_panel=CACHE)
    ] = 4,
    contexts: Annotated[
        str,
        typer.Option(
            help="Memory for contexts, texts that are prefilled once and asked many times (/v1/contexts): a size "
            "(2GiB), or a number of GiB.",
            rich_help_panel=CACHE,
        ),
    ] = "0.25",
    context_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory for contexts. They outlive the server, and those that do not fit in memory are read back. "
            "It contains the tokens of the texts.",
            rich_help_panel=CACHE,
        ),
    ] = None,
    context_disk: Annotated[
        float,
        typer.Option(
            min=0.001, max=2**20, help="Maximum size of this model's files there, in GiB.", rich_help_panel=CACHE
        ),
    ] = 4,
    prefix_cache: Annotated[
        str | None,
        typer.Option(
            help="Memory of the prefix cache: what a prompt has in common with an earlier one at its beginning is not "
            "prefilled again. Answers are the same. A size (2GiB); 0 turns it off. Default: what is left, up to 2GiB.",
            rich_help_panel=CACHE,
        ),
    ] = None,
    prefix_kv_dtype: Annotated[
        str,
        typer.Option(
            help="Type of its entries, as --kv-dtype. int8 holds twice as many tokens, but answers to prompts that "
            "begin like earlier ones may then differ slightly.",
            rich_help_panel=CACHE,
        ),
    ] = "auto",
    prefix_contexts: Annotated[int, typer.Option(hidden=True)] = 0,
    prefix_dir: Annotated[
        Path | None,
        typer.Option(
            help="Directory for cached prefixes that do not fit in memory, and for all of them when the server stops. "
            "It contains the tokens of prompts.",
            rich_help_panel=CACHE,
        ),
    ] = None,
    prefix_disk: Annotated[
        float,
        typer.Option(
            min=0.001, max=2**20, help="Maximum size of this model's files there, in GiB.", rich_help_panel=CACHE
        ),
    ] = 16,
    decode_steps: Annotated[int, typer.Option(help="Tokens decoded per launch.", rich_help_panel=ENGINE)] = 4,
    max_gap: Annotated[
        str | None,
        typer.Option(
            help="Target for the longest time between two tokens of an answer, such as 200ms; on a CPU only. Prompts "
            "then wait longer for their first token.",
            rich_help_panel=ENGINE,
        ),
    ] = None,
    memory_fraction: Annotated[
        float, typer.Option(help="Share of the device's free memory that may be used.", rich_help_panel=ENGINE)
    ] = 0.9,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 for all.", rich_help_panel=NETWORK)
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes any free one.", rich_help_panel=NETWORK)
    ] = 8000,
    open_page: Annotated[
        bool, typer.Option("--open", help="Open the page in a browser.", rich_help_panel=NETWORK)
    ] = False,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            help="What clients call the model. Default: the directory's name, or the hub id.", rich_help_panel=NETWORK
        ),
    ] = None,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            help="A key that clients must send; can be repeated. Or SNAPSTREAM_API_KEY: keys separated by commas.",
            rich_help_panel=NETWORK,
        ),
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin whose pages may call the server; can be repeated.", rich_help_panel=NETWORK),
    ] = None,
    log_format: Annotated[
        str, typer.Option(help="text, or json: one object per line.", rich_help_panel=NETWORK)
    ] = "text",
    max_queue: Annotated[
        int, typer.Option(help="Sequences that may wait; further requests get a 429.", rich_help_panel=LIMITS)
    ] = 256,
    max_choices: Annotated[
        int, typer.Option(help="Maximum number of sequences of one request: prompts times n.", rich_help_panel=LIMITS)
    ] = 128,
    max_body: Annotated[
        float, typer.Option(min=0.001, max=4096, help="Maximum size of a request body in MiB.", rich_help_panel=LIMITS)
    ] = 16,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds a request may take, including time in the queue.", rich_help_panel=LIMITS)
    ] = 600,
    keep_alive_seconds: Annotated[
        float,
        typer.Option(
            help="Seconds of silence after which a stream sends a comment about its progress, which clients ignore and "
            "which keeps proxies from cutting the connection; 0 turns this off.",
            rich_help_panel=LIMITS,
        ),
    ] = 5,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests have to finish after SIGTERM.", rich_help_panel=LIMITS)
    ] = 30,
    *,
    options: DecodingOptions,
) -> None:
    """Serve a model over HTTP: OpenAI's API, a web page at /, metrics. Needs the extra "serve"."""
    style = _log_format(log_format)
    name, length = chosen_model(model, model_option), max_length(max_model_len)
    settings = ServerSettings(
        model_name=served_model_name or (Path(name).resolve().name if Path(name).exists() else name),
        api_keys=tuple(api_key or _keys_of_environment()),
        cors_origins=tuple(cors_origin or ()),
        max_body_bytes=int(max_body * 2**20),
        max_queue=max_queue,
        max_choices=max_choices,
        request_timeout=request_timeout,
        keep_alive_seconds=keep_alive_seconds,
        drain_timeout=drain_timeout,
        tool_parser=tool_parser,
        reasoning_parser=reasoning_parser,
        session_ttl=session_ttl,
        session_dir=session_dir,
        session_disk=int(session_disk * 2**30),
        context_dir=context_dir,
        context_disk=int(context_disk * 2**30),
        example=_example(name),
    )
    config = options.config(
        max_model_len=length,
        slots=slots,
        sessions=count_or_size(sessions),
        context_bytes=_memory(contexts, "contexts"),
        prefix_cache=None if prefix_cache is None else _memory(prefix_cache, "prefix cache"),
        prefix_kv_dtype=prefix_kv_dtype,
        prefix_contexts=prefix_contexts,
        prefix_dir=None if prefix_dir is None else str(prefix_dir),
        prefix_disk=int(prefix_disk * 2**30),
        decode_steps=decode_steps,
        max_gap=None if max_gap is None else parse_seconds(max_gap, "max gap"),
        memory_fraction=memory_fraction,
    )
    parsed = parse_budget(budget, policy, longest_of(name, length))
    template = _read_template(chat_template)
    try:
        from snapstream.serving import server
    except ImportError as error:
        raise missing_extra(f"the server needs {error.name}", "serve") from error
    configure(style)
    with _listening(host, port) as listener:
        from snapstream.engine import LLM
        from snapstream.engine.settings import choose_device
        from snapstream.serving.tools.formats import find_format

        find_format(tool_parser, "")  # a wrong name is reported before the model is loaded

        has_to_build = choose_device(options.device).type == "cuda"
        logger.info("loading %s%s", name, "; the first start on a GPU builds kernels" if has_to_build else "")
        if not settings.api_keys:
            logger.info("this server requires no API key")
        with quiet():
            llm = LLM(name, budget=parsed, config=config, report_plan=lambda plan: logger.info("%s", plan.summary()))
        if template is not None:
            llm.chat_template = template
        if not server.serve(llm, settings, listener, open_page=open_page):
            raise typer.Exit(1)


def _example(model: str) -> Example | None:
    """The example that the web page offers, for models that are known to answer it."""
    if is_shipped(model):
        return Example(**json.loads(EXAMPLE.read_text()))
    if model not in PACKAGED:
        return None
    novel = PROSE.read_text(encoding="utf-8").splitlines()[:22]
    novel.insert(8, "The phone number of Maria is 5831.")
    novel.insert(15, "The umbrella was left in the cellar.")
    return Example(
        "\n".join(novel),
        "What is the phone number of Maria?",
        "This is a very small model. It finds facts in a few thousand words, but gets many other things wrong.",
    )


def _memory(text: str, what: str) -> int:
    """Bytes of memory: a size with a unit, or a number of GiB."""
    with contextlib.suppress(ValueError):
        text = f"{float(text)}GiB"
    return parse_bytes(text, what)


def _keys_of_environment() -> list[str]:
    """API keys from the environment. An empty variable is refused later, because it would open the server to anyone."""
    value = os.environ.get("SNAPSTREAM_API_KEY")
    return [] if value is None else [key.strip() for key in value.split(",")]


def _log_format(name: str) -> LogFormat:
    for allowed in get_args(LogFormat):
        if name == allowed:
            return allowed  # type: ignore[no-any-return]
    raise ConfigurationError(f"log format is {name!r}; allowed: {', '.join(get_args(LogFormat))}")


def _read_template(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the chat template {path} could not be read: {error}") from error


@contextlib.contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    """Bind the address before the model is loaded, so that an address in use is reported immediately."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        yield listener
