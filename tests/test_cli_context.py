"""``snapstream read`` and ``snapstream ask`` as a user runs them."""

import json

import pytest

from snapstream.cache import CompressedSequence
from tests.commands import here, run
from tests.texts import Notes


@pytest.fixture(scope="module")
def document(tmp_path_factory):
    notes = Notes(3000, 8, seed=1)
    path = tmp_path_factory.mktemp("text") / "notes.txt"
    path.write_text(notes.text + "\n")
    return path, notes


def said(error):
    return " ".join(str(error).split())


def test_a_text_is_read_once_and_asked_several_times(document, tmp_path):
    path, notes = document
    out = tmp_path / "notes.snap"
    done = run("read", path, "--budget", "4k", "--max-model-len", "8k", "-o", out)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    tokens = notes.count(notes.text)
    assert f"{tokens} tokens read, {tokens} kept per head" in said(done.stderr)
    assert out.stat().st_mode & 0o777 == 0o600
    asked = notes.questions[:3]
    done = here("ask", out, *(question.ask for question in asked), "--max-tokens", "4")
    assert done.exit_code == 0, done.output
    assert [line.strip() for line in done.stdout.strip().splitlines()] == [one.answer.strip() for one in asked]
    done = run("ask", out, "--json", "--max-tokens", 4, stdin=f"{asked[1].ask}\n\n{asked[0].ask}\n")
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["text"] for one in answers] == [asked[1].answer.strip(), asked[0].answer.strip()]
    assert answers[0]["question"] == asked[1].ask.strip()


def test_a_plain_text_from_stdin(document, tmp_path):
    path, notes = document
    done = run("read", "-", "--plain", "--budget", "1/2", "-o", tmp_path / "a.snap", stdin=path.read_text())
    tokens = notes.count(notes.text)
    assert f"{tokens} tokens read, {tokens // 2} kept per head" in said(done.stderr)
    assert here("ask", tmp_path / "a.snap", "Recall").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "policy"),
    [
        (("--budget", "256"), "multiscale-keydiff"),
        (("--budget", "1/4"), "multiscale-keydiff"),
        (("--budget", "256", "--policy", "mixed"), "mixed"),
        (("--budget", "256", "--policy", "keydiff"), "keydiff"),
        (("--budget", '{"capacity": 256}'), "spans"),
    ],
)
def test_nobody_has_asked_yet_so_keys_choose_unless_a_policy_is_named(document, tmp_path, arguments, policy):
    out = tmp_path / "a.snap"
    assert here("read", document[0], *arguments, "-o", out).exit_code == 0
    assert CompressedSequence.describe(out)["budget"]["policy"] == policy


def test_what_cannot_be_read_or_asked_is_one_line(document, tmp_path):
    path, _ = document
    assert here("read", path, "--budget", 256, "-o", tmp_path / "a.snap").exit_code == 0
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "half.snap").write_bytes((tmp_path / "a.snap").read_bytes()[:-100])
    for arguments, message in (
        (("read", path, "-o", "/nowhere/a.snap"), "there is no directory /nowhere"),
        (("read", path, "-o", tmp_path), "it is a directory; give the path of a regular file"),
        (("read", tmp_path / "none", "-o", tmp_path / "b"), "No such file"),
        (("read", tmp_path / "empty", "-o", tmp_path / "b"), "the prompt is empty"),
        (("read", path, "--plain", "--system", "x", "-o", tmp_path / "b"), "needs the model's chat template"),
        (("read", path, "--max-model-len", 1000, "-o", tmp_path / "b"), "at most 999 fit"),
        (("ask", tmp_path / "none", "x"), "No such file"),
        (("ask", path, "x"), "could not be read"),
        (("ask", tmp_path / "half.snap", "x"), "could not be read"),
        (("ask", tmp_path / "a.snap", "x", "--model", "task-model-mla"), "another model or tokenizer"),
        (("ask", tmp_path / "a.snap", "x", "--max-model-len", 2000), "max_model_len is 2000; raise it"),
    ):
        done = here(*arguments)
        assert done.exit_code == 1, arguments
        assert message in said(done.exception), arguments
    assert not (tmp_path / "b").exists()


def test_a_budget_in_bytes_chooses_entries_and_their_type(document, tmp_path, monkeypatch):
    """A question needs no option to find the same type."""
    out = tmp_path / "a.snap"
    done = here("read", document[0], "--budget", "200KiB", "-o", out)
    assert done.exit_code == 0, done.output
    described = CompressedSequence.describe(out)
    assert described["budget"]["policy"] == "multiscale-keydiff"
    assert described["kv_dtype"] == "int4"
    assert out.stat().st_size < 300 * 2**10
    asked = here("ask", out, document[1].questions[0].ask, "--max-tokens", "4")
    assert asked.exit_code == 0, asked.output
    del described["kv_dtype"]  # as earlier versions wrote it
    monkeypatch.setattr(CompressedSequence, "describe", lambda path: described)
    assert here("ask", out, "Recall", "--kv-dtype", "int4").exit_code == 0
    small = here("read", document[0], "--budget", "3KiB", "-o", out)
    assert "3072 bytes have room for 7 int4 entries per layer; give at least 4992 bytes for 16" in said(small.exception)
    few = here("plan", "--devices", 4, "--budget", "1MiB")
    assert "budget is '1MiB'; with devices, give a number of entries or a share" in said(few.exception)
