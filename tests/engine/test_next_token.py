"""A checkpoint's own next-token module: what it guesses, and that guesses change nothing."""

from dataclasses import asdict

import pytest

from snapstream import CacheBudget, CheckpointError, ConfigurationError
from snapstream.engine.drafters import NextToken
from snapstream.errors import CacheFileError
from tests.checkpoints import prompt, save_checkpoint, save_next_token
from tests.conftest import save_tokenizer
from tests.engine.test_conversation import run
from tests.engine.test_engine import BUDGET, greedy, make
from tests.engine.test_memory import LATENT as LARGE
from tests.engine.test_memory import kept_by
from tests.engine.test_speculation import PARAMS, Oracle
from tests.memory import measure
from tests.models.test_weights import edit_config, rewrite
from tests.peers import peer_guesses


@pytest.fixture(autouse=True)
def all_that_is_allowed(monkeypatch):
    """However few of the guesses are right."""
    monkeypatch.setattr("snapstream.engine.drafters.draft_length.DraftLength.most", lambda pace, limit, cost: limit)


class Watched(Oracle):
    """Notes what the module guesses; what is verified instead is right more often than a random module."""

    needs_every_step = True

    def __init__(self, module, answers, share, seed=0):
        super().__init__(answers, share, seed)
        self.module, self.guesses = module, {}

    def guess(self, requests, most):
        for request, guesses in zip(requests, self.module.guess(requests, most), strict=True):
            if guesses:
                self.guesses[tuple(request.prompt), len(request.tokens)] = guesses
        return super().guess(requests, most)


def watched(checkpoint, answers, budget=BUDGET, *, share=0.6, seed=0, **settings):
    llm = make(checkpoint, budget, speculative="mtp", **({"speculative_tokens": 3} | settings))
    runner = llm.engine.runner
    assert isinstance(runner.drafter, NextToken)
    runner.drafter = Watched(runner.drafter, answers, share, seed)
    return llm


# The last one is one that the native loop does not take.
FAMILIES = {"deepseek-v3": {}, "deepseek-v3-yarn": {}, "deepseek-v3-halves": {"qk_nope_head_dim": 24}}


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    """A checkpoint, and its module by transformers."""
    path = tmp_path_factory.mktemp(request.param)
    config = save_checkpoint(path, request.param, **FAMILIES[request.param]).config
    save_tokenizer(path)
    return path, save_next_token(path, config)


BUDGETS = {
    "full": CacheBudget.preset("full", 256),
    "elastic": CacheBudget(4, 24, 20, window=8, kernel=5, policy="snapstream"),
    "paper": CacheBudget(2, 9, 14, window=8, kernel=5, ring="paper", policy="snapstream"),
    "streaming": CacheBudget(2, 14, 0, window=1),
}


@pytest.mark.parametrize("budget", BUDGETS)
def test_guesses_equal_a_forward_in_float64(model, budget):
    """Of certain tokens and of its own, in rings that turn, after steps of which any number was right."""
    (path, module), steps = model, 30
    if "-v3-" in path.name and budget != "paper":
        pytest.skip("other weights take the same caches")
    budget = BUDGETS[budget]
    prompts = [prompt(n, seed=n) for n in (1, 33, 90)]
    want, guessed = {}, {}
    for tokens in prompts:
        made, guesses = peer_guesses(path, module, tokens, budget, steps, 4)
        want[tuple(tokens)] = tuple(made)
        guessed |= {(tuple(tokens), count): each for count, each in guesses.items()}
    compared = set()
    for seed, settings in enumerate(({}, {"slots": 1, "speculative_tokens": 4}, {"slots": 4, "prefill_chunk": 16})):
        llm = watched(path, want, budget, seed=seed, **settings)
        outputs = llm.generate(prompts, greedy(steps))
        assert [out.token_ids for out in outputs] == list(want.values())
        assert sum(out.accepted for out in outputs) > 20
        for place, guesses in llm.engine.runner.drafter.guesses.items():
            assert list(guesses) == guessed[place][: len(guesses)], place
            compared.add((place, len(guesses)))
    assert len(compared) > 60
    assert max(many for _, many in compared) == 4


def test_what_it_guesses_is_verified(model):
    """By itself, with nobody to help it: the same tokens, and those that were right are counted."""
    path, module = model
    tokens = prompt(90, seed=90)
    made, guesses = peer_guesses(path, module, tokens, BUDGETS["elastic"], 40, 3)
    llm = make(path, BUDGETS["elastic"], speculative="mtp", speculative_tokens=3)
    out = llm.generate(tokens, greedy(40))[0]
    assert list(out.token_ids) == made
    at, accepted = 1, 0
    while at < 40:
        right = 0
        while at > 1 and right < min(3, 39 - at) and guesses[at][right] == made[at + right]:
            right += 1
        accepted, at = accepted + right, at + right + 1
    assert out.accepted == accepted
    assert out.drafted > 60


@pytest.fixture(scope="module")
def latent(tmp_path_factory):
    """One such checkpoint, for what is the same in all."""
    path = tmp_path_factory.mktemp("latent")
    save_next_token(path, save_checkpoint(path, "deepseek-v3").config)
    save_tokenizer(path)
    return path


def test_equals_the_engine_without(latent):
    """Sampling, penalties, stop strings, forced tokens; what is told of prompts is of the model alone."""
    prompts = [prompt(40 + n, seed=n) for n in range(len(PARAMS) + 1)]
    params = [*PARAMS, greedy(10, return_kept_tokens=True, prompt_logprobs=2)]
    plain = make(latent).generate(prompts, params)
    answers = {tuple(tokens): out.token_ids for tokens, out in zip(prompts, plain, strict=True)}
    for llm in (watched(latent, answers), make(latent, speculative="mtp")):
        for got, want in zip(llm.generate(prompts, params), plain, strict=True):
            assert (got.token_ids, got.text, got.finish_reason) == (want.token_ids, want.text, want.finish_reason)
        assert got.cache.kept.positions == want.cache.kept.positions
        assert got.cache.kept.mass == pytest.approx(want.cache.kept.mass, abs=1e-5)
        for mine, theirs in zip(got.prompt_logprobs[1:], want.prompt_logprobs[1:], strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)


def test_conversations_and_files(latent, tmp_path):
    """The module's cache is saved with the others, and a turn later guesses go on."""
    plain, ours = make(latent, sessions=1), make(latent, sessions=1, speculative="mtp")
    pasts = dict.fromkeys((plain, ours))
    for turn in range(3):
        said = []
        for llm, past in pasts.items():
            output = run(llm, prompt(40 + turn, seed=turn), greedy(30), past=past, keep=True)
            said.append(output.token_ids)
            file = tmp_path / f"{id(llm)}"
            llm.engine.files.save(output.saved, file)
            pasts[llm] = llm.engine.files.load(file)
        assert said[0] == said[1]
        assert output.drafted > 20
    assert [len(past.layers) for past in pasts.values()] == [2, 3]
    # Without the module the rest is enough.
    past = plain.engine.files.load(tmp_path / f"{id(ours)}")
    want, got = (run(plain, prompt(9), greedy(9), past=each).token_ids for each in (pasts[plain], past))
    assert got == want
    with pytest.raises(CacheFileError, match="caches of 2 layers, but 3 are needed here"):
        ours.engine.files.load(tmp_path / f"{id(plain)}")


def test_interrupts_leave_nothing_behind(latent, monkeypatch):
    want = make(latent).generate(prompt(70), greedy(30))[0].token_ids
    llm = make(latent, speculative="mtp")
    engine = llm.engine
    mtp = engine.model_runner.decoder.mtp
    for owner, place in ((mtp._steps[8], "read"), (mtp, "guess")):
        engine.add_request(prompt(70), greedy(30))
        with monkeypatch.context() as patch:

            def interrupted(*given):
                raise KeyboardInterrupt

            patch.setattr(owner, place, interrupted)
            with pytest.raises(KeyboardInterrupt):
                list(iter(engine.step, None))
        assert "interrupted" in engine.step()[-1].error
        out = llm.generate(prompt(70), greedy(30))[0]
        assert out.token_ids == want
        assert out.drafted > 20


def test_steps_go_on_without_it(latent, caplog, monkeypatch):
    want = make(latent).generate(prompt(60), greedy(20))[0]
    llm = make(latent, speculative="mtp")

    def fails(most):
        raise RuntimeError("no guess today")

    monkeypatch.setattr(llm.engine.model_runner.decoder.mtp, "guess", fails)
    assert llm.generate(prompt(60), greedy(20))[0].token_ids == want.token_ids
    assert caplog.text.count("no guess today") in (1, 2)


def test_its_memory_is_planned(tmp_path):
    save_next_token(tmp_path, save_checkpoint(tmp_path, "deepseek-v3", **LARGE).config)
    save_tokenizer(tmp_path)
    settings = {"device": "cpu", "max_model_len": 1500, "prefill_chunk": 256, "slots": 2}
    plain = make(tmp_path, 256, **settings).engine.plan
    llm, _, kept = measure(lambda: make(tmp_path, 256, speculative="mtp", **settings))
    plan = llm.engine.plan
    assert plan.slots == plain.slots * 3 // 2
    assert plan.weights > plain.weights
    _, peak, working = measure(lambda: llm.generate(prompt(1400), greedy(9)))
    assert kept + working == pytest.approx(kept_by(asdict(plan)), abs=2000)
    assert peak <= plan.workspace + 2**15  # and small tensors


def test_modules_of_other_families_are_refused(tmp_path):
    save_checkpoint(tmp_path, "qwen3.5")
    with pytest.raises(ConfigurationError, match="is not supported; use 'lookup' or 'draft-model'"):
        make(tmp_path, speculative="mtp")


def test_what_cannot_be_is_said(latent, tmp_path):
    config = save_checkpoint(tmp_path, "deepseek-v3").config
    save_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.2\.eh_proj\.weight"):
        make(tmp_path, speculative="mtp")
    save_next_token(tmp_path, config)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.2.mlp.experts.3.up_proj.weight"))
    make(tmp_path)
    with pytest.raises(CheckpointError, match=r"missing: model\.layers\.2\.mlp\.experts\.3\.up_proj\.weight"):
        make(tmp_path, speculative="mtp")
    edit_config(tmp_path, num_nextn_predict_layers=0)
    with pytest.raises(ConfigurationError, match="no module for multi-token prediction"):
        make(tmp_path, speculative="mtp")
