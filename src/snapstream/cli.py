"""The ``snapstream`` command."""

from __future__ import annotations

import json
import logging
import random
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.logging import RichHandler
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from snapstream.assets import SHIPPED, TASK_MODEL
from snapstream.config import CacheBudget, EngineConfig, SamplingParams
from snapstream.errors import ConfigurationError, RequestError, SnapStreamError
from snapstream.evaluation.command import evaluate
from snapstream.options import Budget, Device, Dtype, MaxLength, Model, Policy, parse_budget, quiet
from snapstream.serving.command import serve

app = typer.Typer(
    help="LLM inference with a KV cache of fixed size per sequence.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
messages = Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine does.")] = False,
) -> None:
    """Options of all commands."""
    logging.basicConfig(
        level=logging.INFO if verbose else logging.WARNING,
        format="%(message)s",
        handlers=[RichHandler(console=messages, show_path=False, show_time=False)],
    )
    if version:
        from snapstream import __version__

        print(f"snapstream {__version__}")
        raise typer.Exit


@app.command()
def demo(
    model: Annotated[
        str, typer.Option("--model", "-m", help=f"A shipped model: {', '.join(SHIPPED)}.")
    ] = TASK_MODEL.name,
    tokens: Annotated[int, typer.Option(min=128, max=12000, help="Length of the text, in tokens.")] = 8000,
    facts: Annotated[int, typer.Option(min=1, max=64, help="Facts hidden in it.")] = 16,
    questions: Annotated[int, typer.Option(min=1, max=64, help="How many of them to ask for.")] = 8,
    budget: Annotated[
        int | None,
        typer.Option("--budget", "-b", min=16, help="Entries of the small caches. Default: a quarter of the text."),
    ] = None,
    slots: Annotated[int, typer.Option(min=1, max=16, help="Sequences decoded at a time.")] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the text.")] = 0,
    compiled: Annotated[
        bool, typer.Option("--compile/--eager", help="Compile the graphs: a minute more at the first start.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Ask a small shipped model for facts in a long text: full cache, StreamingLLM and SnapStream side by side."""
    from snapstream.engine.settings import load_tokenizer
    from snapstream.evaluation.comparison import compare_policies
    from snapstream.evaluation.tasks import TooShortError
    from snapstream.evaluation.tasks.needle import notes

    if model not in SHIPPED:
        raise ConfigurationError(f"the demo's text is for the shipped models ({', '.join(SHIPPED)}), not {model!r}")
    small = budget or tokens // 4
    with quiet():
        tokenizer = load_tokenizer(str(SHIPPED[model]))
    number = max(facts, questions)
    try:
        made = notes(random.Random(seed), tokens, lambda text: len(tokenizer.encode(text)), None, number)
    except TooShortError as error:
        raise ConfigurationError(f"{number} facts do not fit into {tokens} tokens ({error})") from error
    depths = {question: made.text.index(question.parts[0]) / len(made.text) for question in made.questions}
    in_order = sorted(made.questions, key=lambda question: depths[question])
    asked = [in_order[int(i * number / questions)] for i in range(questions)]
    budgets = {
        "full": None,
        "streaming": CacheBudget.preset("streaming", small),
        "snapstream": CacheBudget.of(small),
    }
    if not as_json:
        messages.print(
            f"A text of {tokens} tokens that hides {number} facts. It begins: "
            f"[italic]{made.text[:150]}…[/italic]\nA fact in it: [italic]{_sentence_with(asked[0].parts[0], made.text)}"
            f"[/italic] Its question: [italic]…{asked[0].ask}[/italic]\n",
        )
    with quiet(), messages.status("starting") as status:
        results = compare_policies(
            str(SHIPPED[model]),
            made,
            tokens,
            asked,
            budgets,
            slots=slots,
            enforce_eager=not compiled,
            report=status.update,
        )
    if as_json:
        print(
            json.dumps(
                {
                    "tokens": tokens,
                    "questions": [q.ask.strip() for q in asked],
                    "policies": [asdict(r) for r in results],
                }
            )
        )
        return
    from snapstream.engine.memory import gigabytes

    console = Console()
    answers = Table(title=f"Answers (the text has {tokens} tokens)", title_justify="left")
    for column in ("fact at", "asked for", *(r.policy for r in results)):
        answers.add_column(column)
    for row, question in enumerate(asked):
        marks = ("[green]" if r.correct[row] else "[red]✗ " for r in results)
        cells = (f"{mark}{r.answers[row]}" for mark, r in zip(marks, results, strict=True))
        answers.add_row(f"{depths[question]:.0%}", f"{question.ask.split()[-1]}{question.answer}", *cells)
    console.print(answers)
    summary = Table(title="What it takes", title_justify="left")
    for column in (
        "policy",
        "right answers",
        "cache entries",
        "cache memory / sequence",
        "decode tokens/s (range)",
        "speed",
    ):
        summary.add_column(column, justify="left" if column == "policy" else "right")
    for r in results:
        median, low, high = r.tokens_per_second
        summary.add_row(
            r.policy,
            f"{sum(r.correct)} of {len(r.correct)}",
            f"{r.cache_entries}",
            gigabytes(r.bytes_per_sequence),
            f"{median:.0f} ({low:.0f}-{high:.0f})",
            f"{median / results[0].tokens_per_second[0]:.2f}x",
        )
    console.print(summary)
    console.print(
        f"Speed: {slots} sequences at a time, {'compiled' if compiled else 'not compiled'}. The model is tiny, so "
        "caches weigh little in its steps; docs/benchmarks.md has a larger one. The first word of an answer comes "
        "from prefill, which every policy does in full; the second needs what the cache kept."
    )


@app.command()
def generate(
    prompt: Annotated[
        str | None, typer.Argument(help="The prompt; with --file, the question put after the text. '-' reads stdin.")
    ] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A text file that begins the prompt.")] = None,
    model: Model = TASK_MODEL.name,
    budget: Budget = None,
    policy: Policy = "snapstream",
    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens that reach this probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample among this many tokens; 0 is all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="A string that ends the output; may be given again.")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Lay the prompt out with the model's chat template.")] = False,
    max_model_len: MaxLength = None,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens per prefill launch.")] = 512,
    dtype: Dtype = "auto",
    device: Device = "auto",
    compiled: Annotated[
        bool, typer.Option("--compile/--eager", help="Compile the graphs: starts later, decodes faster.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Generate text: the answer streams to stdout; progress and what was kept and saved go to stderr."""
    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed, stop=tuple(stop or ())
    )
    text = _read_prompt(prompt, file)
    parsed = parse_budget(budget, policy)
    from snapstream.engine import LLM
    from snapstream.engine.memory import gigabytes

    with quiet():
        config = EngineConfig(
            max_model_len=max_model_len,
            slots=1,
            prefill_chunk=prefill_chunk,
            dtype=dtype,
            device=device,
            enforce_eager=not compiled,
        )
        with messages.status("loading"):
            llm = LLM(
                model,
                budget=parsed,
                config=config,
                report_plan=lambda plan: messages.print(plan.summary(), highlight=False),
            )
        name = llm.add_request(llm.chat_prompt([{"role": "user", "content": text}]) if chat else text, params)
        output = None
        progress = Progress(
            TextColumn("reading the prompt"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=messages,
            transient=True,
        )
        with progress:
            task = progress.add_task("", total=llm.prefill_progress(name)[1])
            while output is None:
                outputs = llm.step()
                output = outputs[0] if outputs else None
                if output is None or not output.finished:
                    progress.update(task, completed=llm.prefill_progress(name)[0])
        while True:
            if not as_json:
                print(output.new_text, end="", flush=True)
            if output.finished:
                break
            output = llm.step()[0]
    if output.error is not None:
        raise RequestError(f"generation failed: {output.error}")
    use = output.cache
    assert use is not None
    if as_json:
        print(
            json.dumps(
                {
                    "text": output.text,
                    "token_ids": output.token_ids,
                    "finish_reason": output.finish_reason,
                    "cache": asdict(use),
                }
            )
        )
        return
    print()
    messages.print(
        f"prompt of {use.prompt_tokens} tokens: kept {use.sink} first + {use.pinned} voted + {use.recent} recent, "
        f"dropped {use.dropped}; cache of {use.limit} entries takes {gigabytes(use.bytes_held)}, "
        f"a full one would take {gigabytes(use.bytes_full)} by now",
        highlight=False,
    )


@app.command()
def plan(
    model: Model = TASK_MODEL.name,
    budget: Budget = None,
    policy: Policy = "snapstream",
    slots: Annotated[int, typer.Option(help="Sequences decoded at a time.")] = 4,
    max_model_len: MaxLength = None,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens per prefill launch.")] = 512,
    dtype: Dtype = "auto",
    memory: Annotated[
        float | None, typer.Option(help="GiB to fit into; also prints how many slots fit. Default: no limit.")
    ] = None,
    cache_memory: Annotated[
        float | None,
        typer.Option(help="GiB for caches alone, such as all devices have left; prints how many slots fit."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Memory for a model, a budget and a number of slots, computed from config.json alone; nothing is loaded."""
    import torch

    from snapstream.engine.memory import gigabytes, plan_memory
    from snapstream.engine.settings import choose_budget, choose_max_model_len
    from snapstream.models.weights import load_spec, resolve_config

    with quiet():
        spec = load_spec(resolve_config(model))
    for option, given in (("memory", memory), ("cache-memory", cache_memory)):
        if given is not None and not 0 < given < 2**40:
            raise ConfigurationError(f"{option} is {given} GiB; it must be a positive number")
    config = EngineConfig(slots=slots, prefill_chunk=prefill_chunk, dtype=dtype)
    length = choose_max_model_len(max_model_len, spec.max_position)
    chosen = choose_budget(parse_budget(budget, policy), length)
    available = None if memory is None else int(memory * 2**30)
    kind = spec.dtype if dtype == "auto" else getattr(torch, dtype)
    planned = plan_memory(spec, config, chosen, max_model_len=length, dtype=kind, available=available)
    if as_json:
        fields = asdict(planned) | {"total": planned.total, "total_full": planned.total_full}
        fields |= {"slots_that_fit": planned.slots_that_fit(), "slots_that_fit_full": planned.slots_that_fit(full=True)}
        if cache_memory is not None:
            room = int(cache_memory * 2**30)
            fields |= {
                "slots_in_caches": planned.slots_in(room),
                "slots_in_caches_full": planned.slots_in(room, full=True),
            }
        print(json.dumps(fields))
    else:
        table = Table(
            title=f"{spec.architecture}, {planned.slot_count} slots, up to {length} tokens, {kind}".replace(
                "torch.", ""
            ),
            title_justify="left",
        )
        for column in ("", f"cache of {planned.cache_entries}", f"full cache of {length}", "ratio"):
            table.add_column(column, justify="left" if not column else "right")
        for name, ours, full in (
            ("weights", planned.weights, planned.weights),
            ("caches of all slots", planned.slots, planned.full_slots),
            ("metadata", planned.metadata, planned.metadata),
            ("steady state", planned.steady, planned.steady - planned.slots + planned.full_slots),
            ("staging (prefill)", planned.staging, planned.staging),
            ("workspace (prefill)", planned.workspace, planned.workspace),
            ("peak", planned.total, planned.total_full),
        ):
            table.add_row(name, gigabytes(ours), gigabytes(full), "" if ours == full else f"{full / ours:.2f}x less")
        fitting = []
        if memory is not None:
            fitting.append((f"slots in {memory:g} GiB", planned.slots_that_fit(), planned.slots_that_fit(full=True)))
        if cache_memory is not None:
            room = int(cache_memory * 2**30)
            counts = planned.slots_in(room), planned.slots_in(room, full=True)
            fitting.append((f"slots in {cache_memory:g} GiB of caches", *counts))
        for name, many, few in fitting:
            table.add_row(name, str(many), str(few), f"{many / few:.2f}x as many" if many and few else "")
        Console().print(table)
    planned.check()


app.command("serve")(serve)
app.command("eval")(evaluate)


def main() -> None:
    """Run the command; errors that a user can mend are one line and a non-zero exit code."""
    try:
        app()
    except SnapStreamError as error:
        messages.print(f"[bold red]error:[/bold red] {_escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _read_prompt(prompt: str | None, file: Path | None) -> str:
    parts = []
    if file is not None:
        try:
            parts.append(_decoded(file.read_bytes(), str(file)))
        except OSError as error:
            raise RequestError(f"{file} could not be read: {error.strerror}") from error
    if prompt == "-" or (prompt is None and file is None and not sys.stdin.isatty()):
        parts.append(_decoded(sys.stdin.buffer.read(), "standard input"))
    elif prompt is not None:
        parts.append(prompt)
    if not parts:
        raise RequestError("no prompt: give it as an argument, with --file, or on stdin")
    return "\n".join(part.rstrip("\n") for part in parts)


def _decoded(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{source} is not UTF-8 text (byte {error.start})") from error


def _sentence_with(words: str, text: str) -> str:
    at = text.index(words)
    return text[text.rindex(".", 0, at) + 2 : text.index(".", at) + 1]


def _escape(text: str) -> str:
    return text.replace("[", r"\[")


if __name__ == "__main__":
    main()
