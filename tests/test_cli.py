"""The command as a user runs it: a process, its output, its exit code."""

import json
import math
import shutil
import subprocess
import sys
from dataclasses import asdict

import pytest
import torch

import snapstream
from snapstream import LLM, CacheBudget, MemoryPlanError, __version__
from snapstream.assets import TASK_MODEL
from snapstream.kernels import cpu as kernels
from tests.checkpoints import save_checkpoint
from tests.commands import here, process, run
from tests.published import DEEPSEEK_R1, LLAMA_31_8B, save_config
from tests.texts import Notes

STREAMING = CacheBudget.preset("streaming", 256)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    document = Notes(7900, 8, seed=1)
    path = tmp_path_factory.mktemp("text") / "notebook.txt"
    path.write_text(document.text)
    return path, document


def test_generate_answers_a_question_about_a_long_file(text_file):
    path, document = text_file
    for run_it, question in ((process, document.questions[0]), (run, document.questions[4])):
        assert document.depth(question) < 0.7
        done = run_it("generate", "--file", path, "--budget", 2048, question.ask)
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
    assert all(policies["spans"]["correct"])
    assert not all(policies["streaming"]["correct"])
    assert policies["spans"]["bytes_per_sequence"] == 500 * per_entry


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
    assert "caches of all slots" in run("plan", tmp_path, "--budget", 512).stdout


@pytest.mark.parametrize(
    ("options", "settings"),
    [
        ([], {}),
        (["--budget", 512, "--slots", 8], {"budget": 512, "slots": 8}),
        (
            ["--budget", "1k", "--max-model-len", "4k", "--sessions", 3],
            {"budget": 1024, "max_model_len": 4096, "sessions": 3},
        ),
        (["--budget", "1/4", "--dtype", "bfloat16"], {"budget": 4096, "dtype": "bfloat16"}),
        (["--policy", "streaming", "--budget", 256, "--prefill-chunk", 64], {"budget": STREAMING, "prefill_chunk": 64}),
    ],
)
def test_plan_is_what_an_engine_says(options, settings):
    """One function computes both: the command, and the engine before it loads anything."""
    said = []
    LLM(str(TASK_MODEL), report_plan=said.append, prefix_cache=0, **settings)
    planned = json.loads(here("plan", TASK_MODEL, *options, "--json").stdout)
    ours, full = said[0].ours, said[0].full
    assert {name: planned[name] for name in asdict(ours)} == asdict(ours) | {"lanes": list(ours.lanes)}
    assert (planned["total"], planned["steady"]) == (ours.total, ours.steady)
    assert (planned["full_slots"], planned["total_full"]) == (full.slots, full.total)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.slow)])
def test_how_many_slots_fit_is_true(tmp_path, device):
    """So many fit and one more does not; full caches are counted the same way whatever the budget is."""
    directory = save_config(tmp_path, LLAMA_31_8B)
    few = set()
    for options in ([], ["--budget", 4096], ["--budget", "8k", "--slots", 32]):
        common = ["--max-model-len", "128k", "--memory", 80, "--device", device, "--json"]
        plan = json.loads(here("plan", directory, *options, *common).stdout)
        few.add(plan["slots_that_fit_full"])
        for budget, slots in ((options[:2], plan["slots_that_fit"]), ([], plan["slots_that_fit_full"])):
            assert here("plan", directory, *budget, "--slots", slots, *common).exception is None
            more = here("plan", directory, *budget, "--slots", slots + 1, *common).exception
            assert isinstance(more, MemoryPlanError)
            assert "are available" in str(more)
    assert len(few) == 1


def test_plan_shows_what_adds_up():
    """The steady state is the sum of the rows above it, and the peak of those above that."""
    for device in ("cpu", "cuda"):
        rows = [line.split("│")[1:3] for line in here("plan", "--device", device).stdout.splitlines() if "│" in line]
        scale = {"KiB": 1, "MiB": 1024, "GiB": 1024**2}
        sizes = {name.strip(): float(text.split()[0]) * scale[text.split()[1]] for name, text in rows}
        above, order = 0.0, list(sizes)
        for name in order:
            if name.startswith("="):
                assert sizes[name] == pytest.approx(above, rel=0.02)
            else:
                above += sizes[name]
        captured = order.index("workspace (prefill)") < order.index("= steady state")
        assert captured == (device == "cuda")


def test_weights_that_do_not_fit(tmp_path):
    done = run("plan", save_config(tmp_path, DEEPSEEK_R1), "--budget", "32k", "--memory", 80)
    assert "vLLM splits a model across devices" in done.stderr
    assert "dtype" not in done.stderr


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
    fit = plan["slots_that_fit"]
    assert fit in (62, 63)  # what else there is depends on the processor, and decides about the last one
    totals = [plan_of(directory, budget=8192, slots=n, max_model_len=131072)["total"] for n in (fit, fit + 1)]
    assert totals[0] <= 80 * 2**30 < totals[1]
    assert plan["slots_that_fit_full"] == 3


def packed_values(heads, length, size):
    """Bytes of one layer's values that this processor wants in another order, too."""
    if not kernels.library.available() or not kernels.available():
        return 0
    instructions = kernels.prefill_instructions(torch.bfloat16)
    return math.prod(kernels.packed_shape(torch.Size((heads, length, size)), instructions)) * 2


def test_reading_a_prompt_takes_one_layer_and_its_hidden_states(tmp_path):
    """128k tokens, by arithmetic: what grows with the prompt is a layer's keys and values and one hidden state each.

    And an eighth of it once more, for a short prompt.
    """
    length = 131072
    layer, hidden = length * 2 * 8 * 128 * 2, length * 4096 * 2
    plan = plan_of(save_config(tmp_path / "llama", LLAMA_31_8B), budget=4096, slots=16, max_model_len=length)
    assert (layer, hidden) == (2**29, 2**30)
    packed = packed_values(8, length, 128)
    assert packed in (0, layer / 2)
    assert layer + packed + hidden < plan["staging"] * 8 / 9 < layer + packed + hidden + 2**20
    beyond = plan["total"] - plan["weights"] - plan["slots"] - packed * 9 / 8
    assert layer + hidden < beyond <= 2.2 * 2**30  # with all layers' keys and values it would be 16.5 GiB
    plan = plan_of(save_config(tmp_path / "r1", DEEPSEEK_R1), budget=4096, slots=16, max_model_len=length)
    latent, hidden = length * 576 * 2, length * 7168 * 2
    queries = 128 * 64 * 576 * 2
    assert plan["staging"] == (latent + packed_values(1, length, 512) + hidden) * 9 / 8 + 2 * queries + 7168 * 2
    assert plan["total"] - plan["weights"] - plan["slots"] <= 4 * 2**30  # 1.9 GiB, and a chunk's rows for each expert


def test_plan_of_deepseek_r1(tmp_path):
    """At 128k with a cache of 32k: a fourth of the memory, and four times the batch in the same memory."""
    directory = save_config(tmp_path, DEEPSEEK_R1)
    plan = plan_of(directory, budget=32768, slots=64, max_model_len=131072, memory=1400)
    assert plan["weights"] == pytest.approx(671.03e9 * 2, rel=1e-4)  # 671B parameters without multi-token prediction
    assert plan["bytes_per_token"] == 61 * 576 * 2
    assert plan["full_slots"] == 4 * plan["slots"]
    assert plan["slots_that_fit"] / plan["slots_that_fit_full"] == pytest.approx(4, rel=0.05)
    text = run("plan", "--model", directory, "--budget", 32768, "--max-model-len", 131072).stdout
    assert "4.00x less" in text
    # DeepSeek says that its module for multi-token prediction has 11.5B parameters of its own.
    ahead = plan_of(directory, budget=32768, slots=64, max_model_len=131072, memory=1400, speculative="mtp")
    assert ahead["weights"] - plan["weights"] == pytest.approx(11.5e9 * 2, rel=0.01)
    assert ahead["bytes_per_token"] == 62 * 576 * 2


@pytest.mark.parametrize(("length", "cache", "full", "small"), [(128, 32, 16, 64), (64, 16, 32, 128), (32, 8, 64, 256)])
def test_batches_of_the_paper_from_arithmetic(tmp_path, length, cache, full, small):
    """Table 5 of the paper: what 16 full caches of 128k tokens take is the memory of every row."""
    directory = save_config(tmp_path, DEEPSEEK_R1)
    pool = 16 * 131072 * 61 * 576 * 2 / 2**30
    plan = plan_of(directory, budget=cache * 1024, max_model_len=length * 1024, slots=1, cache_memory=pool)
    assert (plan["slots_in_caches_full"], plan["slots_in_caches"]) == (full, small)


def test_plan_for_several_devices(tmp_path):
    directory = save_config(tmp_path, DEEPSEEK_R1)
    options = ("--devices", 16, "--max-model-len", "128k", "--budget", "32k", "--cache-memory", 137.25)
    found = json.loads(run("plan", directory, *options, "--json").stdout)
    assert (found["ours"]["sequences"], found["full"]["sequences"]) == (64, 16)
    assert found["ours"]["caches"] == found["full"]["caches"]
    text = run("plan", directory, *options, "--attention", "tensor-parallel").stdout
    assert "4.00x as many" in text
    assert "float8 and bfloat16" in text
    done = run("plan", directory, "--devices", 16, "--memory", 80)
    assert done.returncode != 0
    assert "give cache-memory, of all together" in done.stderr
    fixed = json.loads(run("plan", directory, "--devices", 16, "--slots", 32, "--budget", "4k", "--json").stdout)
    assert fixed["ours"]["sequences"] == fixed["full"]["sequences"] == 32


def test_help_and_version():
    assert process("--version").stdout.strip() == f"snapstream {__version__}"
    overview = here("--help").stdout
    for command in ("demo", "generate", "plan", "read", "ask", "eval", "chat", "serve", "route"):
        assert command in overview
        assert command in ("read", "eval", "chat", "serve", "route") or "--json" in here(command, "--help").stdout
    for group in ("Model", "Cache", "Engine", "Network", "Limits"):
        assert f"─ {group} ─" in here("serve", "--help").stdout
    again = subprocess.run(
        [sys.executable, "-m", "snapstream", "--version"], capture_output=True, text=True, check=True
    )
    assert again.stdout.strip() == f"snapstream {__version__}"


def test_habits_of_generate(text_file):
    """A prompt as an option, a file from stdin, sizes with a k, shares of the prompt."""
    path, document = text_file
    question = document.questions[3]
    tokens = document.count(f"{document.text}\n{question.ask}")
    done = run(
        *("generate", "--prompt", question.ask, "--file", "-", "--budget", "1/4", "--max-model-len", "8k", "--json"),
        stdin=path.read_text(),
    )
    answer = json.loads(done.stdout)
    assert answer["text"] == question.answer
    assert (answer["cache"]["limit"], answer["cache"]["prompt_tokens"]) == (tokens // 4, tokens)
    assert "answers questions about notes in generated texts" in " ".join(done.stderr.split())
    whole = run("generate", "-p", "Recall", "--max-tokens", 3)
    assert "prompt of 1 tokens: all kept in a full cache, 6.0 KiB by now" in " ".join(whole.stderr.split())
    large = run("generate", "Recall", "--budget", "1m", "--max-tokens", 1)
    assert "is more than max_model_len=16384 tokens: caches are full caches" in " ".join(large.stderr.split())


def test_chat_with_the_shipped_model():
    """The server chats with it, so the others do."""
    document = Notes(1500, 8, seed=1)
    question = document.questions[2]
    made = run("generate", "--chat", "--budget", 512, document.prompt(question))
    assert made.stdout.strip() == question.answer.strip()
    llm = LLM(str(TASK_MODEL), budget=512, enforce_eager=True, report_plan=lambda _: None)
    asked = [{"role": "user", "content": document.prompt(question)}]
    assert llm.chat(asked).text.strip() == question.answer.strip()
    assert repr(llm).startswith(f"LLM({str(TASK_MODEL)!r}: LlamaForCausalLM, 4 slots with caches of 512 entries")
    assert {"LLM", "RequestOutput"} <= set(dir(snapstream))


def test_a_conversation_in_the_terminal(tmp_path):
    document = Notes(1500, 8, seed=1)
    (tmp_path / "notes.txt").write_text(document.text)
    first, second = document.questions[1], document.questions[5]
    lines = [first.ask, second.ask, "/nothing", "/new", f"/file {tmp_path / 'none'}", "/quit"]
    done = run("chat", "--budget", "1k", "--file", tmp_path / "notes.txt", stdin="\n".join(lines) + "\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == [first.answer.strip(), second.answer.strip()]
    told = " ".join(done.stderr.split())
    assert "1,024 of 1,024 entries: 4 first, 892 chosen, 128 recent] >" in told
    assert "There is no command /nothing. /file PATH puts" in told
    assert "could not be read: No such file" in told
    assert run("chat", stdin="").returncode == 0


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
        (["generate", "hello", "--model", "no-such-model"], "neither a directory, nor a .gguf file, nor a hub id"),
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
        (["generate", ""], "the prompt is empty"),
        (["generate", "  "], "the prompt is empty"),
        (["generate", "hello", "--prompt", "hello"], "two prompts were given"),
        (["generate", "-", "--file", "-"], "standard input can be read once"),
        (["generate", "hello", "--budget", "5/4"], "not a share between 0 and 1"),
        (["generate", "hello", "--budget", "many"], "neither a number of entries"),
        (["generate", "hello", "--max-model-len", "long"], "max-model-len: 'long' is not a number of tokens"),
        (["serve", "a", "--model", "b"], "two models were given, 'a' and --model 'b'"),
        (["serve", "--max-num-seqs", 4], "there is no option --max-num-seqs: --slots is"),
        (["serve", "--gpu-memory-utilization=0.9"], "--memory-fraction of serve"),
        (["plan", "--tensor-parallel-size", 2], "the vLLM plugin uses several"),
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
    assert_one_line_error(process("generate", "--file", tmp_path / "image"), "not UTF-8")


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
