"""Questions from files to the built-in engine: the answers are the engine's own, from one reading of each text."""

import json
import re
from dataclasses import replace

import pytest

from snapstream import LLM, CacheBudget, SamplingParams
from snapstream.assets import TASK_MODEL
from snapstream.config import EngineConfig
from snapstream.errors import ConfigurationError
from snapstream.evaluation.engine_host import EngineHost
from snapstream.evaluation.hosts import Answer, Prompts
from snapstream.evaluation.lab import run_questions
from snapstream.evaluation.markdown import render_markdown
from snapstream.evaluation.policies import ENGINE_POLICIES, make_variants
from snapstream.evaluation.questions.files import read_questions
from snapstream.evaluation.questions.plan import QuestionPlan
from snapstream.evaluation.records import RecordFile, read_records
from snapstream.evaluation.tables import Results
from tests import commands
from tests.evaluation import test_lab
from tests.texts import Notes

MODEL = str(TASK_MODEL)
POLICIES = ("full", "truncated", "streaming", "snapstream", "spans")


@pytest.fixture(scope="module")
def document():
    return Notes(900, 6)


@pytest.fixture
def questions(tmp_path, document):
    asked = [
        {"question": question.ask.strip(), "answers": question.answer.strip(" ."), "max_tokens": 12}
        for question in document.questions[:3]
    ]
    forced = asked[0] | {"opening": document.questions[0].answer.split()[0], "id": "forced"}
    path = tmp_path / "notes.jsonl"
    path.write_text(json.dumps({"text": document.text.strip(), "questions": [*asked, forced]}) + "\n")
    return path


def test_answers_are_those_of_an_engine_with_that_cache_alone(tmp_path, questions):
    """With the question in the prompt, and after a text that was stored: each text is read once."""
    llm = LLM(MODEL, max_model_len=1400, slots=2, sessions=1, prefill_chunk=128, enforce_eager=True)
    prompts = Prompts(llm.tokenizer, chat=None)
    variants = make_variants(POLICIES, ["1/4"], [()], ENGINE_POLICIES)
    plan = QuestionPlan([read_questions(str(questions))], variants, prompts, places=("with", "after"))
    config = EngineConfig(slots=5, prefill_chunk=128, enforce_eager=True, sessions=1, prefix_contexts=1)
    host = EngineHost(
        MODEL, max_length=plan.longest, budgets=plan.budgets(), config=config, chat=None, return_kept_tokens=False
    )
    with RecordFile(tmp_path / "r.jsonl", host.describe()) as file:
        assert run_questions(host, plan, file) == []
        assert len(file.records) == 4 * 5 + 4 * 4
        assert run_questions(host, plan, file) == []  # everything is there
        records = file.records
        assert len(records) == 4 * 5 + 4 * 4
    (text,) = read_questions(str(questions)).texts
    for record in records:
        question = text.questions[record.seed]
        opening = llm.tokenizer.encode(question.opening, add_special_tokens=False)
        later = record.task == "late-notes"
        tokens = llm.tokenizer.encode(text.text if later else f"{text.text}\n\n{question.ask}" + "\n" * bool(opening))
        assert record.length == len(tokens)
        entries = record.length // 4
        budget = CacheBudget.preset("full", 1400)
        if record.policy == "truncated":
            room = entries - 12 - len(opening)
            tokens = tokens[: room // 2] + tokens[-(room - room // 2) :]
        elif record.policy != "full":
            budget = CacheBudget.preset(record.policy, entries)
        params = SamplingParams(max_tokens=12 + len(opening), forced=tuple(opening), kv_budget=budget)
        if later:
            stored = budget.for_context(entries, llm.engine.config.kept_queries) if record.policy == "spans" else budget
            context = llm.read(text.text, budget=stored, chat=False)
            out = llm.generate(f"\n\n{question.ask}", params, context=context)[0]
        else:
            out = llm.generate(tokens, params)[0]
        assert record.output == llm.tokenizer.decode(out.token_ids[len(opening) :], skip_special_tokens=True), record
        assert record.question == question.name
        assert record.text == 0
    assert {record.question for record in records} == {"1.1", "1.2", "1.3", "forced"}


def test_texts_are_read_once(tmp_path, questions, monkeypatch):
    plan = QuestionPlan(
        [read_questions(str(questions))],
        make_variants(("full", "snapstream"), ["1/4"], [()], ENGINE_POLICIES),
        Prompts(LLM(MODEL, max_model_len=300, slots=1, enforce_eager=True).tokenizer, chat=None),
    )
    config = EngineConfig(slots=5, prefill_chunk=128, enforce_eager=True, prefix_contexts=int(plan.shares_texts))
    host = EngineHost(
        MODEL, max_length=plan.longest, budgets=plan.budgets(), config=config, chat=None, return_kept_tokens=False
    )
    begun = []
    runner = host.llm.engine.runner
    begin = runner.begin
    monkeypatch.setattr(runner, "begin", lambda *args: (job := begin(*args), begun.append(job.skipped))[0])
    with RecordFile(tmp_path / "r.jsonl", host.describe()) as file:
        run_questions(host, plan, file)
    assert len(begun) == 4
    assert begun[0] == 0
    assert all(skipped > 700 for skipped in begun[1:])


def test_the_command(tmp_path, questions):
    """Answers, report, and a second run that goes on; generated tasks beside them if they are asked for."""
    common = ["eval", "--budgets", "1/4", "--policies", "full,streaming,mixed", "-o", tmp_path / "out"]
    done = commands.run(*common, "--questions", questions)
    assert done.returncode == 0, done.stderr
    assert "## notes" in done.stdout
    assert "Questions from a file." in done.stdout
    assert "## Compared with the full cache" in done.stdout
    header, records = read_records(tmp_path / "out" / "results.jsonl")
    assert len(records) == 4 * 3
    full = [record for record in records if record.policy == "full"]
    assert sum(record.score for record in full) >= 3
    done = commands.run(
        *common, "-q", questions, "--ask", "with,after", "--tasks", "needle", "--lengths", "512", "--samples", "2"
    )
    assert done.returncode == 0, done.stderr
    assert "continuing after 12 answers" in " ".join(done.stderr.split())
    assert {record.task for record in read_records(tmp_path / "out" / "results.jsonl")[1]} == {
        "notes",
        "late-notes",
        "needle",
    }
    page = (tmp_path / "out" / "report.html").read_text()
    assert "late-notes" in page
    # The same names, but other questions.
    lines = questions.read_text().replace("Recall", "Please recall")
    questions.write_text(lines)
    done = commands.run(*common, "-q", questions)
    assert done.returncode == 1
    assert "give another --output" in " ".join(done.stderr.split())
    assert header == read_records(tmp_path / "out" / "results.jsonl")[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-q", "not-there.jsonl"], "questions: not-there.jsonl: no such file"),
        (["--ask", "after"], "give --questions FILE"),
        (["--run-code"], "give --questions FILE"),
        (["-q", "{file}", "--ask", "before"], "ask: unknown place before; allowed: with, after"),
        (["-q", "{file}", "-q", "{file}"], "'notes' is taken by another task"),
    ],
)
def test_what_cannot_be_asked_is_said(tmp_path, questions, arguments, message):
    given = [argument.format(file=questions) for argument in arguments]
    done = commands.run("eval", *given, "-o", tmp_path / "out")
    assert done.returncode in (1, 2)
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_scores_between_0_and_1_have_intervals(tmp_path):
    """Means of scores, and paired differences in which questions about one text count as one."""
    records = [
        replace(
            test_lab.record("notes", 500 + seed, policy, size, seed, False),
            question=str(seed),
            text=seed // 2,
            score=score,
        )
        for policy, size, scores in (("full", "", (1, 0.5, 1, 0)), ("streaming", "1/4", (0.5, 0.5, 0, 0)))
        for seed, score in enumerate(scores)
    ]
    results = Results(records)
    assert results.lengths_of("notes") == [0]
    assert results.cell("notes", 0, "full", "").share == 0.625
    mean, low, high, texts = results.difference("streaming", "full", ["notes"])
    assert texts == 2
    assert mean == pytest.approx((-0.25 - 0.5) / 2)
    assert low < mean < high
    report = render_markdown({"model": "m", "host": "engine"}, results)
    assert re.search(r"\| mean tokens \| full \| cache \| 1/4 \|", report)
    assert "| 502 |" in report
    assert "StreamingLLM against the full cache -37.5" in report


def test_a_changed_file_is_no_continuation(tmp_path, questions):
    prompts = Prompts(LLM(MODEL, max_model_len=300, slots=1, enforce_eager=True).tokenizer, chat=None)
    variants = make_variants(("full",), [], [()], ENGINE_POLICIES)
    plan = QuestionPlan([read_questions(str(questions))], variants, prompts)

    class Silent:
        def refuses(self, task):
            return None

        def run(self, jobs):
            for job in jobs:
                yield job, Answer("nothing", 1, 1, "stop")

    with RecordFile(tmp_path / "r.jsonl", {"model": "m"}) as file:
        run_questions(Silent(), plan, file)
        questions.write_text(questions.read_text().replace("Recall", "Recite"))
        again = QuestionPlan([read_questions(str(questions))], variants, prompts)
        with pytest.raises(ConfigurationError, match="another question"):
            run_questions(Silent(), again, file)
