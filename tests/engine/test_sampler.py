import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream import LLM, SamplingParams
from snapstream.compression.scoring import counter_uniform
from snapstream.kernels import sampling as sampler
from snapstream.kernels.sampling import SamplingState, sample
from tests.checkpoints import prompt, save_checkpoint
from tests.engine.test_engine import make


def draw(logits, seeds, **params):
    """Tokens drawn for one row of logits under many seeds."""
    state = SamplingState(len(seeds), logits.numel(), 3, torch.device("cpu"))
    for row, seed in enumerate(seeds):
        state.assign(row, SamplingParams(**params), seed, torch.tensor([0]))
    active = torch.ones(len(seeds), dtype=torch.bool)
    position = torch.full((len(seeds),), 7)
    return sample(logits.expand(len(seeds), -1), state, position, active, -torch.ones_like(position)), state


LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_follow_the_softmax(temperature):
    tokens = draw(LOGITS, range(20_000), temperature=temperature)[0].tokens
    got = torch.bincount(tokens, minlength=6) / 20_000
    want = (LOGITS / temperature).softmax(-1)
    assert (got - want).abs().max() < 4 * math.sqrt(0.25 / 20_000)  # four standard deviations


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        ({"top_k": 1}, {0}),
        ({"top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.9}, {0, 1, 2, 3}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"top_p": 1e-9}, {0}),
        ({"top_k": 3, "top_p": 0.9}, {0, 1, 2}),
    ],
)
def test_truncation(params, allowed):
    tokens = draw(LOGITS, range(3000), temperature=1.0, **params)[0].tokens
    assert set(tokens.tolist()) == allowed


@settings(deadline=None, max_examples=60)
@given(
    vocab=st.sampled_from((50, 1000, 30_000)),
    spread=st.sampled_from((1.0, 4.0, 15.0, 60.0)),
    coarse=st.booleans(),
    seed=st.integers(0, 999),
)
def test_the_likely_tokens_give_the_draws_of_all(vocab, spread, coarse, seed):
    """Also with ties, as logits in bfloat16 have; rows want different things."""
    generator = torch.Generator().manual_seed(seed)
    rows = 8
    logits = torch.randn(rows, vocab, generator=generator) * spread
    logits = logits.bfloat16().float() if coarse else logits
    made = []
    for kind in ("likely", "sorted"):
        state = SamplingState(rows, vocab, 3, torch.device("cpu"))
        for row in range(rows):
            params = SamplingParams(
                temperature=(0.0, 0.3, 1.0, 2.0)[(seed + row) % 4],
                top_k=(0, 1, 40, vocab // 2, 0, 600, 0)[row % 7],
                top_p=(1.0, 0.9, 0.5)[row % 3],
                min_p=(0.0, 0.0, 0.05, 1e-6)[(row + seed) % 4],
                presence_penalty=float(seed % 3 == 0),
                logprobs=2 if seed % 2 else None,
            )
            state.assign(row, params, row, torch.tensor([0]))
        with pytest.MonkeyPatch.context() as patched:
            if kind == "sorted":
                for name in ("_draw_any", "_draw_best"):
                    patched.setattr(
                        sampler, name, lambda scaled, likeliest, limits: sampler._draw(*sampler._sorted(scaled), limits)
                    )
            active, position = torch.ones(rows, dtype=torch.bool), torch.full((rows,), 7)
            steps = [sample(logits, state, position + t, active, -torch.ones_like(position)) for t in range(5)]
        made.append((steps, state.output_counts))
    for one, other in zip(*(steps for steps, _ in made), strict=True):
        assert torch.equal(one.tokens, other.tokens)
        assert torch.equal(one.logprob, other.logprob)
    assert torch.equal(made[0][1], made[1][1])


def test_noise_cannot_lift_a_token_further():
    """The bound on which tokens may be drawn, from the largest uniform number."""
    most = torch.tensor(1 - 2.0**-24, dtype=torch.float32)
    assert -torch.log(-torch.log(most)) < sampler.MOST_NOISE - 0.001
    assert counter_uniform(torch.arange(2000)[:, None], torch.arange(500)).max() <= most


def test_ties_go_to_the_smaller_token():
    assert draw(torch.zeros(5), [1], temperature=0.0)[0].tokens.tolist() == [0]
    assert set(draw(torch.zeros(5), range(200), temperature=1.0, top_k=2)[0].tokens.tolist()) == {0, 1}


def test_bias_is_added_and_does_not_stay():
    likely = {"temperature": 1.0, "logit_bias": {5: 4.0, 0: -100}}
    tokens = draw(LOGITS, range(20_000), **likely)[0].tokens
    got = torch.bincount(tokens, minlength=6) / 20_000
    want = (LOGITS + torch.tensor([-100, 0, 0, 0, 0, 4.0])).softmax(-1)
    assert (got - want).abs().max() < 4 * math.sqrt(0.25 / 20_000)
    assert draw(LOGITS, [1], temperature=0.0, logit_bias={3: 2.5})[0].tokens.tolist() == [3]
    state = SamplingState(1, 6, 3, torch.device("cpu"))
    state.assign(0, SamplingParams(logit_bias={3: 50}), 0, torch.tensor([2]))
    state.assign(0, SamplingParams(), 0, torch.tensor([2]))
    assert not state.bias.any()


def test_penalties():
    logits = torch.tensor([[3.0, 2.9, -1.0, 2.8]])
    state = SamplingState(1, 4, 3, torch.device("cpu"))
    state.assign(0, SamplingParams(presence_penalty=0.15), 0, torch.tensor([2]))
    one, active, none = torch.tensor([0]), torch.tensor([True]), torch.tensor([-1])
    tokens = [int(sample(logits, state, one, active, none).tokens) for _ in range(4)]
    assert tokens == [0, 1, 0, 0]  # 0 penalised once, then 1 as well: 2.85 is the largest of what is left
    state.assign(0, SamplingParams(frequency_penalty=0.15), 0, torch.tensor([2]))
    tokens = [int(sample(logits, state, one, active, none).tokens) for _ in range(4)]
    assert tokens == [0, 1, 0, 3]
    state.assign(0, SamplingParams(repetition_penalty=2.0), 0, torch.tensor([0]))
    assert int(sample(logits, state, one, active, none).tokens) == 1  # token 0 stands in the prompt
    state.assign(0, SamplingParams(repetition_penalty=1.5), 0, torch.tensor([0, 1, 3]))
    assert int(sample(torch.tensor([[-1.0, -2.0, -1.4, -3.0]]), state, one, active, none).tokens) == 2


def test_inactive_slots_are_not_counted():
    state = SamplingState(2, 6, 3, torch.device("cpu"))
    none = torch.full((2,), -1)
    sample(LOGITS.expand(2, -1), state, torch.zeros(2, dtype=torch.int64), torch.tensor([True, False]), none)
    assert state.output_counts.sum(1).tolist() == [1, 0]


def test_logprobs_are_those_of_the_unmodified_distribution():
    out, _ = draw(LOGITS, [3], temperature=0.3, top_k=2, logprobs=3)
    want = LOGITS.log_softmax(-1)
    torch.testing.assert_close(out.logprob[0], want[out.tokens[0]])
    assert out.top_ids[0].tolist() == [0, 1, 2]
    torch.testing.assert_close(out.top_logprobs[0], want[:3])


def test_a_seed_repeats_in_any_company(checkpoint):
    params = SamplingParams(temperature=1.2, top_p=0.95, seed=11, max_tokens=30, ignore_eos=True)
    other = SamplingParams(temperature=0.8, seed=5, max_tokens=40, ignore_eos=True)
    llm = make(checkpoint)
    alone = llm.generate(prompt(80), params)[0].token_ids
    crowd = llm.generate([prompt(30), prompt(80), prompt(90), prompt(80)], [other, params, SamplingParams(), params])
    assert crowd[1].token_ids == crowd[3].token_ids == alone
    reseeded = SamplingParams(temperature=1.2, top_p=0.95, seed=12, max_tokens=30, ignore_eos=True)
    assert llm.generate(prompt(80), reseeded)[0].token_ids != alone
    unseeded = SamplingParams(temperature=1.2, max_tokens=30, ignore_eos=True)
    assert llm.generate(prompt(80), unseeded)[0].token_ids != llm.generate(prompt(80), unseeded)[0].token_ids


def test_greedy_is_the_same_in_both_graphs(checkpoint):
    llm = make(checkpoint)
    plain = llm.generate(prompt(60), SamplingParams(max_tokens=25, ignore_eos=True))[0]
    detailed = llm.generate(prompt(60), SamplingParams(max_tokens=25, ignore_eos=True, logprobs=2))[0]
    assert detailed.token_ids == plain.token_ids
    assert len(detailed.logprobs) == 25
    for token, report in zip(detailed.token_ids, detailed.logprobs, strict=True):
        assert report.token_id == token == next(iter(report.top))
        assert report.logprob == pytest.approx(report.top[token])
        assert len(report.top) == 2


def test_logprobs_equal_transformers(tmp_path):
    from tests.checkpoints import save_checkpoint
    from tests.conftest import save_tokenizer

    peer = save_checkpoint(tmp_path, "qwen2")
    save_tokenizer(tmp_path)
    llm = LLM(str(tmp_path), max_model_len=128, prefill_chunk=32, enforce_eager=True)
    out = llm.generate(prompt(40), SamplingParams(max_tokens=10, ignore_eos=True, logprobs=5))[0]
    with torch.no_grad():
        logits = peer(torch.tensor([prompt(40) + list(out.token_ids)])).logits[0, 39:-1].log_softmax(-1)
    for row, report in zip(logits, out.logprobs, strict=True):
        for token, value in report.top.items():
            assert value == pytest.approx(float(row[token]), abs=2e-3)


def test_log_probabilities_change_no_token(tmp_path):
    """They are computed by torch, step by step; without them, the native loop draws several tokens in a launch."""
    save_checkpoint(tmp_path, "qwen3", head_dim=32)
    llm = make(tmp_path, slots=4, decode_steps=5)
    wanted = [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.5},
        {"temperature": 1.5, "top_k": 20, "frequency_penalty": 0.3, "min_tokens": 4},
        {"temperature": 0.0, "repetition_penalty": 1.4, "logit_bias": {7: 2.0}},
    ]
    prompts = [prompt(40, seed=row) for row in range(len(wanted))]
    drawn = []
    for logprobs in (None, 2):
        params = [SamplingParams(max_tokens=23, seed=row, logprobs=logprobs, **each) for row, each in enumerate(wanted)]
        drawn.append([output.token_ids for output in llm.generate(prompts, params)])
    assert drawn[0] == drawn[1]
    assert len({tuple(each) for each in drawn[0]}) == len(wanted)
