"""``snapstream read`` and ``snapstream ask``: prefill a text once, then ask about it any number of times."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from snapstream.commands.generate import read_prompt, show_reading, tokens_of
from snapstream.commands.options import (
    CACHE,
    Budget,
    EngineOptions,
    Json,
    MaxLength,
    NamedModel,
    chosen_model,
    is_json,
    max_length,
    messages,
    parse_budget,
    quiet,
    say_what_a_shipped_model_is,
    with_options,
)
from snapstream.commands.terminal import is_terminal, read_line
from snapstream.config import DEFAULT_POLICY, CacheBudget, EngineConfig, MemoryBudget, SamplingParams
from snapstream.errors import CacheFileError, ConfigurationError, RequestError
from snapstream.outputs import check_output

if TYPE_CHECKING:
    from snapstream.engine import LLM, Context


@with_options
def read(
    file: Annotated[str, typer.Argument(help="A text file. '-' reads stdin.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File for the compressed cache.")],
    model: NamedModel = None,
    budget: Budget = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="Which tokens the budget keeps, as for `snapstream generate`. Default: multiscale-keydiff, which "
            "needs no question.",
            rich_help_panel=CACHE,
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(help="A system message for the conversation about the text.")] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Prefill the text unchanged, even if the model has a chat template.")
    ] = False,
    max_model_len: MaxLength = None,
    *,
    options: EngineOptions,
) -> None:
    """Prefill a text once and save its compressed cache to a file, for `snapstream ask`."""
    text, name, length = read_prompt(None, file), chosen_model(None, model), max_length(max_model_len)
    parsed = parse_budget(budget, policy or DEFAULT_POLICY, lambda: tokens_of(text, name, length))
    if parsed is not None and policy is None and not is_json(budget):
        parsed = parsed.for_context()
    # Neither the text nor the model's own files are overwritten.
    check_output(output, file, name, *(Path(name).glob("*") if Path(name).is_dir() else ()))
    config = options.config(max_model_len=length, slots=1, prefix_cache=0, sessions=1, enforce_eager=True)
    say_what_a_shipped_model_is(name)
    with quiet():
        llm = _load(name, parsed, config)
        tokens, opened = llm.context_tokens(text, chat=False if plain else None, system=system)
        params = SamplingParams(max_tokens=0)
        done = show_reading(llm, llm.engine.add_request(tokens, params, keep=True))
        if done.saved is None:
            raise RequestError(f"the text could not be processed: {done.error}")
        context = llm.context_of(done.saved, opened, system)
        llm.save_context(context, output)
    from snapstream.engine.memory.plan import gigabytes

    messages.print(
        f"{context.tokens} tokens read, {context.entries} kept per head; the size of {output} is "
        f'{gigabytes(output.stat().st_size)}. To ask about it: snapstream ask {output} "..."',
        highlight=False,
        markup=False,
    )


@with_options
def ask(
    file: Annotated[Path, typer.Argument(help="A file written by `snapstream read`.")],
    questions: Annotated[
        list[str] | None,
        typer.Argument(help="Questions, each asked separately. Default: one per line of stdin, or as you type them."),
    ] = None,
    model: NamedModel = None,
    max_tokens: Annotated[int, typer.Option(help="Maximum length of an answer in tokens.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    max_model_len: MaxLength = None,
    as_json: Json = False,
    *,
    options: EngineOptions,
) -> None:
    """Ask about a text that `snapstream read` processed; every question starts from the same state."""
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    described = _describe(file)
    name = chosen_model(None, model) if model is not None else described["made_by"]
    config = options.config(
        max_model_len=max_length(max_model_len), slots=1, prefix_cache=0, sessions=1, enforce_eager=True
    )
    if config.kv_dtype == "auto":
        config = replace(config, kv_dtype=described["kv_dtype"])
    say_what_a_shipped_model_is(name)
    with quiet():
        llm = _load(name, described["budget"], config)
        context = llm.load_context(file)
        for question in questions or _lines():
            if not question.strip():
                continue
            try:
                _answer(llm, context, question, params, as_json=as_json)
            except RequestError as error:
                if questions or not is_terminal():
                    raise
                messages.print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False, soft_wrap=True)


def _answer(llm: LLM, context: Context, question: str, params: SamplingParams, *, as_json: bool) -> None:
    """Print an answer while it is generated; as JSON, when it is complete."""
    answer: list[str] = []
    for output in llm.stream(question if context.chat else f"\n\n{question}", params, context=context):
        answer.append(output.new_text)
        if output.error is not None:
            raise RequestError(f"the question could not be answered: {output.error}")
        if not as_json:
            print(output.new_text if "".join(answer[:-1]).strip() else output.new_text.lstrip(), end="", flush=True)
    print(json.dumps({"question": question, "text": "".join(answer).strip()}) if as_json else "", flush=True)


def _load(name: str, budget: CacheBudget | MemoryBudget | None, config: EngineConfig) -> LLM:
    from snapstream.engine import LLM

    with messages.status("loading"):
        return LLM(name, budget=budget, config=config, report_plan=lambda _: None)


def _describe(file: Path) -> dict[str, Any]:
    """The model (``made_by``), the budget and the type of entries (``kv_dtype``) that a file was written with.

    Raises:
        CacheFileError: The file does not exist, or `snapstream read` did not write it.
    """
    from snapstream.cache import CompressedSequence

    described = CompressedSequence.describe(file)
    try:
        made_by = json.loads(described["note"])["model"]
        budget, kv_dtype = CacheBudget.parse(described["budget"]), str(described.get("kv_dtype") or "auto")
    except (LookupError, TypeError, ValueError, ConfigurationError) as error:
        raise CacheFileError(f"{file} was not written by `snapstream read`") from error
    return {"made_by": str(made_by), "budget": budget, "kv_dtype": kv_dtype}


def _lines() -> Iterator[str]:
    """Yield questions from standard input, until its end or ``/quit``."""
    asks = is_terminal()
    while True:
        try:
            line = input("> ") if asks else read_line()
        except (EOFError, KeyboardInterrupt):
            print()
            return
        if line is None or line.strip() == "/quit":
            return
        yield line.strip()
