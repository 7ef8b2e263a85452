"""A small model that guesses: what it stores is what a decoder of its own would have stored."""

import pytest

from snapstream import CacheBudget, ConfigurationError, SamplingParams
from snapstream.engine.drafters.draft_length import DraftLength
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine.test_engine import BUDGET, greedy, make
from tests.engine.test_speculation import LENGTHS, MODELS, answers_of


@pytest.fixture(scope="module", params=["qwen3", "deepseek-v3"])
def model(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    save_checkpoint(path, request.param, **MODELS[request.param])
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Smaller, and of other weights."""
    path = tmp_path_factory.mktemp("small")
    save_checkpoint(path, "qwen2", head_dim=32, num_hidden_layers=1, hidden_size=32, seed=5)
    save_tokenizer(path)
    return path


@pytest.fixture
def all_that_is_allowed(monkeypatch):
    monkeypatch.setattr(DraftLength, "most", lambda pace, limit, cost: limit)


def drafted_by(model, small, budget=BUDGET, **settings):
    defaults = {"speculative": "draft-model", "draft_model": str(small), "speculative_tokens": 3}
    return make(model, budget, **(defaults | settings))


@pytest.mark.parametrize("ring", ["elastic", "paper"])
def test_a_model_that_drafts_for_itself_is_always_right(model, ring, all_that_is_allowed):
    """Its cache loses the same tokens, prompts are chosen from alike, and guesses that were wrong were never there."""
    budget = CacheBudget(4, 24, 20, window=8, kernel=5, ring=ring)
    prompts = [prompt(n, seed=n) for n in LENGTHS]
    want = answers_of(make(model, budget), prompts, greedy(50))
    for settings in ({"slots": 1}, {"slots": 3, "speculative_tokens": 5}):
        outputs = drafted_by(model, model, budget, **settings).generate(prompts, greedy(50))
        assert [out.token_ids for out in outputs] == list(want.values())
        assert all(out.accepted == out.drafted > 20 for out in outputs)


def test_what_is_drawn_is_told_to_the_small_model(model, all_that_is_allowed):
    """It is mostly wrong then, and goes on from what was really taken."""
    prompts = [prompt(60 + n, seed=n) for n in range(3)]
    params = [
        SamplingParams(max_tokens=60, temperature=0.7, seed=1, ignore_eos=True),
        greedy(40, forced=tuple(prompt(20, seed=4))),
        greedy(40, repetition_penalty=1.2),
    ]
    plain = make(model).generate(prompts, params)
    outputs = drafted_by(model, model).generate(prompts, params)
    assert [out.token_ids for out in outputs] == [out.token_ids for out in plain]
    # Once the model is free it says what the small one does.
    assert outputs[1].accepted > 10
    assert all(out.accepted < out.drafted for out in outputs)


def test_another_model_changes_nothing_but_the_time(model, other, all_that_is_allowed):
    prompts = [prompt(n, seed=n) for n in LENGTHS]
    want = answers_of(make(model), prompts, greedy(40))
    llm = drafted_by(model, other)
    assert [out.token_ids for out in llm.generate(prompts, greedy(40))] == list(want.values())
    llm.generate(prompt(9), greedy(3))
    assert len(llm.engine.runner.drafter.followers) <= 3


def test_resting_and_going_on(model):
    """What became certain meanwhile is read later, several tokens at a time."""
    want = make(model, slots=1).generate(prompt(100), greedy(60))[0]
    llm = drafted_by(model, model, slots=1)
    waits = iter([0] * 5 + [3] * 3 + [0] * 4 + [1] * 100)
    llm.engine.runner._most_guesses = lambda request: next(waits)
    got = llm.generate(prompt(100), greedy(60))[0]
    assert got.token_ids == want.token_ids
    assert got.accepted == got.drafted > 15


def test_interrupts_and_aborts_leave_nothing_behind(model, all_that_is_allowed, monkeypatch):
    want = make(model).generate(prompt(70), greedy(30))[0].token_ids
    llm = drafted_by(model, model)
    engine = llm.engine
    drafter = engine.runner.drafter
    for method in ("prepare", "guess"):
        engine.add_request(prompt(70), greedy(30))
        with monkeypatch.context() as patch:

            def interrupted(*given, **named):
                raise KeyboardInterrupt

            patch.setattr(drafter.decode, "read", interrupted)
            if method == "prepare":
                patch.setattr(drafter.prefill, "advance", interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(iter(engine.step, None))
        assert "interrupted" in engine.step()[-1].error
        assert not drafter.followers
        out = llm.generate(prompt(70), greedy(30))[0]
        assert out.token_ids == want
        assert out.accepted == out.drafted > 10
    name = engine.add_request(prompt(70), greedy(30))
    while not any(output.token_count > 8 for output in engine.step()):
        pass
    engine.abort(name)
    out = llm.generate([prompt(70), prompt(30)], greedy(30))[0]
    assert out.token_ids == want
    assert out.accepted == out.drafted > 10


def test_what_cannot_be_is_said(model, other, tmp_path):
    for settings, said in (
        ({"speculative": "draft-model"}, "give a draft_model"),
        ({"draft_model": str(other)}, "give a draft_model with"),
        ({"speculative": "lookup", "draft_model": str(other)}, "and only then"),
    ):
        with pytest.raises(ConfigurationError, match=said):
            make(model, **settings)
    save_checkpoint(tmp_path, "qwen2", head_dim=32)
    save_tokenizer(tmp_path)
    words = tmp_path / "tokenizer.json"
    words.write_text(words.read_text().replace('"w7"', '"?"').replace('"w8"', '"w7"').replace('"?"', '"w8"'))
    with pytest.raises(ConfigurationError, match="a different tokenizer"):
        drafted_by(model, tmp_path)


def test_its_memory_is_planned(model, other):
    plain, ours = make(model).engine.plan, drafted_by(model, other).engine.plan
    assert plain.drafter == 0
    assert ours.drafter > 0
    assert ours.total >= plain.total + ours.drafter
    assert "drafter" in str(drafted_by(model, other).engine.plan)
