"""What the accuracy lab asks of the engine: forced tokens, a policy per request, one reading for many, kept tokens."""

import math

import pytest
import torch

from snapstream import CacheBudget, RequestError, SamplingParams
from tests.checkpoints import prompt
from tests.engine.test_engine import BUDGET, greedy, make, naive_generate
from tests.readings import record_readings

FORCED = tuple(prompt(40, seed=9))
OTHERS = [
    CacheBudget.preset("streaming", 40),
    CacheBudget.preset("sage-kv", 48),
    CacheBudget.preset("random", 48),
    CacheBudget(sink=2, recent=12, top_k=30, window=5, pooling="max", kernel=3, normalize="candidates"),
    CacheBudget(sink=4, recent=8, top_k=20, window=8, kernel=1, ring="paper"),
]


@pytest.mark.parametrize("forced", [FORCED[:1], FORCED[:2], FORCED])
@pytest.mark.parametrize("length", [20, 150])
def test_forced_tokens_go_through_the_compressed_cache(checkpoint, forced, length):
    """Forty of them wrap the ring; next to a request that is free, and with sampling graph and greedy graph."""
    steps = len(forced) + 12
    want = naive_generate(checkpoint, prompt(length), BUDGET, steps, forced)
    free = naive_generate(checkpoint, prompt(99), BUDGET, 60)
    for extra in ({}, {"logprobs": 2}):
        made = make(checkpoint).generate(
            [prompt(length), prompt(99)], [greedy(steps, forced=forced, **extra), greedy(60)]
        )
        assert made[0].token_ids == want
        assert made[0].token_ids[: len(forced)] == forced
        assert made[1].token_ids == free


def test_forced_tokens_have_the_models_log_probabilities(checkpoint):
    """With a full cache, those of the same tokens in a prompt."""
    from transformers import AutoModelForCausalLM

    tokens, budget = prompt(60), CacheBudget.preset("full", 256)
    out = make(checkpoint, budget).generate(tokens, greedy(len(FORCED), forced=FORCED, logprobs=1))[0]
    peer = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)
    with torch.no_grad():
        logits = peer(torch.tensor([[*tokens, *FORCED]])).logits[0, len(tokens) - 1 : -1]
    want = logits.log_softmax(-1)[torch.arange(len(FORCED)), list(FORCED)]
    assert [entry.token_id for entry in out.logprobs] == list(FORCED)
    torch.testing.assert_close(torch.tensor([e.logprob for e in out.logprobs]).double(), want, atol=1e-4, rtol=0)
    assert [next(iter(entry.top)) for entry in out.logprobs] == logits.argmax(-1).tolist()


def test_nothing_forced_ends_the_output(checkpoint):
    """Neither the end token nor a stop string, until the model is free; then both do."""
    end = 2
    forced = (5, end, 7, end)
    out = make(checkpoint).generate(prompt(50), SamplingParams(max_tokens=20, forced=forced, stop="w7"))[0]
    assert out.token_ids[:4] == forced
    assert len(out.token_ids) > 4
    assert out.text.startswith("w5w7")
    free = make(checkpoint).generate(prompt(50), greedy(20, forced=forced))[0]
    words = [f"w{token}" for token in free.token_ids]
    at = next(i for i in range(5, 20) if free.token_ids[i] > 2 and words[i] not in "".join(words[:i]))
    word = words[at]
    cut = make(checkpoint).generate(prompt(50), greedy(20, forced=forced, stop=word))[0]
    assert (cut.finish_reason, cut.text) == ("stop", free.text[: free.text.index(word)])
    kept = make(checkpoint).generate(prompt(50), greedy(20, forced=free.token_ids[: at + 1], stop=word))[0]
    assert kept.text.startswith(free.text[: free.text.index(word)] + word)  # the same word, forced, ends nothing
    ended = SamplingParams(max_tokens=20, forced=forced, stop_token_ids=(free.token_ids[at],), ignore_eos=True)
    assert make(checkpoint).generate(prompt(50), ended)[0].token_ids == free.token_ids[: at + 1]


@pytest.mark.parametrize("budget", OTHERS, ids=lambda b: f"{b.policy}-{b.capacity}")
def test_a_request_with_a_policy_of_its_own(checkpoint, budget):
    """The same as an engine with that policy, next to requests with others."""
    want = make(checkpoint, budget).generate(prompt(140), greedy(50))[0]
    got = make(checkpoint).generate(
        [prompt(140), prompt(140), prompt(90)], [greedy(50), greedy(50, kv_budget=budget), greedy(50)]
    )
    assert got[1].token_ids == want.token_ids
    assert got[1].cache == want.cache
    assert got[0].token_ids == naive_generate(checkpoint, prompt(140), BUDGET, 50)


def test_equal_prompts_are_read_once(checkpoint, monkeypatch):
    """Five budgets and three slots, one prefill; wherever in the queue they are."""
    llm = make(checkpoint)
    read = record_readings(llm.engine, monkeypatch)
    params = [greedy(20, kv_budget=budget) for budget in OTHERS]
    got = llm.generate([prompt(140)] * 5, params)
    assert read == [prompt(140)]
    assert [o.token_ids for o in got] == [make(checkpoint).generate(prompt(140), p)[0].token_ids for p in params]
    read.clear()
    llm.generate([prompt(140), prompt(30, seed=5), prompt(140), prompt(139)], greedy(3))
    assert sorted(read) == sorted([prompt(140), prompt(30, seed=5), prompt(139)])


def test_a_prompt_that_was_aborted_is_read_again(checkpoint):
    llm = make(checkpoint)
    want = llm.generate(prompt(140), greedy(20))[0].token_ids
    name = llm.engine.add_request(prompt(120, seed=3), greedy(20))
    llm.engine.step()  # one chunk of another prompt now lies over the first
    llm.engine.abort(name)
    assert llm.generate(prompt(140), greedy(20))[0].token_ids == want


@pytest.mark.parametrize("budget", [BUDGET, *OTHERS], ids=lambda b: f"{b.policy}-{b.capacity}")
@pytest.mark.parametrize("length", [30, 140])
def test_kept_tokens_are_returned(checkpoint, budget, length):
    llm = make(checkpoint)
    out = llm.generate(prompt(length), greedy(4, kv_budget=budget, return_kept_tokens=True))[0]
    assert llm.generate(prompt(length), greedy(4, kv_budget=budget))[0].cache.kept is None
    kept = out.cache.kept
    if budget.policy.name == "random":
        shared = CacheBudget.preset("random", 48)
        assert kept.positions[0][0] != kept.positions[0][1] or out.cache.dropped == 0
        assert all(len(set(head)) == min(length, shared.capacity) for layer in kept.positions for head in layer)
        assert all(0 < mass <= 1 for mass in kept.mass)
        return
    seen = {}
    naive_generate(checkpoint, prompt(length), budget, 1, seen=seen)
    layers, heads = len(kept.positions), len(kept.positions[0])
    for layer in range(layers):
        shares = []
        for head in range(heads):
            queries, keys, positions = seen[layer, head]
            assert list(kept.positions[layer][head]) == sorted(positions)
            for query in queries.double():
                for voter in range(max(length - 32, 0), length):
                    logits = keys[: voter + 1].double() @ query[voter] / math.sqrt(keys.shape[1])
                    weights = logits.softmax(-1)
                    shares.append(sum(float(weights[p]) for p in positions if p <= voter))
        assert kept.mass[layer] == pytest.approx(sum(shares) / len(shares), abs=1e-5)
        if out.cache.dropped == 0:
            assert kept.mass[layer] == pytest.approx(1.0)


def test_what_cannot_be_served_is_refused(checkpoint):
    llm = make(checkpoint)
    for params, message in [
        ({"forced": (1, -4)}, "forced"),
        ({"forced": (1, 2, 3), "max_tokens": 2}, "3 forced tokens are more than max_tokens"),
        ({"forced": (10**6,)}, "vocabulary"),
        ({"forced": FORCED * 10, "max_tokens": 500}, "max_model_len"),
        ({"kv_budget": CacheBudget.preset("streaming", 64)}, "a cache has 48 entries here"),
        ({"kv_budget": CacheBudget(sink=0, recent=40, top_k=8, window=65)}, "window is 65, but 64 queries are kept"),
        ({"kv_budget": "48"}, "kv_budget"),
    ]:
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt(40), SamplingParams(**params))
    assert not llm.engine.busy
