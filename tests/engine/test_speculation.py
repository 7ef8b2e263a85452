"""With guesses or without: the same tokens, however many of the guesses are right."""

import random
from collections import Counter

import pytest
import torch

from snapstream import CacheBudget, ConfigurationError, SamplingParams
from snapstream.engine.decode.verification import most_tokens
from snapstream.engine.drafters import Drafter
from tests.checkpoints import prompt, prompt_before_words, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine.test_engine import BUDGET, greedy, make, naive_generate

LENGTHS = (1, 5, 27, 48, 60, 131, 200)


class Oracle(Drafter):
    """Guesses that are right with a probability, at random; how many there are is random, too.

    Args:
        answers: What will come, by prompt.
        share: How many of the guesses are right.
    """

    def __init__(self, answers, share=0.5, seed=0):
        self.answers, self.share, self.random = answers, share, random.Random(seed)

    def guess(self, requests, most):
        made = []
        for request, many in zip(requests, most, strict=True):
            coming = self.answers.get(tuple(request.all_tokens), ())[len(request.tokens) :]
            coming = coming[: self.random.randint(0, many)]
            wrong = [self.random.random() >= self.share for _ in coming]
            made.append([(token + 1) % 96 if miss else token for token, miss in zip(coming, wrong, strict=True)])
        return made


def drafting(checkpoint, answers, budget=BUDGET, *, share=0.5, seed=0, **settings):
    """An engine that gets guesses from an oracle, and as many as there may be."""
    llm = make(checkpoint, budget, speculative="lookup", **({"speculative_tokens": 3} | settings))
    llm.engine.runner.drafter = Oracle(answers, share, seed)
    return llm


@pytest.fixture(autouse=True)
def all_that_is_allowed(monkeypatch):
    """However few of the guesses are right."""
    monkeypatch.setattr("snapstream.engine.drafters.draft_length.DraftLength.most", lambda pace, limit, cost: limit)


# Through the native loop, grouped and latent; and in plain torch, as the head has a size that the loop does not take.
MODELS = {"qwen3": {"head_dim": 32}, "deepseek-v3": {}, "llama3-gqa": {}}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    save_checkpoint(path, request.param, **MODELS[request.param])
    save_tokenizer(path)
    return path


def answers_of(llm, prompts, params):
    return {tuple(tokens): out.token_ids for tokens, out in zip(prompts, llm.generate(prompts, params), strict=True)}


@pytest.mark.parametrize("ring", ["elastic", "paper", "resnap"])
@pytest.mark.parametrize("capacity", [(4, 24, 20), (2, 14, 0), (1, 9, 30), None])
def test_equals_decoding_without_guesses(model, ring, capacity):
    """Below and above every boundary, in rings that turn many times, and with several slots in other places."""
    if "llama3" in model.name and (ring, capacity) not in [("elastic", (2, 14, 0)), ("resnap", (4, 24, 20))]:
        pytest.skip("plain torch is slow, and does what the loop is compared with")
    if ring == "resnap" and capacity in (None, (2, 14, 0)):
        pytest.skip("there are no places to give")
    budget = capacity and CacheBudget(*capacity, window=8, kernel=5, ring=ring)
    prompts, steps = [prompt(n, seed=n) for n in LENGTHS], greedy(50)
    want = answers_of(make(model, budget), prompts, steps)
    drafted = accepted = 0
    for seed, settings in enumerate(({"slots": 1}, {"slots": 4}, {"slots": 3, "speculative_tokens": 7})):
        llm = drafting(model, want, budget, seed=seed, **settings)
        outputs = llm.generate(prompts, steps)
        assert [out.token_ids for out in outputs] == list(want.values())
        drafted += sum(out.drafted for out in outputs)
        accepted += sum(out.accepted for out in outputs)
    assert drafted > 300
    assert 0.2 * drafted < accepted < 0.6 * drafted  # those after a wrong one are not looked at


def test_equals_naive_decoding(model):
    """A decoder of growing lists in float64, which knows no guesses."""
    if "deepseek" in model.name:
        pytest.skip("naive decoding is for grouped heads; latent ones are compared without guesses")
    want = naive_generate(model, prompt(131), BUDGET, 60)
    llm = drafting(model, {tuple(prompt(131)): want})
    assert llm.generate(prompt(131), greedy(60))[0].token_ids == want


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_nothing_right_and_everything_right(model, share):
    prompts = [prompt(n, seed=n) for n in (60, 131)]
    want = answers_of(make(model), prompts, greedy(41))
    llm = drafting(model, want, share=share)
    llm.engine.runner.drafter.random.randint = lambda low, high: high
    for out, tokens in zip(llm.generate(prompts, greedy(41)), want.values(), strict=True):
        assert out.token_ids == tokens
        # 40 tokens after the first: one for each wrong guess, or four at a time.
        assert (out.drafted, out.accepted) == ((30, 30) if share else (out.drafted, 0))
        assert share or out.drafted >= 3 * 38


PARAMS = [
    SamplingParams(max_tokens=40, temperature=1.0, seed=1, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.7, top_p=0.9, top_k=40, min_p=0.01, seed=2, ignore_eos=True),
    SamplingParams(max_tokens=40, presence_penalty=0.5, frequency_penalty=0.3, temperature=1.0, seed=3),
    SamplingParams(max_tokens=40, repetition_penalty=1.3, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=1.5, seed=4, min_tokens=20, logit_bias={2: 5.0}),
    SamplingParams(max_tokens=40, logprobs=3, ignore_eos=True),
    SamplingParams(max_tokens=40, forced=tuple(prompt(17, seed=3)), ignore_eos=True, logprobs=1),
    SamplingParams(max_tokens=40, temperature=1.0, seed=5, stop="w7"),
    SamplingParams(max_tokens=3, temperature=1.0, seed=6),
]


def test_equals_sampling_without_guesses(model):
    """Seeds, penalties, what may not end yet, forced tokens, stop strings; and what is said of each token."""
    prompts = [prompt(40 + n, seed=n) for n in range(len(PARAMS))]
    plain = make(model).generate(prompts, PARAMS)
    answers = {tuple(tokens): out.token_ids for tokens, out in zip(prompts, plain, strict=True)}
    for seed in range(2):
        llm = drafting(model, answers, share=0.7, seed=seed)
        outputs = llm.generate(prompts, PARAMS)
        assert sum(out.accepted for out in outputs) > 40
        for got, want in zip(outputs, plain, strict=True):
            assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason)
            assert (got.logprobs is None) == (want.logprobs is None)
            for mine, theirs in zip(got.logprobs or (), want.logprobs or (), strict=True):
                assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
                assert set(mine.top) == set(theirs.top)


@torch.inference_mode()
def test_the_distribution_is_unchanged(checkpoint):
    """The second of two drawn tokens, beside the model's own probabilities; its guess is right for one of them only."""
    from transformers import AutoModelForCausalLM

    tokens, first = prompt(30), 17
    peer = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    logits = peer(torch.tensor([[*tokens, first]])).logits[0, -1]
    likely = logits.softmax(-1).topk(5)
    llm = drafting(checkpoint, {}, CacheBudget.preset("full", 256), slots=16, max_logprobs=1)
    llm.engine.runner.drafter.guess = lambda requests, most: [[int(likely.indices[0])][:many] for many in most]
    params = [SamplingParams(max_tokens=3, temperature=0.8, seed=seed, forced=(first,)) for seed in range(1600)]
    batches = (params[at : at + 32] for at in range(0, len(params), 32))
    outputs = [output for batch in batches for output in llm.generate([tokens] * len(batch), batch)]
    drawn = Counter(out.token_ids[1] for out in outputs)
    accepted = sum(out.accepted for out in outputs)
    assert accepted == drawn[int(likely.indices[0])]
    shares = (logits / 0.8).softmax(-1)
    for token in likely.indices.tolist():
        share = float(shares[token])
        deviation = (share * (1 - share) / len(params)) ** 0.5
        assert abs(drawn[token] / len(params) - share) < 4 * deviation, token


def test_ends_in_the_middle_of_what_was_accepted(model):
    """At a stop token, a stop string, and at ``max_tokens``; what came after is not seen, and is in no cache."""
    tokens = prompt_before_words(lambda tokens: make(model).generate(tokens, greedy(30))[0].token_ids, 90, 8)
    whole = make(model).generate(tokens, greedy(30))[0]
    for at in (4, 5, 6, 7):
        stop_id = whole.token_ids[at]
        end = whole.token_ids.index(stop_id)
        cases = (
            (SamplingParams(max_tokens=30, ignore_eos=True, stop_token_ids=(stop_id,)), end + 1, "stop"),
            (greedy(at), at, "length"),
            (greedy(30, stop=f"w{stop_id}"), None, "stop"),
        )
        for params, count, reason in cases:
            plain = make(model).generate(tokens, params)[0]
            llm = drafting(model, {tuple(tokens): whole.token_ids}, share=1.0)
            got = llm.generate(tokens, params)[0]
            assert (got.token_ids, got.text) == (plain.token_ids, plain.text)
            assert got.finish_reason == plain.finish_reason == reason
            assert count is None or len(got.token_ids) == count


def test_conversations_go_on_the_same(model):
    """What is saved has nothing of guesses, and a second turn says the same."""
    turns, made = [prompt(90), prompt(25, seed=5), prompt(40, seed=6)], []
    for speculative in (False, True):
        settings = {"sessions": 1, "decode_steps": 4}
        llm = make(model, **settings)
        if speculative:
            llm = drafting(model, dict(made), share=0.8, speculative_tokens=7, **settings)
        past, said = None, []
        for new in turns:
            seen = [*(past.tokens if past else ()), *new]
            name = llm.engine.add_request(new, greedy(30), past=past, keep=True)
            outputs = iter(llm.engine.step, None)
            output = next(out for step in outputs for out in step if out.finished and out.request_id == name)
            past = output.saved
            said.append((tuple(seen), output.token_ids))
        if speculative:
            assert said == made
            assert llm.engine.runner.drafter.answers
        made = said


def test_aborts_and_errors_hurt_nobody_else(model, monkeypatch):
    prompts = [prompt(n, seed=n) for n in (60, 70, 80)]
    want = answers_of(make(model), prompts, greedy(40))
    llm = drafting(model, want, share=0.7)
    engine = llm.engine
    names = [engine.add_request(tokens, greedy(40)) for tokens in prompts]
    outputs = {}
    while engine.busy:
        for output in engine.step():
            outputs[output.request_id] = output
            if output.request_id == names[1] and output.token_count > 9:
                engine.abort(names[1])
    assert outputs[names[1]].finish_reason == "abort"
    assert outputs[names[0]].token_ids == want[tuple(prompts[0])]
    assert outputs[names[2]].token_ids == want[tuple(prompts[2])]

    def breaks(requests, most):
        raise KeyboardInterrupt

    name = engine.add_request(prompts[0], greedy(40))
    while not any(request.tokens for request in engine.table.running):
        engine.step()
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner.drafter, "guess", breaks)
        with pytest.raises(KeyboardInterrupt):
            list(iter(engine.step, None))
    ended = [output for output in engine.step() if output.request_id == name]
    assert "interrupted" in ended[-1].error
    assert llm.generate(prompts[0], greedy(40))[0].token_ids == want[tuple(prompts[0])]


def test_a_drafter_that_fails_is_only_slower(model, caplog):
    """Guesses are no part of the answer."""
    want = make(model).generate(prompt(60), greedy(20))[0]
    llm = drafting(model, {})

    def fails(requests, most):
        raise RuntimeError("no guess today")

    llm.engine.runner.drafter.guess = fails
    got = llm.generate(prompt(60), greedy(20))[0]
    assert (got.token_ids, got.drafted) == (want.token_ids, 0)
    assert "no guess today" in caplog.text
    assert caplog.text.count("no guess today") < 3


def test_settings_are_checked(checkpoint):
    for settings, said in (
        ({"speculative": "mind reading"}, "allowed: off, lookup"),
        ({"speculative": "lookup", "speculative_tokens": 0}, "must be 1 or more"),
        ({"speculative": "lookup", "speculative_tokens": 99}, "must be 15 or less"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            make(checkpoint, **settings)


def test_kinds_of_steps():
    """Graphs are few; a CPU needs one kind."""
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [most_tokens(n, cpu) for n in (1, 3, 15)] == [(2,), (4,), (16,)]
    assert [most_tokens(n, cuda) for n in (1, 2, 3, 5, 15)] == [(2,), (2, 3), (2, 4), (2, 4, 6), (2, 4, 8, 16)]


def counting(llm):
    """Counts steps that verify guesses."""
    counts, decode = Counter(), llm.engine.model_runner.decoder
    verify = decode.verify

    def counted(*args, **kwargs):
        counts["verified"] += 1
        return verify(*args, **kwargs)

    decode.verify = counted
    return counts


def test_lookup_finds_what_is_copied_from_the_prompt(model, monkeypatch):
    """In a quarter of the steps, and of nothing but what can be right."""
    monkeypatch.undo()
    tokens = prompt(180)
    copied = tuple(tokens[20:80])
    want = make(model).generate(tokens, greedy(62, forced=copied))[0]
    llm = make(model, speculative="lookup", speculative_tokens=3)
    llm.engine.runner.cost.saw_guesses = lambda *seen: None
    counts = counting(llm)
    got = llm.generate(tokens, greedy(62, forced=copied))[0]
    assert got.token_ids == want.token_ids
    assert got.accepted > 40
    assert counts["verified"] < 24


def test_lookup_gives_the_same_text(model, monkeypatch):
    monkeypatch.undo()
    prompts = [prompt(n, seed=n) for n in LENGTHS]
    want = answers_of(make(model), prompts, greedy(150))
    outputs = make(model, speculative="lookup").generate(prompts, greedy(150))
    assert [out.token_ids for out in outputs] == list(want.values())
    accepted, drafted = (sum(getattr(out, what) for out in outputs) for what in ("accepted", "drafted"))
    assert accepted <= drafted
    assert accepted or "llama3" in model.name  # where guesses cost too much, none are made
