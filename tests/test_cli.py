"""The command as a user runs it: a process, its output, its exit code."""

import json
import shutil
import subprocess
import sys

import pytest

from snapstream import __version__
from snapstream.assets import TASK_MODEL
from tests.checkpoints import save_checkpoint
from tests.published import DEEPSEEK_R1, LLAMA_31_8B, save_config
from tests.texts import Notes


def run(*arguments, stdin=None):
    command = [sys.executable, "-m", "snapstream.cli", *map(str, arguments)]
    return subprocess.run(command, check=False, capture_output=True, text=True, input=stdin or "", timeout=300)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    document = Notes(7900, 8, seed=1)
    path = tmp_path_factory.mktemp("text") / "notebook.txt"
    path.write_text(document.text)
    return path, document


def test_generate_answers_a_question_about_a_long_file(text_file):
    path, document = text_file
    for question in (document.questions[0], document.questions[4]):
        assert document.depth(question) < 0.7
        done = run("generate", "--file", path, "--budget", 2048, question.ask)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == question.answer.strip()
        tokens = document.count(f"{document.text}\n{question.ask}")
        assert f"prompt of {tokens} tokens" in done.stderr.replace("\n", " ")


def test_generate_json_from_stdin(text_file):
    _, document = text_file
    question = document.questions[2]
    done = run("generate", "--json", "--budget", '{"capacity": 1024, "kernel": 5}', stdin=document.prompt(question))
    answer = json.loads(done.stdout)
    assert answer["text"] == question.answer
    assert answer["finish_reason"] == "stop"
    assert answer["cache"]["limit"] == 1024
    assert answer["cache"]["dropped"] == document.count(document.prompt(question)) - 1024


@pytest.mark.parametrize(("model", "per_entry"), [("task-model", 2 * 2 * 3 * 32 * 4), ("task-model-mla", 2 * 128 * 4)])
def test_demo_json(model, per_entry):
    done = run("demo", "--model", model, "--tokens", 2000, "--questions", 4, "--json")
    assert done.returncode == 0, done.stderr
    policies = {p["policy"]: p for p in json.loads(done.stdout)["policies"]}
    assert all(policies["full"]["correct"])
    assert all(policies["snapstream"]["correct"])
    assert not all(policies["streaming"]["correct"])
    assert policies["snapstream"]["bytes_per_sequence"] == 500 * per_entry
    assert min(policies["snapstream"]["tokens_per_second"]) > 0


def test_demo_for_people():
    done = run("demo", "--tokens", 600, "--questions", 2, "--facts", 4)
    assert done.returncode == 0
    assert "What it takes" in done.stdout
    assert "2 of 2" in done.stdout


def test_plan(tmp_path):
    save_checkpoint(tmp_path, "qwen3")
    (tmp_path / "model.safetensors").unlink()  # it must not be needed
    done = run("plan", "--model", tmp_path, "--budget", 512, "--slots", 8, "--json", "--memory", 1)
    plan = json.loads(done.stdout)
    per_token = 2 * 2 * 2 * 32 * 4
    assert plan["bytes_per_token"] == per_token
    assert plan["slots"] == 8 * 512 * per_token
    assert plan["full_slots"] == 8 * 4096 * per_token
    assert plan["slots_that_fit"] > 7 * plan["slots_that_fit_full"] > 0
    assert "caches of all slots" in run("plan", "--model", tmp_path, "--budget", 512).stdout


def plan_of(directory, **options):
    arguments = [part for name, value in options.items() for part in (f"--{name.replace('_', '-')}", value)]
    return json.loads(run("plan", "--model", directory, "--json", *arguments).stdout)


def test_plan_of_llama_31_8b(tmp_path):
    directory = save_config(tmp_path, LLAMA_31_8B)
    plan = plan_of(directory, budget=8192, slots=16, max_model_len=131072, memory=80)
    assert plan["weights"] == 8_030_261_248 * 2
    assert plan["bytes_per_token"] == 128 * 1024
    assert plan["slots"] == 16 * 2**30
    assert plan["full_slots"] == 256 * 2**30
    assert (plan["slots_that_fit"], plan["slots_that_fit_full"]) == (47, 2)


def test_plan_of_deepseek_r1(tmp_path):
    """At 128k with a cache of 32k: a fourth of the memory, and four times the batch in the same memory."""
    directory = save_config(tmp_path, DEEPSEEK_R1)
    plan = plan_of(directory, budget=32768, slots=64, max_model_len=131072, memory=1400)
    assert plan["weights"] == pytest.approx(671.03e9 * 2, rel=1e-4)  # 671B parameters without multi-token prediction
    assert plan["bytes_per_token"] == 61 * 576 * 2
    assert plan["full_slots"] == 4 * plan["slots"]
    assert plan["slots_that_fit"] // plan["slots_that_fit_full"] == 4
    text = run("plan", "--model", directory, "--budget", 32768, "--max-model-len", 131072).stdout
    assert "4.00x less" in text


@pytest.mark.parametrize(("length", "cache", "full", "small"), [(128, 32, 16, 64), (64, 16, 32, 128), (32, 8, 64, 256)])
def test_batches_of_the_paper_from_arithmetic(tmp_path, length, cache, full, small):
    """Table 5 of the paper: what 16 full caches of 128k tokens take is the memory of every row."""
    directory = save_config(tmp_path, DEEPSEEK_R1)
    pool = 16 * 131072 * 61 * 576 * 2 / 2**30
    plan = plan_of(directory, budget=cache * 1024, max_model_len=length * 1024, slots=1, cache_memory=pool)
    assert (plan["slots_in_caches_full"], plan["slots_in_caches"]) == (full, small)


def test_help_and_version():
    assert run("--version").stdout.strip() == f"snapstream {__version__}"
    for command in ("demo", "generate", "plan", "eval"):
        assert command in run("--help").stdout
        assert command == "eval" or "--json" in run(command, "--help").stdout


def broken(tmp_path, name, damage):
    path = tmp_path / name
    shutil.copytree(TASK_MODEL, path)
    damage(path)
    return path


def set_architecture(path):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"architectures": ["GPT2LMHeadModel"]}))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--file", "no-such-file.txt"], "no-such-file.txt could not be read"),
        (["generate", "hello", "--model", "no-such-model"], "neither a directory, nor a hub id"),
        (["demo", "--model", "no-such-model"], "for the shipped models"),
        (["generate", "hello", "--budget", 3], "at least 16"),
        (["generate", "hello", "--budget", -5], "at least 16"),
        (["generate", "hello", "--budget", '{"sinks": 4}'], "unknown field sinks"),
        (["generate", "hello", "--budget", 64, "--policy", "best"], "unknown policy 'best'"),
        (["generate", "hello", "--budget", '{"capacity": 64}', "--policy", "streaming"], "inside a JSON budget"),
        (["plan", "--memory", "nan"], "positive number"),
        (["generate", "hello", "--policy", "streaming"], "needs a --budget"),
        (["generate", "Note " * 100, "--max-model-len", 64], "the prompt has 101 tokens"),
        (["generate", "hello", "--max-model-len", 10**6], "made for 16384"),
        (["generate", "hello", "--dtype", "int4"], "allowed: auto, float32"),
        (["generate", "hello", "--device", "tpu"], "allowed: auto, cpu"),
        (["generate", "hello", "--temperature", -1], "temperature is -1"),
        (["generate", "--chat", "hello"], "no chat template"),
        (["generate", ""], "no tokens"),
        (["demo", "--tokens", 130, "--facts", 60], "do not fit"),
        (["plan", "--budget", 2048, "--memory", 0.001], "the weights alone do not fit"),
        (["plan", "--budget", 2048, "--slots", 8, "--memory", 0.02], "lower slots, budget and max_model_len together"),
        (["plan", "--budget", 2048, "--slots", 80, "--memory", 0.1], r"it would fit with slots=\d+"),
        (["plan", "--model", "."], "no config.json"),
    ],
)
def test_bad_input_is_one_line_and_a_non_zero_exit(arguments, message):
    done = run(*arguments)
    assert_one_line_error(done, message)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda path: (path / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0 not safetensors"),
            "could not be read",
        ),
        (lambda path: (path / "model.safetensors").unlink(), "safetensors only"),
        (set_architecture, "GPT2LMHeadModel is not supported; supported: LlamaForCausalLM"),
        (lambda path: (path / "tokenizer.json").write_text("{}"), "tokenizer could not be loaded"),
        (lambda path: (path / "config.json").write_text("{]"), "not valid JSON"),
    ],
)
def test_broken_checkpoints(tmp_path, damage, message):
    assert_one_line_error(run("generate", "hello", "--model", broken(tmp_path, "broken", damage)), message)


def test_text_that_is_not_text(tmp_path):
    (tmp_path / "image").write_bytes(b"\x89PNG\xff\xfe")
    assert_one_line_error(run("generate", "--file", tmp_path / "image"), "not UTF-8")


def assert_one_line_error(done, message):
    import re

    errors = [line for line in done.stderr.splitlines() if line.strip()]
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert len([line for line in errors if line.startswith("error:")]) == 1, done.stderr
    assert errors[-1].startswith("error:"), done.stderr
    assert re.search(message, errors[-1]), done.stderr


def test_a_small_budget_of_another_policy_says_what_is_wrong():
    result = run("plan", "--budget", "8", "--policy", "streaming")
    assert "too few to be useful" in result.stderr
