"""The lab on the built-in engine with the shipped model: the same answers as the engine's own, from one reading."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import jinja2
import pytest
from typer.testing import CliRunner

from snapstream import LLM, CacheBudget, SamplingParams
from snapstream.assets import TASK_MODEL
from snapstream.cli import app
from snapstream.config import EngineConfig
from snapstream.errors import SnapStreamError
from snapstream.evaluation.engine_host import EngineHost
from snapstream.evaluation.grid import Grid
from snapstream.evaluation.hosts import Prompts
from snapstream.evaluation.lab import run_grid
from snapstream.evaluation.policies import ENGINE_POLICIES, make_variants
from snapstream.evaluation.records import RecordFile, read_records
from snapstream.evaluation.tasks import TASKS, Sample, find_tasks, make_sample
from snapstream.models.fingerprint import fingerprint
from tests import commands

MODEL = str(TASK_MODEL)
LENGTH = 400


def run(tmp_path, **changes):
    settings = {
        "tasks": find_tasks(["multikey", "late-question", "long-decode"]),
        "lengths": [LENGTH],
        "variants": make_variants(ENGINE_POLICIES, ["1/4"], [()], ENGINE_POLICIES),
        "samples": 3,
        "depths": [],
        "decode": 80,
        "seed": 0,
    }
    grid = Grid(**(settings | changes))
    config = EngineConfig(slots=5, prefill_chunk=128, enforce_eager=True)
    host = EngineHost(
        MODEL, max_length=grid.longest, budgets=grid.budgets(), config=config, chat=None, return_kept_tokens=True
    )
    with RecordFile(tmp_path / "r.jsonl", host.describe()) as file:
        assert run_grid(host, grid, file) == []
    return host, read_records(tmp_path / "r.jsonl")[1]


def test_answers_are_those_of_an_engine_with_that_cache_alone(tmp_path):
    """Every policy and task; the reference has an engine, a reading and a second turn of its own for each."""
    _, records = run(tmp_path)
    # A truncated prompt has no room for what follows in the other two.
    assert len(records) == 3 * 3 * (len(ENGINE_POLICIES) - 1) + 3
    engines = {}
    for record in records:
        entries = LENGTH // 4
        if record.policy not in engines:
            size = {"full": 700, "truncated": 700}.get(record.policy)
            budget = CacheBudget.preset("full", size) if size else CacheBudget.preset(record.policy, entries)
            engines[record.policy] = LLM(MODEL, budget=budget, max_model_len=700, slots=1, enforce_eager=True)
        llm, task = engines[record.policy], TASKS[record.task]
        encode = llm.tokenizer.encode
        sample = make_sample(task, LENGTH, record.seed, lambda text, encode=encode: len(encode(text)), decode=80)
        tokens, forced = encode(sample.prompt + sample.lead), encode(sample.reply + sample.second)
        if record.policy == "truncated":
            room = max(1, entries - len(forced) - task.max_tokens)
            tokens = tokens if len(tokens) <= room else tokens[: room // 2] + tokens[-(room - room // 2) :]
        params = SamplingParams(max_tokens=len(forced) + task.max_tokens, forced=tuple(forced))
        out = llm.generate(tokens, params)[0]
        assert record.output == llm.tokenizer.decode(out.token_ids[len(forced) :], skip_special_tokens=True)
        assert record.prompt_tokens == len(tokens)
        if record.policy not in ("full", "truncated"):
            assert record.budget == llm.engine.budget.as_dict() | {"capacity": entries}
            assert record.entries == entries
        assert all(0 < mass <= 1.00001 for mass in record.mass)
        assert record.policy not in ("full", "truncated") or record.mass == pytest.approx([1.0] * len(record.mass))


def test_all_policies_share_one_reading(tmp_path, monkeypatch):
    from snapstream.engine.runner import ModelRunner

    begun, begin = [], ModelRunner.begin
    monkeypatch.setattr(
        ModelRunner,
        "begin",
        lambda self, requests, *others: (begun.append(len(requests)), begin(self, requests, *others))[1],
    )
    policies = [policy for policy in ENGINE_POLICIES if policy != "truncated"]
    run(tmp_path, variants=make_variants(policies, ["1/2", "1/4", "64"], [()], ENGINE_POLICIES), samples=2)
    caches = 3 * (len(policies) - 1) + 1  # the full one has no size
    assert begun == [caches] * 3 * 2


def test_one_picture_of_what_was_kept_per_cell(tmp_path):
    _, records = run(tmp_path, tasks=find_tasks(["multikey"]), depths=[0.0, 0.5, 1.0])
    pictured = [record for record in records if record.kept is not None]
    assert {record.seed for record in pictured} == {1}
    assert {record.depth for record in pictured} == {0.5}
    assert len(pictured) == len(ENGINE_POLICIES)
    for record in pictured:
        assert len(record.kept) == 2  # layers
        kept = sum(record.kept[0][0]) / len(record.kept[0][0]) * record.prompt_tokens
        assert kept == pytest.approx(min(record.prompt_tokens, record.entries or 10**9), rel=0.02)


def test_the_shipped_model_can_do_what_its_card_says(tmp_path):
    """And a voted quarter of the cache keeps what sinks and recent tokens alone lose."""
    _, records = run(tmp_path, tasks=find_tasks(["needle", "multikey", "multiquery", "passkey", "kv"]), samples=12)
    share = {
        policy: sum(r.right for r in records if r.policy == policy) / sum(r.policy == policy for r in records)
        for policy in ("full", "snapstream", "mixed", "spans", "streaming", "random")
    }
    assert share["full"] > 0.9
    assert share["snapstream"] > 0.8
    assert min(share["mixed"], share["spans"]) > 0.8
    assert max(share["streaming"], share["random"]) < 0.5


class Characters:
    """A tokenizer whose tokens are characters, with a beginning-of-sequence token and a chat template."""

    chat_template = (
        "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )

    def encode(self, text, add_special_tokens=True):
        return ["<s>"] * add_special_tokens + list(text)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        def refuse(message):
            raise jinja2.TemplateError(message)

        template = jinja2.Template(self.chat_template)
        return template.render(messages=messages, add_generation_prompt=add_generation_prompt, refuse=refuse)


SAMPLE = Sample("t", 0, "Read this.", " It", " is read.", " And now?", " amber river.", ("amber river",))


def test_without_a_template_turns_just_follow_each_other():
    prompts = Prompts(Characters(), chat=False)
    assert prompts.first(SAMPLE) == ["<s>", *"Read this. It"]
    assert prompts.then(SAMPLE) == list(" is read. And now?")
    assert prompts.overhead == 1


def test_a_chat_template_lays_out_both_turns():
    """What is read and what follows together are the conversation as the template writes it, with one beginning."""
    prompts = Prompts(Characters(), chat=None)
    assert prompts.chat
    assert "".join(prompts.first(SAMPLE)) == "[user]Read this.[assistant]It"
    assert "".join(prompts.then(SAMPLE)) == " is read.[user]And now?[assistant]"
    assert prompts.overhead == len("[user][assistant]")
    assert prompts.then(replace(SAMPLE, second="", reply="")) == []


def test_a_chat_model_continues_the_words_before_the_answer():
    """In its own turn, as it does not continue the user's; in a second turn, they are decoded."""
    prompts, begun = Prompts(Characters(), chat=True), replace(SAMPLE, lead="", opening="Note:")
    once = replace(begun, second="", reply="", opening="", begins="Note:")
    assert "".join(prompts.first(once)) == "[user]Read this.[assistant]Note:"
    assert prompts.then(once) == []
    assert "".join(prompts.first(begun)) == "[user]Read this.[assistant]"
    assert "".join(prompts.then(begun)) == "is read.[user]And now?[assistant]Note:"


def test_templates_that_cannot_be_used_are_named():
    tokenizer = Characters()
    tokenizer.chat_template = "{{ messages[-1].content }}"
    with pytest.raises(SnapStreamError, match="rewrites earlier turns"):
        Prompts(tokenizer, chat=True).then(SAMPLE)
    tokenizer.chat_template = "{{ refuse('no users here') }}"
    with pytest.raises(SnapStreamError, match=r"chat template fails \(no users here\); use --no-chat"):
        Prompts(tokenizer, chat=True)
    tokenizer.chat_template = None
    with pytest.raises(SnapStreamError, match="no chat template"):
        Prompts(tokenizer, chat=True)
    assert not Prompts(tokenizer, chat=None).chat


def test_truncation_keeps_both_ends():
    from transformers import AutoTokenizer

    prompts = Prompts(AutoTokenizer.from_pretrained(MODEL), chat=None)
    assert prompts.truncated(list(range(10)), 5) == [0, 1, 7, 8, 9]
    assert prompts.truncated(list(range(5)), 5) == [0, 1, 2, 3, 4]


def command(*arguments):
    return CliRunner().invoke(app, ["eval", *map(str, arguments)], catch_exceptions=True)


def test_the_command_writes_records_and_reports(tmp_path):
    done = command(
        "--tasks", "multikey,kv", "--lengths", "300,500", "--budgets", "1/2,1/4", "--samples", "3", "-o", tmp_path
    )
    assert done.exit_code == 0, done.output
    header, records = read_records(tmp_path / "results.jsonl")
    assert len(records) == 2 * 2 * 3 * 7
    assert header["model"] == "task-model"
    assert header["checkpoint"] == fingerprint(TASK_MODEL)
    assert (tmp_path / "report.md").read_text() in done.stdout
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == page.count("</svg>") == 6  # curve, heat map and kept tokens of each task
    assert not re.search(r'(src|href)="(?!#|data:)', page)  # nothing is fetched
    assert "<script" not in page
    assert '<a href="#kv">' in page
    again = command(
        "--tasks", "multikey,kv", "--lengths", "300,500", "--budgets", "1/2,1/4", "--samples", "3", "-o", tmp_path
    )
    assert again.exit_code == 0
    assert read_records(tmp_path / "results.jsonl")[1] == records
    assert (tmp_path / "report.html").read_text() == page  # equal results give an equal page


ARGUMENTS = [
    "--tasks",
    "long-decode,multikey",
    "--lengths",
    "300,600",
    "--budgets",
    "1/4",
    "--samples",
    "4",
    "--decode",
    "200",
    "--slots",
    "3",
]


def test_a_killed_run_goes_on_where_it_stopped(tmp_path):
    """Killed without warning in mid-run, twice; the file is that of a run that was left alone."""

    def start(directory):
        return subprocess.Popen(
            [sys.executable, "-m", "snapstream.cli", "eval", *ARGUMENTS, "-o", str(directory)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            text=True,
        )

    path, sizes = tmp_path / "killed" / "results.jsonl", []
    for _ in range(2):
        before = path.stat().st_size if path.exists() else 0
        process = start(path.parent)
        while not path.exists() or path.stat().st_size <= before + 1500:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        sizes.append(path.read_text().count("\n"))
    process = start(path.parent)
    errors = process.communicate()[1]
    assert process.returncode == 0
    assert "continuing after" in errors
    whole = start(tmp_path / "whole")
    assert whole.communicate()
    assert whole.returncode == 0
    killed, left = (read_records(tmp_path / name / "results.jsonl") for name in ("killed", "whole"))
    assert killed[0] == left[0]
    assert len(killed[1]) == len({record.key for record in killed[1]}) == 2 * 2 * 4 * 4
    assert sorted(killed[1], key=lambda r: r.key) == sorted(left[1], key=lambda r: r.key)
    assert 1 < sizes[0] < sizes[1] < 1 + len(killed[1])
    assert (tmp_path / "killed" / "report.md").read_text() == (tmp_path / "whole" / "report.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "haystack"], "unknown task haystack; allowed: all, prose, needle"),
        (["--lengths", "64k"], "are more than the model's 16384"),
        (
            ["--tasks", "needle", "--lengths", "512", "--budgets", "1k"],
            "budgets: streaming at 1024: no smaller than the prompt for lengths 512; leave it out",
        ),
        (["--policies", "best"], "unknown policy best; allowed here: full, truncated"),
        (["--sweep", "kernel=4"], "kernel is 4; use an odd number"),
        (["--model", "no/such"], "no/such"),
        (["--endpoint", "http://127.0.0.1:9/v1"], "the policy served needs --served-as"),
        (["--endpoint", "http://127.0.0.1:9/v1", "--served-as", "full"], "http://127.0.0.1:9/v1 cannot be reached"),
        (
            ["--endpoint", "http://127.0.0.1:9/v1", "--sweep", "window=8"],
            "an endpoint's settings are fixed when it starts",
        ),
        (
            ["--policies", "full,streaming", "--sweep", "window=8"],
            "settings can be swept with the built-in engine only, for the policy",
        ),
    ],
)
def test_bad_input_is_one_line(tmp_path, arguments, message):
    done = commands.run("eval", *arguments, "-o", tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    assert message in lines[0]
    assert not list(tmp_path.iterdir())


def test_an_error_in_mid_run_keeps_what_finished(tmp_path, monkeypatch):
    answer = EngineHost._answer
    calls = []

    def fail(self, job, output, forced):
        calls.append(job)
        if len(calls) == 5:
            raise SnapStreamError("the machine caught fire")
        return answer(self, job, output, forced)

    monkeypatch.setattr(EngineHost, "_answer", fail)
    arguments = ["--tasks", "multikey", "--lengths", "300", "--budgets", "1/4", "--samples", "4", "-o", tmp_path]
    done = command(*arguments)
    assert isinstance(done.exception, SnapStreamError)
    assert f"the machine caught fire; 4 new answers are kept in {tmp_path}/results.jsonl" in str(done.exception)
    monkeypatch.undo()
    assert command(*arguments).exit_code == 0
    assert len(read_records(tmp_path / "results.jsonl")[1]) == 16


def test_fingerprints_tell_checkpoints_apart(tmp_path):
    made = [fingerprint(TASK_MODEL)]
    shutil.copytree(TASK_MODEL, tmp_path / "copy")
    assert fingerprint(tmp_path / "copy") == made[0]
    for name, place in [
        ("model.safetensors", -1),
        ("model.safetensors", 1000),
        ("config.json", 9),
        ("tokenizer.json", 99),
    ]:
        path = tmp_path / "copy" / name
        data = bytearray(path.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        made.append(fingerprint(tmp_path / "copy"))
    assert len(set(made)) == 5


@pytest.mark.parametrize("kind", ["file", "under a file", "results is a directory"])
def test_an_output_that_cannot_be_written_is_one_line(tmp_path, kind):
    target = tmp_path / "there"
    if kind == "results is a directory":
        (target / "results.jsonl").mkdir(parents=True)
    else:
        target.write_text("mine")
        target = target / "below" if kind == "under a file" else target
    done = command("--tasks", "needle", "--lengths", "200", "--samples", "1", "-o", target)
    assert isinstance(done.exception, SnapStreamError)
    assert str(done.exception).startswith("output: ")


def test_an_interrupted_run_leaves_nothing_behind(tmp_path):
    """What was running when it stopped is not delivered as an answer to the next."""
    variants = make_variants(["full", "streaming"], ["1/4"], [()], ENGINE_POLICIES)
    grid = Grid(find_tasks(["multikey"]), [LENGTH], variants, 3, [], 80, 0)
    config = EngineConfig(slots=5, enforce_eager=True)
    host = EngineHost(
        MODEL, max_length=grid.longest, budgets=grid.budgets(), config=config, chat=None, return_kept_tokens=False
    )

    def interrupt(*_):
        raise KeyboardInterrupt

    with RecordFile(tmp_path / "a.jsonl", {}) as file, pytest.raises(KeyboardInterrupt):
        run_grid(host, grid, file, lambda what, done, total: interrupt() if done == 2 else None)
    with RecordFile(tmp_path / "b.jsonl", {}) as file:
        run_grid(host, grid, file)
        assert len(file.records) == 6
        assert all(record.finish_reason in ("stop", "length") for record in file.records)
