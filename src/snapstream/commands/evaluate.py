"""``snapstream eval``: runs the accuracy lab, and writes its records and reports."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from snapstream.assets import TASK_MODEL
from snapstream.commands.options import (
    ENGINE,
    DecodingOptions,
    chosen_model,
    messages,
    with_options,
)
from snapstream.config import DEFAULT_POLICY, EngineConfig, policy_names
from snapstream.errors import ConfigurationError, SnapStreamError
from snapstream.evaluation.policies import (
    ENDPOINT_POLICIES,
    ENGINE_POLICIES,
    Variant,
    make_variants,
    parse_lengths,
    parse_sizes,
    parse_sweeps,
    split_names,
    swept_of,
)
from snapstream.evaluation.tasks import TASKS, find_tasks
from snapstream.outputs import check_output, write_text

if TYPE_CHECKING:
    from snapstream.evaluation.endpoint_host import EndpointHost
    from snapstream.evaluation.grid import Grid
    from snapstream.evaluation.hosts import Host
    from snapstream.evaluation.questions.plan import QuestionPlan
    from snapstream.evaluation.records import RecordFile

LAB, FILES, ENDPOINT = "Tasks and caches", "Questions from files", "Endpoint"
WRITTEN = RECORDS, REPORT, PAGE = "results.jsonl", "report.md", "report.html"
"""Files in the output directory of a run."""


@with_options
def evaluate(
    model: Annotated[
        str | None,
        typer.Argument(
            metavar="MODEL",
            help="Checkpoint directory or hub id; with --endpoint, its model's name. Default: the small shipped model.",
        ),
    ] = None,
    model_option: Annotated[str | None, typer.Option("--model", "-m", help="The same as the argument.")] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            help="Tasks, separated by commas; all (for the shipped model); or prose (for models that know English): "
            f"{', '.join(TASKS)}. Default: all; none with --questions.",
            rich_help_panel=LAB,
        ),
    ] = None,
    questions: Annotated[
        list[str] | None,
        typer.Option(
            "--questions",
            "-q",
            metavar="FILE",
            help="Questions from a file (.jsonl, .jsonl.gz) or hf://datasets/OWNER/NAME/FILE: your own, or published "
            "ones. Repeat for several.",
            rich_help_panel=FILES,
        ),
    ] = None,
    ask: Annotated[
        str,
        typer.Option(
            help="Where they are asked: with the text, after it was compressed (as with a stored context), or "
            "with,after.",
            rich_help_panel=FILES,
        ),
    ] = "with",
    run_code: Annotated[
        bool,
        typer.Option(
            "--run-code",
            help="Run answers that are code, without a network and with limits of time and memory.",
            rich_help_panel=FILES,
        ),
    ] = False,
    lengths: Annotated[
        str, typer.Option(help="Prompt lengths in tokens of the model, such as 1k,4k.", rich_help_panel=LAB)
    ] = "1k,2k",
    budgets: Annotated[
        str,
        typer.Option(
            "--budgets", "-b", help="Cache sizes: entries (512, 1k) or shares of the prompt (1/4).", rich_help_panel=LAB
        ),
    ] = "1/4,1/8",
    policies: Annotated[
        str | None,
        typer.Option(
            help=f"Caches to compare. Engine: {', '.join(ENGINE_POLICIES)}. Endpoint: {', '.join(ENDPOINT_POLICIES)}.",
            rich_help_panel=LAB,
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            help="Settings of snapstream, or else of spans, to compare: window=8,32 or pooling=avg,max. Repeat for "
            "several.",
            rich_help_panel=LAB,
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Questions per task, length and cache. Default: 20; all questions of a file.",
            rich_help_panel=LAB,
        ),
    ] = None,
    half: Annotated[
        str | None,
        typer.Option(
            help="Only questions about texts with even, or with odd numbers, so that settings can be chosen on one "
            "half of a file and judged on the other. If all questions share a text, their numbers count. (Generated "
            "tasks have --seed for that.)",
            rich_help_panel=LAB,
        ),
    ] = None,
    depths: Annotated[
        int,
        typer.Option(
            min=0,
            max=100,
            help="Number of evenly spaced depths to alternate; 0 for random depths.",
            rich_help_panel=LAB,
        ),
    ] = 5,
    decode: Annotated[
        int,
        typer.Option(min=1, help="Tokens decoded before the question of long-* and told-* tasks.", rich_help_panel=LAB),
    ] = 2048,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the first sample.", rich_help_panel=LAB)] = 0,
    output: Annotated[
        Path,
        typer.Option(
            "--output",
            "-o",
            help="Directory for results.jsonl, report.md and report.html. A run that was stopped continues from it.",
        ),
    ] = Path("eval-results"),
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Use the chat template. Default: yes, if there is one.")
    ] = None,
    slots: Annotated[int, typer.Option(min=1, help="Sequences decoded concurrently.", rich_help_panel=ENGINE)] = 16,
    return_kept_tokens: Annotated[
        bool,
        typer.Option(
            "--return-kept-tokens/--no-return-kept-tokens",
            "--telemetry/--no-telemetry",
            help="Record which tokens were kept.",
            rich_help_panel=ENGINE,
        ),
    ] = True,
    endpoint: Annotated[
        str | None,
        typer.Option(
            help="Use this OpenAI-compatible endpoint instead, such as http://localhost:8000/v1. The API key is read "
            "from OPENAI_API_KEY.",
            rich_help_panel=ENDPOINT,
        ),
    ] = None,
    served_as: Annotated[
        str | None,
        typer.Option(
            help="Label for what the endpoint runs, for the policy 'served': full, streaming-4k, ...",
            rich_help_panel=ENDPOINT,
        ),
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Its tokenizer, if it cannot be found automatically.", rich_help_panel=ENDPOINT),
    ] = None,
    timeout: Annotated[
        float, typer.Option(min=0.1, help="Seconds to wait for an answer.", rich_help_panel=ENDPOINT)
    ] = 120.0,
    concurrency: Annotated[
        int, typer.Option(min=1, max=256, help="Concurrent requests.", rich_help_panel=ENDPOINT)
    ] = 8,
    *,
    options: DecodingOptions,
) -> None:
    """Measure how much accuracy smaller caches cost, task by task: records, tables and an HTML report."""
    from snapstream.evaluation.grid import Grid

    if model is not None or model_option is not None:
        model = chosen_model(model, model_option)
    default = "served" if endpoint else f"full,streaming,snapstream,{DEFAULT_POLICY}"
    allowed = ENDPOINT_POLICIES if endpoint else tuple(dict.fromkeys([*ENGINE_POLICIES, *policy_names()]))
    chosen = split_names(policies or default, "policies")
    if sweep and (endpoint or swept_of(chosen) is None):
        raise ConfigurationError(
            "sweep: settings can be swept with the built-in engine only, for the policy snapstream or spans; an "
            "endpoint's settings are fixed when it starts"
        )
    if "served" in chosen and not served_as:
        raise ConfigurationError(
            "the policy served needs --served-as, a label for what the endpoint runs, such as full or streaming-4k; it "
            "cannot be detected, and results of different servers must not be mixed"
        )
    variants = make_variants(chosen, parse_sizes(budgets), parse_sweeps(sweep or []), allowed)
    grid = None
    if tasks is not None or not questions:
        grid = Grid(
            tasks=find_tasks(split_names(tasks or "all", "tasks")),
            lengths=sorted(set(parse_lengths(lengths))),
            variants=variants,
            samples=samples or 20,
            depths=[index / (depths - 1) for index in range(depths)] if depths > 1 else [0.5] * depths,
            decode=decode,
            seed=seed,
        )
    asked = _read_files(questions or [], ask, run_code, samples, half)
    config = options.config(slots=slots)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigurationError(f"output: {output} cannot be a directory ({error.strerror})") from error
    for written in WRITTEN:
        check_output(output / written)
    with messages.status("connecting" if endpoint else "loading"):
        host: Host
        if endpoint:
            host = _endpoint(endpoint, model, tokenizer, timeout, concurrency, chat, variants, served_as or "")
            plan = None if asked is None else asked(variants, host.prompts, longest=host.max_length)
            notes = []
            if grid is not None:
                possible = [task for task in grid.tasks if host.refuses(task) is None]
                notes = replace(grid, tasks=possible or grid.tasks).check(host.max_length)
        else:
            host, plan, notes = _engine(
                model or TASK_MODEL.name, grid, asked, variants, config, chat, return_kept_tokens
            )
    _run(host, grid, plan, output, notes, decode)


def _read_files(
    places: Sequence[str], ask: str, run_code: bool, samples: int | None, half: str | None
) -> partial[QuestionPlan] | None:
    """Read files of questions, before anything large is loaded; the plan still needs caches and a tokenizer."""
    if not places:
        if run_code or ask != "with" or half is not None:
            raise ConfigurationError(
                "--run-code, --ask and --half are about questions from files; give --questions FILE"
            )
        return None
    from snapstream.evaluation.questions.code import require_confinement
    from snapstream.evaluation.questions.files import read_all_questions
    from snapstream.evaluation.questions.plan import HALVES, PLACES, QuestionPlan

    stands = split_names(ask, "ask")
    unknown = [place for place in stands if place not in PLACES]
    if unknown:
        raise ConfigurationError(f"ask: unknown place {', '.join(unknown)}; allowed: {', '.join(PLACES)}")
    if half is not None and half not in HALVES:
        raise ConfigurationError(f"half: {half!r} is no half; allowed: {', '.join(HALVES)}")
    if run_code:
        require_confinement()
    files = read_all_questions(places)
    return partial(QuestionPlan, files, samples=samples, half=half, places=stands, code=run_code)


def _engine(
    model: str,
    grid: Grid | None,
    asked: partial[QuestionPlan] | None,
    variants: Sequence[Variant],
    config: EngineConfig,
    chat: bool | None,
    return_kept_tokens: bool,
) -> tuple[Host, QuestionPlan | None, list[str]]:
    """Load the model, once everything else is known to fit."""
    from snapstream.engine.settings import load_tokenizer
    from snapstream.evaluation.engine_host import EngineHost
    from snapstream.evaluation.hosts import Prompts
    from snapstream.models.files import resolve_checkpoint, resolve_config
    from snapstream.models.weights import load_spec

    longest = load_spec(resolve_config(model)).max_position
    notes = grid.check(longest) if grid is not None else []
    plan = None
    if asked is not None:
        plan = asked(variants, Prompts(load_tokenizer(str(resolve_checkpoint(model))), chat=chat), longest=longest)
        # Questions about one text share its prefill, which multi-token prediction cannot do yet; a text that is stored
        # before its questions needs a session.
        shares = plan.shares_texts and config.speculative != "mtp"
        config = replace(config, prefix_contexts=int(shares), prefix_cache=None if shares else 0)
        config = replace(config, sessions=int(plan.stores_texts))
    parts = [part for part in (grid, plan) if part is not None]
    host = EngineHost(
        model,
        max_length=max(part.longest for part in parts),
        budgets=[budget for part in parts for budget in part.budgets()],
        config=config,
        chat=chat,
        return_kept_tokens=return_kept_tokens,
    )
    return host, plan, notes


def _endpoint(
    url: str,
    model: str | None,
    tokenizer: str | None,
    timeout: float,
    concurrency: int,
    chat: bool | None,
    variants: Sequence[Variant],
    served_as: str,
) -> EndpointHost:
    from snapstream.evaluation.endpoint_host import EndpointHost

    return EndpointHost(
        url,
        model=model,
        tokenizer=tokenizer,
        api_key=os.environ.get("OPENAI_API_KEY"),
        timeout=timeout,
        concurrency=concurrency,
        chat=chat,
        needs_budgets=any(variant.policy == DEFAULT_POLICY for variant in variants),
        served_as=served_as,
    )


def _run(host: Host, grid: Grid | None, plan: QuestionPlan | None, output: Path, notes: list[str], decode: int) -> None:
    """Run the questions without a record, then report on all records, also after an error."""
    from snapstream import __version__
    from snapstream.evaluation.lab import run_grid, run_questions
    from snapstream.evaluation.records import RecordFile

    header: dict[str, Any] = {"snapstream": __version__, **host.describe(), "decode": decode}
    path = output / RECORDS
    try:
        with RecordFile(path, header) as file:
            before = len(file.records)
            if before:
                messages.print(f"{path}: continuing after {before} answers", highlight=False)
            try:
                with _progress() as progress:
                    bar = progress.add_task("")

                    def show(what: str, done: int, total: int) -> None:
                        progress.update(bar, description=what, completed=done, total=total)

                    if plan is not None:
                        notes += [*plan.notes, *run_questions(host, plan, file, show)]
                    if grid is not None:
                        notes += run_grid(host, grid, file, show)
            except (SnapStreamError, KeyboardInterrupt) as error:
                new = len(file.records) - before
                told = f"{new} new answers are kept in {path}; the same command continues from there"
                if isinstance(error, KeyboardInterrupt):
                    messages.print(f"stopped: {told}", highlight=False)
                    raise
                if file.records:
                    _report(header, file, output, [*notes, f"stopped by an error: {error}"])
                raise type(error)(f"{error}; {told}") from error
            for note in notes:
                messages.print(note, highlight=False)
            if not file.records:
                raise ConfigurationError("nothing was run: every task or cache was left out")
            report = _report(header, file, output, notes)
    except OSError as error:
        raise ConfigurationError(f"output: {error.filename or path}: {error.strerror}") from error
    print(report)
    messages.print(f"{len(file.records)} answers: {output}/results.jsonl and report.*", highlight=False)


def _progress() -> Progress:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=messages, transient=True)


def _report(header: dict[str, Any], file: RecordFile, output: Path, notes: list[str]) -> str:
    """Write the reports and return the Markdown one."""
    from snapstream.evaluation.html import render_html
    from snapstream.evaluation.markdown import render_markdown
    from snapstream.evaluation.tables import Results

    results = Results(file.records)
    text = render_markdown(header, results, notes)
    write_text(output / REPORT, text)
    try:
        page = render_html(header, results, notes)
    except ConfigurationError as error:
        messages.print(f"{error}; the Markdown has all tables", highlight=False)
    else:
        write_text(output / PAGE, page)
    return text
