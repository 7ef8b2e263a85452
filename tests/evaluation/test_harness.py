"""The lm-eval adapter against transformers' logits in float64, and lm-eval's own machinery on small local tasks."""

import itertools
import json
import logging
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("lm_eval")

import datasets
import lm_eval
from lm_eval.api.instance import Instance
from lm_eval.api.registry import Registry, get_model
from lm_eval.tasks import TaskManager
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from snapstream import LLM, CacheBudget, ConfigurationError, RequestError, SamplingParams
from snapstream.assets import TASK_MODEL
from snapstream.evaluation import harness
from snapstream.evaluation.harness import SnapStreamLM
from snapstream.evaluation.tasks import TASKS as GENERATED
from snapstream.evaluation.tasks import make_sample
from tests import peers
from tests.checkpoints import prompt
from tests.readings import record_readings

TASKS = Path(__file__).parent / "harness_tasks"
SETTINGS = {"max_length": 256, "slots": 3, "prefill_chunk": 32, "device": "cpu"}
SMALL = {"budget": 48, "recent": 24, "window": 8, "kernel": 5}
BOS, EOS = 1, 2


def make(checkpoint, **arguments):
    return SnapStreamLM(str(checkpoint), **(SETTINGS | arguments))


def text(tokens):
    return " ".join(f"w{token}" for token in tokens)


def written(tokens):
    """What the tokenizer makes of generated tokens: no spaces, no special tokens, nothing after the end."""
    return "".join(f"w{token}" for token in itertools.takewhile(lambda token: token != EOS, tokens) if token > EOS)


def instances(kind, *arguments):
    return [Instance(request_type=kind, doc={}, arguments=given, idx=n) for n, given in enumerate(arguments)]


def score(model, *pairs):
    """Log-likelihoods of pairs of token lists, through lm-eval's own encoding of texts."""
    asked = [(text(context), " " + text(continuation)) for context, continuation in pairs]
    return model.loglikelihood(instances("loglikelihood", *asked), disable_tqdm=True)


def generate(model, *asked):
    return model.generate_until(instances("generate_until", *asked), disable_tqdm=True)


@pytest.fixture(scope="module")
def peer(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)


@pytest.fixture(scope="module")
def full(checkpoint):
    return make(checkpoint)


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """lm-eval's view of the local tasks; their data lie in the current directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return TaskManager(include_path=str(TASKS), include_defaults=False)


@torch.no_grad()
def peer_score(peer, context, continuation):
    tokens = [*context, *continuation]
    logits = peer(torch.tensor([tokens])).logits[0, len(context) - 1 : -1]
    chosen = logits.log_softmax(-1)[torch.arange(len(continuation)), list(continuation)]
    return float(chosen.sum()), logits.argmax(-1).tolist() == list(continuation)


@torch.no_grad()
def compressed_score(checkpoint, context, continuation, budget):
    """The same, with transformers' attention restricted to what the oracle keeps of the context."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="snapstream_oracle"
    )
    peers._ORACLES["now"] = peers.Oracle(budget, latent=False)
    out, total = model(torch.tensor([context]), use_cache=True), 0.0
    for token in continuation:
        total += float(out.logits[0, -1].double().log_softmax(-1)[token])
        out = model(torch.tensor([[token]]), past_key_values=out.past_key_values, use_cache=True)
    return total


@torch.no_grad()
def peer_greedy(peer, context, steps):
    tokens = list(context)
    for _ in range(steps):
        tokens.append(int(peer(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(context) :]


def test_loglikelihood_is_the_models(full, peer):
    """Of contexts and continuations of any length, some of them greedy, in any order."""
    contexts = [prompt(length, seed=length) for length in (1, 7, 30, 31, 150)]
    pairs = [(context, prompt(steps, seed=9)) for context in contexts for steps in (1, 2, 17)]
    pairs += [(context, peer_greedy(peer, context, 5)) for context in contexts]
    random.Random(0).shuffle(pairs)
    got = score(full, *pairs)
    want = [peer_score(peer, *pair) for pair in pairs]
    assert [value for value, _ in got] == pytest.approx([value for value, _ in want], abs=1e-3)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want]
    assert sum(greedy for _, greedy in got) >= len(contexts)


def test_without_context_the_first_token_stands_for_it(full, peer):
    want = peer_score(peer, [BOS], prompt(5))
    for context in ("", " "):
        got = full.loglikelihood(instances("loglikelihood", (context, text(prompt(5)))), disable_tqdm=True)
        assert got[0] == (pytest.approx(want[0], abs=1e-3), want[1])


def test_a_long_context_loses_its_first_tokens(checkpoint, peer, caplog):
    model = make(checkpoint, max_length=64)
    context, continuation = prompt(100), prompt(10, seed=3)
    with caplog.at_level(logging.WARNING):
        got = score(model, (context, continuation), (context[:54], continuation))
    assert got[0][0] == pytest.approx(peer_score(peer, context[-54:], continuation)[0], abs=1e-3)
    assert got[1][0] == pytest.approx(peer_score(peer, context[:54], continuation)[0], abs=1e-3)
    assert "a prompt of 100 tokens is truncated to its last 54" in caplog.text
    assert caplog.text.count("is truncated to its last 54") == 1
    with pytest.raises(RequestError, match="at most 63 fit"):
        score(model, (context, prompt(64)))


def test_a_continuation_is_scored_from_the_compressed_cache(checkpoint, full):
    """All but its first token, which comes from prefill: that has seen the whole prompt."""
    model, context = make(checkpoint, **SMALL), prompt(150)
    budget = CacheBudget.parse({"capacity": 48, "recent": 24, "window": 8, "kernel": 5})
    assert model.llm.engine.budget == budget
    continuations = [prompt(steps, seed=steps) for steps in (1, 2, 40)]
    got = [value for value, _ in score(model, *((context, c) for c in continuations))]
    want = [compressed_score(checkpoint, context, c, budget) for c in continuations]
    assert got == pytest.approx(want, abs=1e-3)
    uncompressed = [value for value, _ in score(full, *((context, c) for c in continuations))]
    assert got[0] == pytest.approx(uncompressed[0], abs=1e-5)
    assert all(abs(a - b) > 0.05 for a, b in zip(got[1:], uncompressed[1:], strict=True))


def test_equal_contexts_are_read_once(checkpoint, monkeypatch):
    model = make(checkpoint, **SMALL)
    read = record_readings(model.llm.engine, monkeypatch)
    first, second = prompt(70, seed=1), prompt(70, seed=2)
    score(model, *((context, [choice]) for choice in range(3, 12) for context in (first, second)))
    assert len(read) == 2


@pytest.mark.parametrize("length", [1, 40, 63, 64, 200])
def test_rolling_loglikelihood_is_that_of_the_whole_text(checkpoint, peer, full, length):
    """In one window, and in windows of 63 predicted tokens, the last of which sees all it can."""
    tokens = prompt(length)
    asked = instances("loglikelihood_rolling", (text(tokens),), (text(prompt(5, seed=4)),), ("",))
    got = full.loglikelihood_rolling(asked, disable_tqdm=True)
    want = [peer_score(peer, [BOS], tokens)[0], peer_score(peer, [BOS], prompt(5, seed=4))[0], 0.0]
    assert got == pytest.approx(want, abs=2e-3)

    total, size = peer_score(peer, [BOS], tokens[:63])[0], 63
    for start in range(63, length, size):
        end = min(start + size, length)
        total += peer_score(peer, tokens[end - size - 1 : start], tokens[start:end])[0]
    got = make(checkpoint, max_length=64).loglikelihood_rolling(asked, disable_tqdm=True)
    assert got == pytest.approx([total, *want[1:]], abs=2e-3)


def test_generated_text_is_the_engines(checkpoint):
    """Greedy and sampled, with and without stop strings, at their places."""
    model = make(checkpoint, **SMALL)
    llm = LLM(str(checkpoint), budget=model.llm.engine.budget, max_model_len=256, enforce_eager=True, device="cpu")
    prompts = [prompt(length, seed=length) for length in (5, 150, 40, 90, 11, 12, 13)]
    stop = llm.generate(prompts[1], SamplingParams(max_tokens=20)).pop().text[6:8]
    cases = [
        ({}, {"max_tokens": 200}),
        ({"until": [stop, ""], "max_gen_toks": 20}, {"stop": stop, "max_tokens": 20}),
        (
            {"until": stop, "max_new_tokens": 20, "do_sample": False, "temperature": 0.7},
            {"stop": stop, "max_tokens": 20},
        ),
        ({"do_sample": True, "seed": 5, "top_k": 9, "num_beams": 1}, {"temperature": 1.0, "seed": 5, "top_k": 9}),
        ({"temperature": 0.8, "seed": 6, "top_p": 0.9, "top_k": -1}, {"temperature": 0.8, "seed": 6, "top_p": 0.9}),
        ({"do_sample": True, "temperature": 0.5, "seed": 7, "min_p": None}, {"temperature": 0.5, "seed": 7}),
        ({"max_gen_toks": 9, "repetition_penalty": 1.3}, {"max_tokens": 9, "repetition_penalty": 1.3}),
    ]
    model._max_gen_toks = 200
    got = generate(model, *((text(tokens), given) for tokens, (given, _) in zip(prompts, cases, strict=True)))
    params = [SamplingParams(**({"max_tokens": 200} | expected)) for _, expected in cases]
    # A prompt and 200 tokens are more than fit.
    cut = [tokens[-(256 - one.max_tokens) :] for tokens, one in zip(prompts, params, strict=True)]
    assert got == [output.text for output in llm.generate(cut, params)]
    assert stop not in got[1]
    assert len(got[1]) < 8


def test_a_long_prompt_loses_its_first_tokens(checkpoint, caplog):
    model = make(checkpoint, max_length=64)
    with caplog.at_level(logging.WARNING):
        got = generate(model, (text(prompt(100)), {"max_gen_toks": 24}), (text(prompt(40)), {"max_gen_toks": 24}))
    assert got == [o.text for o in model.llm.generate([prompt(100)[-40:], prompt(40)], SamplingParams(max_tokens=24))]
    assert caplog.text.count("is truncated to its last 40") == 1
    with pytest.raises(RequestError, match="max_gen_toks is 64, which leaves no room"):
        generate(model, (text(prompt(5)), {"max_gen_toks": 64}))
    assert not model.llm.engine.busy


def test_a_special_token_stops_the_text(checkpoint, full, peer, tmp_path):
    """Although it is no part of it."""
    third = peer_greedy(peer, prompt(30), 3)[2]
    assert third not in peer_greedy(peer, prompt(30), 2)
    shutil.copytree(checkpoint, tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.add_special_tokens({"additional_special_tokens": [f"w{third}"]})
    tokenizer.save_pretrained(tmp_path / "model")
    model = make(tmp_path / "model")
    whole, stopped = generate(
        model,
        (text(prompt(30)), {"max_gen_toks": 12}),
        (text(prompt(30)), {"max_gen_toks": 12, "until": [f"w{third}"]}),
    )
    assert stopped == written(peer_greedy(peer, prompt(30), 2))
    assert whole.startswith(stopped)
    assert len(whole) > len(stopped)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_beams": 4}, "no beam search"),
        ({"length_penalty": 2.0}, "unknown length_penalty; allowed: until, max_gen_toks"),
        ({"top_p": 3.0}, "top_p is 3.0"),
        ({"max_gen_toks": 0}, "max_gen_toks is 0"),
    ],
)
def test_generation_settings_that_cannot_be_served_are_refused(full, settings, message):
    with pytest.raises(RequestError, match=message):
        generate(full, (text(prompt(5)), {"max_gen_toks": 9} | settings))


def test_answers_reach_lm_evals_cache_one_by_one(full, monkeypatch):
    """Under the keys by which it looks for them, also if the run breaks off; and nothing is left running."""
    kept = {}

    class Hook:
        def add_partial(self, kind, key, answer):
            kept[kind, json.dumps(key)] = answer

    asked = [(text(prompt(20, seed=n)), {"max_gen_toks": 3 + n, "until": ["w7w7"]}) for n in range(12)]
    pairs = [(text(prompt(20)), f" w{n}") for n in range(3, 9)]
    monkeypatch.setattr(full, "cache_hook", Hook())
    texts = generate(full, *asked)
    scores = full.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    whole = full.loglikelihood_rolling(instances("loglikelihood_rolling", (text(prompt(9)),)), disable_tqdm=True)
    want = {("generate_until", json.dumps(key)): answer for key, answer in zip(asked, texts, strict=True)}
    want |= {("loglikelihood", json.dumps(key)): answer for key, answer in zip(pairs, scores, strict=True)}
    assert kept == want | {("loglikelihood_rolling", json.dumps([text(prompt(9))])): whole[0]}

    kept.clear()
    step, left = full.llm.engine.step, iter(range(8))

    def breaking():
        next(left)
        return step()

    monkeypatch.setattr(full.llm.engine, "step", breaking)
    with pytest.raises((StopIteration, RuntimeError)):
        generate(full, *asked)
    monkeypatch.setattr(full.llm.engine, "step", step)
    assert 0 < len(kept) < len(asked)
    assert kept.items() <= want.items()
    assert not full.llm.engine.busy
    assert generate(full, *asked) == texts


def test_a_request_that_fails_is_an_error(full, monkeypatch):
    def fail(*_):
        raise OSError("no such thing")

    monkeypatch.setattr(full.llm.engine.model_runner.prefiller, "advance", fail)
    with pytest.raises(RequestError, match="a generate_until request failed: OSError: no such thing"):
        generate(full, (text(prompt(33, seed=8)), {"max_gen_toks": 3}))


def evaluate(model, task, tasks, **settings):
    return lm_eval.simple_evaluate(model, tasks=[task], task_manager=tasks, bootstrap_iters=0, **settings)


def choices(peer, count=12):
    """Questions with four choices each, and how many of them the peer answers right."""
    rows, right = [], 0
    for number in range(count):
        context = prompt(10 + 9 * number, seed=number)
        options = [prompt(1 + number % 3, seed=100 * number + n) for n in range(4)]
        values = [peer_score(peer, context, option)[0] for option in options]
        best, label = values.index(max(values)), number % 4
        right += best == label
        rows.append({"context": text(context), "choices": [text(option) for option in options], "label": label})
    assert 0 < right < count
    return rows, right / count


def test_a_multiple_choice_task(full, peer, tasks):
    rows, accuracy = choices(peer)
    Path("choices.json").write_text(json.dumps(rows))
    results = evaluate(full, "local_choices", tasks)
    assert results["results"]["local_choices"]["acc,none"] == pytest.approx(accuracy)
    assert results["config"]["kv_budget"]["capacity"] == 256
    assert results["max_length"] == 256


def test_a_generation_task(full, peer, tasks):
    rows = []
    for number in range(8):
        context = prompt(10 + number, seed=number)
        answer = written(peer_greedy(peer, context, 6))
        rows.append({"context": text(context), "answer": answer if number % 4 else "w3"})
    Path("answers.json").write_text(json.dumps(rows))
    results = evaluate(full, "local_answers", tasks, gen_kwargs={"until": ["nothing"]})
    assert results["results"]["local_answers"]["exact_match,none"] == pytest.approx(0.75)


@pytest.fixture(scope="module")
def chat(checkpoint, tmp_path_factory):
    """A model whose tokenizer adds a beginning of sequence, as its chat template does."""
    directory = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(checkpoint, directory)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    tokenizer.chat_template = (
        "{{ bos_token }}{% for message in messages %} {{ 'w90' if message.role == 'user' else 'w91' }} "
        "{{ message.content }}{% if not loop.last or add_generation_prompt %} w92{% endif %}{% endfor %}"
        "{% if add_generation_prompt %} w91 {% endif %}"
    )
    tokenizer.save_pretrained(directory)
    return directory


def test_a_chat_template_is_applied_once(chat, tasks, monkeypatch):
    model, prompts = make(chat), []
    add = model.llm.engine.add_request
    monkeypatch.setattr(
        model.llm.engine, "add_request", lambda tokens, params: (prompts.append(tokens), add(tokens, params))[1]
    )
    Path("answers.json").write_text(json.dumps([{"context": "w5 w6", "answer": "w7"}]))
    Path("choices.json").write_text(json.dumps([{"context": "w5 w6", "choices": ["w7", "w8 w9"], "label": 0}]))
    for task in ("local_answers", "local_choices"):
        evaluate(model, task, tasks)
        evaluate(model, task, tasks, apply_chat_template=True)
    plain, laid_out = [BOS, 5, 6], [BOS, 90, 5, 6, 92, 91]
    assert prompts == [plain, laid_out, plain, plain, laid_out, laid_out]
    history = [{"role": "user", "content": "w5"}, {"role": "assistant", "content": "w6"}]
    assert model.apply_chat_template(history, add_generation_prompt=False) == "<s> w90 w5 w92 w91 w6"
    assert model.chat_template(True) == model.tokenizer.chat_template
    assert model.tok_encode("w5 w6 w7", left_truncate_len=2) == [6, 7]
    assert model.tok_encode("w5", add_special_tokens=False) == [5]
    assert model.tokenizer_name.endswith("__model")


def test_a_model_without_chat_template_says_so(full, tasks):
    Path("answers.json").write_text(json.dumps([{"context": "w5 w6", "answer": "w7"}]))
    with pytest.raises(RequestError, match="no chat template; run without --apply_chat_template"):
        evaluate(full, "local_answers", tasks, apply_chat_template=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"budgett": 64, "top": 1},
            "unknown argument budgett, top; allowed: pretrained, budget, .*, max_gen_toks, sink",
        ),
        ({"pretrained": ""}, "pretrained is missing"),
        ({"budget": "many"}, "budget is 'many'; it must be a whole number"),
        ({"budget": 64.5}, "budget is 64.5"),
        ({"budget": True}, "budget is True"),
        ({"policy": "streaming"}, "policy=streaming needs a budget"),
        ({"policy": "full", "budget": 64}, "policy=full keeps everything"),
        ({"policy": "full", "window": 4}, "policy=full keeps everything"),
        ({"policy": "best", "budget": 64}, "unknown policy 'best'; allowed: full, streaming"),
        ({"window": 4}, "recent, sink, top_k missing"),
        ({"budget": 64, "window": "wide"}, "window is 'wide'"),
        ({"budget": 64, "ring": "round"}, "ring is 'round'"),
        ({"slots": 0}, "slots is 0"),
        ({"compiled": "maybe"}, "compiled is 'maybe'; it must be true or false"),
        ({"dtype": "int8"}, "dtype is 'int8'"),
        ({"device": "tpu"}, "device is 'tpu'"),
        ({"max_length": 10**6}, "max_model_len is 1000000"),
    ],
)
def test_model_args_that_cannot_work_are_refused(checkpoint, arguments, message):
    with pytest.raises(ConfigurationError, match=message):
        SnapStreamLM(**({"pretrained": str(checkpoint)} | arguments))


def test_model_args_may_be_text(checkpoint, monkeypatch):
    """As they come from the command line, whose device and batch size give way to them."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = f"pretrained={checkpoint},budget=64,policy=streaming,sink=2,max_length=128,slots=2,compiled=False"
    added = {"batch_size": 1, "max_batch_size": None, "device": "cuda:0"}
    model = SnapStreamLM.create_from_arg_string(line, added)
    assert model.llm.engine.budget == CacheBudget(sink=2, recent=62, top_k=0, policy="streaming")
    assert (model.llm.engine.config.slots, model.max_length, model.llm.engine.device.type) == (2, 128, "cpu")
    assert model.max_gen_toks == 256
    quoted = {"pretrained": str(checkpoint), "budget": "48", "kernel": "5", "max_gen_toks": "9", "prefill_chunk": 16.0}
    model = SnapStreamLM.create_from_arg_obj(quoted, {"batch_size": "8"})
    assert (model.llm.engine.budget.policy.kernel, model.max_gen_toks, model.llm.engine.config.prefill_chunk) == (
        5,
        9,
        16,
    )
    assert model.llm.engine.config.slots == 8
    for size, most, slots in [("auto", None, 4), ("auto:4", 6, 6), (None, None, 4), (5, 9, 5)]:
        model = make(checkpoint, slots=None, batch_size=size, max_batch_size=most, budget="none", policy="full")
        assert model.llm.engine.config.slots == slots
        assert model.llm.engine.budget.capacity == 256
    whole = make(checkpoint, sink=2, recent=20, top_k=26, window=8)
    assert whole.llm.engine.budget == CacheBudget(sink=2, recent=20, top_k=26, window=8)


def test_registering_leaves_what_is_there(monkeypatch):
    """Such as an entry point's; and does nothing the second time."""
    harness.register()
    harness.register()
    assert get_model("snapstream").__qualname__ == "SnapStreamLM"
    assert get_model("dummy")
    other = Registry("model")
    other.register("snapstream", target="somewhere:else")
    monkeypatch.setattr(harness, "model_registry", other)
    harness.register()
    assert dict(other.items()) == {"snapstream": "somewhere:else"}


def test_errors_of_the_command_line_are_one_line(checkpoint, tasks, monkeypatch):
    Path("answers.json").write_text(json.dumps([{"context": "w5 w6", "answer": "w7"}]))
    line = ["harness", "run", "--model", "snapstream", "--model_args", f"pretrained={checkpoint},budgett=3"]
    monkeypatch.setattr(sys, "argv", [*line, "--tasks", str(TASKS / "answers.yaml")])
    with pytest.raises(SystemExit, match="error: model_args: unknown argument budgett; allowed: pretrained"):
        harness.main()


def test_the_command_line(checkpoint, peer, tmp_path):
    rows, accuracy = choices(peer, 6)
    (tmp_path / "choices.json").write_text(json.dumps(rows))
    arguments = f"pretrained={checkpoint},budget=64,max_length=256,slots=2"
    command = [sys.executable, "-m", "snapstream.evaluation.harness", "run", "--model", "snapstream"]
    command += ["--model_args", arguments, "--tasks", "local_choices", "--include_path", str(TASKS)]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=os.environ
        | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    row = next(line for line in done.stdout.splitlines() if "local_choices" in line)
    cells = [cell.strip() for cell in row.split("|")]
    assert "acc" in cells
    assert float(cells[7]) == pytest.approx(accuracy, abs=1e-3)


def test_without_lm_eval_it_says_what_to_install():
    code = "import sys; sys.modules['lm_eval'] = None; import snapstream.evaluation.harness"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr.splitlines()[-1].endswith(
        'the lm-eval adapter needs lm-eval: in the source directory, pip install ".[eval]"'
    )


def test_the_shipped_model_through_lm_eval(tasks):
    """Notes in texts of 600 tokens, asked with lm-eval and a quarter of the cache: voted ones are found."""
    tokenizer = AutoTokenizer.from_pretrained(TASK_MODEL)

    def count(text):
        return len(tokenizer.encode(text))

    made = [make_sample(GENERATED["multikey"], 600, seed, count, depth=seed % 4 / 8) for seed in range(16)]
    Path("answers.json").write_text(json.dumps([{"context": s.prompt, "answer": s.answer} for s in made]))
    scores = {}
    for policy in ("snapstream", "streaming"):
        model = SnapStreamLM(pretrained=str(TASK_MODEL), budget=150, policy=policy, slots=8)
        results = evaluate(model, "local_answers", tasks)
        scores[policy] = results["results"]["local_answers"]["exact_match,none"]
    assert scores["snapstream"] >= 0.9
    assert scores["streaming"] <= 0.5
