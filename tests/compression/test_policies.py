"""One matrix of cases for all policies, those of other packages included, on the hosts that need no server.

The plugin's part of it is in tests/integrations/vllm/test_policies.py.
"""

import importlib.metadata
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from snapstream import CacheBudget, ConfigurationError, RequestError
from snapstream.compression import choose_entries, lay_out, layout_tensors
from snapstream.compression.ranks import take_in_turn
from snapstream.config import EngineConfig, LayerPrompt, Policy, make_policy, policy_names
from snapstream.config import policy as registry
from snapstream.config.policy import ALL
from snapstream.integrations.transformers import SnapStreamCache
from tests.checkpoints import prompt
from tests.engine.test_engine import greedy, make, naive_generate
from tests.integrations.test_transformers import generate
from tests.policies import OWN, LargeValues, SpreadVotes
from tests.reference import naive_compress

OTHERS = ["spread", "large-values"]


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """As if another package were installed that has entry points."""
    points = [
        importlib.metadata.EntryPoint(name, f"tests.policies:{attribute}", registry.ENTRY_POINTS)
        for name, attribute in [
            ("spread", "SpreadVotes"),
            ("large-values", "LargeValues"),
            ("wrong", "NotAPolicy"),
            ("missing", "Nothing"),
        ]
    ]
    monkeypatch.setattr(registry, "entry_points", lambda group: points if group == registry.ENTRY_POINTS else [])


def layer(length, padded, seed=0, H=4, N=2, D=8, queries=None):
    generator = torch.Generator().manual_seed(seed)
    rows = length if queries is None else min(queries, length)
    return {
        "queries": torch.randn(1, H, rows, D, generator=generator),
        "keys": torch.randn(1, N, padded, D, generator=generator),
        "values": torch.randn(1, N, padded, D, generator=generator),
    }


def choose(parts, layouts, budget):
    """What is kept of one layer of these prompts, ``[B, N, C]``."""
    return choose_entries(LayerPrompt(**parts, layout=layout_tensors(layouts), sink=budget.sink, scale=8**-0.5), budget)


def assert_each_once(chosen, entries, length):
    """So many entries of each head are tokens of the prompt, no two of them the same."""
    for positions in chosen[0, :, :entries]:
        assert positions.min() >= 0
        assert positions.max() < length
        assert len(positions.unique()) == entries


@pytest.mark.parametrize("name", OWN + OTHERS)
@pytest.mark.parametrize("length", [1, 5, 47, 48, 49, 150])
def test_what_every_policy_keeps(name, length):
    """Sinks, recent tokens, as many as fit, each once and in order; the same whatever the padding says."""
    budget = CacheBudget.preset(name, 48)
    layout = lay_out(length, budget)
    kept = []
    for padded in (length, length + 30):
        shown = layer(length, length + 30)
        cut = {part: tensor[:, :, :padded] for part, tensor in shown.items()} | {"queries": shown["queries"]}
        kept.append(choose(cut, [layout], budget))
    assert torch.equal(*kept)
    for head in kept[0][0]:
        positions = head[: layout.count].tolist()
        assert len(positions) == len(set(positions)) == min(length, 48)
        assert positions[: min(4, length)] == list(range(min(4, length)))
        pinned, ring = positions[4 : layout.base], positions[layout.base :]
        assert (pinned, ring) == (sorted(pinned), sorted(ring))
        recent = min(budget.recent, length)
        assert set(positions) >= set(range(length - recent, length))
        if budget.policy.pins_recent and length > layout.base:  # what is pinned of them leaves room for older ones
            assert ring == [p for p in range(length) if p not in pinned][-len(ring) :]
        else:
            assert positions == sorted(positions)
            assert positions[-recent:] == list(range(length - recent, length))
        assert head[layout.count :].eq(-1).all()


@pytest.mark.parametrize("name", OWN + OTHERS)
def test_votes_of_a_batch_are_those_of_each(name):
    budget = CacheBudget.preset(name, 48)
    lengths = [150, 90, 47, 33]  # the last two fit
    both = [layer(n, 150, seed=n, queries=32 if budget.policy.queries != ALL else 150) for n in lengths]
    if budget.policy.queries == ALL:  # rows before the first token mean nothing
        for one, n in zip(both, lengths, strict=True):
            one["queries"] = torch.cat((torch.full((1, 4, 150 - n, 8), 9.0), one["queries"][:, :, :n]), 2)
    layouts = [lay_out(n, budget) for n in lengths]
    together = choose({part: torch.cat([one[part] for one in both]) for part in both[0]}, layouts, budget)
    for row, (one, layout) in enumerate(zip(both, layouts, strict=True)):
        assert torch.equal(together[row : row + 1], choose(one, [layout], budget))
        if not layout.selects:
            assert together[row, :, : layout.count].eq(torch.arange(layout.count)).all()


@settings(deadline=None, max_examples=80)
@given(
    st.sampled_from(["keydiff", "local-keydiff", "multiscale-keydiff", "mixed", "spans"]),
    st.integers(1, 120),
    st.integers(0, 20),
    st.sampled_from([(1, 1), (4, 2), (3, 1)]),
    st.sampled_from([16, 31, 48]),
    st.sampled_from(["elastic", "paper"]),
    st.integers(0, 60),
    st.integers(0, 99),
)
def test_choices_equal_the_oracle(name, length, padding, heads, capacity, ring, first_voter, seed):
    """In float64, from lists; what is padding holds NaN."""
    H, N = heads
    budget = replace(CacheBudget.preset(name, capacity), ring=ring, normalize=("all", "candidates")[seed // 2 % 2])
    if seed % 2:  # more voters than recent tokens, or than the cache has entries
        span, shift = (63, 3, 1)[seed % 3], (None, 16, 0)[seed // 3 % 3]
        budget = replace(budget, span=span, shift=shift, voters=64, key_turns=seed % 3)
    parts = layer(length, length + padding, seed, H=H, N=N)
    parts["keys"][:, :, length:] = float("nan")
    layout = lay_out(length, budget, min(first_voter, length - 1))
    shown = LayerPrompt(**parts, layout=layout_tensors([layout]), sink=budget.sink, scale=8**-0.5)
    window = length - budget.window
    rows = parts["queries"] if window >= 0 else torch.nn.functional.pad(parts["queries"], (0, 0, -window, 0))
    chosen = choose_entries(replace(shown, queries=rows[:, :, -budget.window :]), budget)[0]
    for n in range(N):
        keys, group = parts["keys"][0, n, :length], parts["queries"][0, n * H // N : (n + 1) * H // N]
        want = naive_compress(group, keys, budget, first_voter=layout.first_voter).tokens()
        assert chosen[n, : layout.count].tolist() == want


def test_a_token_has_the_best_of_its_ranks():
    layout = layout_tensors([lay_out(7, CacheBudget(sink=1, recent=8, top_k=10, window=4))])
    layout = replace(layout, candidate_end=torch.tensor([6]))
    one = torch.tensor([[[99.0, 5, 4, 3, 2, 1, 99]]])
    other = torch.tensor([[[99.0, 0, 0, 7, 0, 9, 99]]])
    for most, want in ((7, [0, 1, 1, 3, 0]), (2, [0, 1, 1, 2, 0]), (9, [0, 1, 1, 3, 0])):
        ranks = 1 / take_in_turn([one, other], layout, sink=1, most=most) - 1
        assert ranks[0, 0, 1:6].round().tolist() == want


@pytest.mark.parametrize("name", [*OWN[:-1], *OTHERS])
@pytest.mark.parametrize("length", [30, 140])
def test_on_the_engine(checkpoint, name, length):
    """Equal to lists in float64: as the engine's own policy, and as that of one request next to others."""
    budget = CacheBudget.preset(name, 48)
    want = naive_generate(checkpoint, prompt(length), budget, 40)
    assert make(checkpoint, budget).generate(prompt(length), greedy(40))[0].token_ids == want
    keeps = ALL if budget.policy.queries == ALL else 32
    shared = make(checkpoint, CacheBudget.preset("full", 256), kept_queries=keeps)
    answers = shared.generate([prompt(length)] * 2, [greedy(40), greedy(40, kv_budget=budget)])
    assert answers[1].token_ids == want


@pytest.mark.parametrize("name", OWN + OTHERS)
@pytest.mark.parametrize("length", [30, 140])
def test_on_transformers(checkpoint, name, length):
    model = AutoModelForCausalLM.from_pretrained(checkpoint, attn_implementation="snapstream", dtype=torch.float32)
    budget = CacheBudget.preset(name, 48)
    expected = make(checkpoint, budget).generate(prompt(length), greedy(40))[0].token_ids
    assert generate(model, [prompt(length)], SnapStreamCache(model.config, budget), 40) == [list(expected)]
    # In a batch with padding, and in chunks.
    pair = generate(model, [prompt(length), prompt(90, 5)], SnapStreamCache(model.config, budget), 40)
    assert pair[0] == list(expected)
    cache = SnapStreamCache(model.config, budget, chunked_prefill=True)
    assert generate(model, [prompt(length)], cache, 40, prefill_chunk_size=33) == [list(expected)]


@pytest.mark.parametrize("name", OWN + OTHERS)
def test_names_numbers_and_json(name):
    budget = CacheBudget.preset(name, 128)
    assert budget.capacity == 128
    assert CacheBudget.parse({"capacity": 128, "policy": name}) == budget
    assert CacheBudget.parse(budget.as_dict()) == budget
    assert CacheBudget(budget.sink, budget.recent, budget.top_k, policy=name).policy == make_policy(name, {})
    assert name in policy_names()
    with pytest.raises(FrozenInstanceError):
        budget.policy.name_of_nothing = 1
    with pytest.raises(ConfigurationError, match="unknown field colour"):
        CacheBudget.parse({"capacity": 128, "policy": name, "colour": 3})
    with pytest.raises(ConfigurationError, match="has no colour"):
        make_policy(name, {"colour": 3})


def test_settings_of_a_policy_of_others():
    assert CacheBudget.parse({"capacity": 64, "policy": "spread", "every": 4}).policy == SpreadVotes(every=4)
    assert CacheBudget(4, 30, 30, policy=LargeValues()).as_dict()["policy"] == "large-values"


def test_what_follows_a_name_is_kept_whole():
    """A query 40 tokens before the end looks for the token at 2,000; an id of 40 tokens follows that one."""
    keys, queries = torch.zeros(1, 1, 3000, 8), torch.zeros(1, 1, 3000, 8)
    keys[0, 0, 2000, 0] = queries[0, 0, 2960, 0] = 20.0
    parts, wanted = {"queries": queries, "keys": keys, "values": keys}, set(range(1990, 2041))
    kept = {}
    for name in ("spans", "mixed", "snapstream"):
        budget = CacheBudget.preset(name, 1024)
        kept[name] = set(choose(parts, [lay_out(3000, budget)], budget)[0, 0].tolist())
    assert kept["spans"] >= wanted
    assert not kept["mixed"] >= wanted
    assert not kept["snapstream"] >= wanted


@pytest.mark.parametrize("voter", [2985, 2995])
def test_what_the_question_attends_to_is_pinned_even_if_it_is_recent(voter):
    """One of many voters looks for the token at 2,970, which the ring would evict as one of the first."""
    keys, queries = torch.zeros(1, 1, 3000, 8), torch.zeros(1, 1, 3000, 8)
    keys[0, 0, 2970, 0] = queries[0, 0, voter, 0] = 20.0
    parts, pinned = {"queries": queries, "keys": keys, "values": keys}, {}
    for name in ("spans", "snapstream"):
        budget = CacheBudget.preset(name, 256)
        layout = lay_out(3000, budget)
        chosen = choose(parts, [layout], budget)[0, 0]
        assert 2970 in chosen.tolist()
        pinned[name] = 2970 in chosen[: layout.base].tolist()
    assert pinned == {"spans": True, "snapstream": False}


def test_what_is_no_policy_is_refused():
    for name, message in [
        ("nobody's", 'unknown policy "nobody\'s"; allowed: full, streaming'),
        ("wrong", "no subclass of"),
        ("missing", "could not be loaded"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            CacheBudget.preset(name, 64)


def test_budgets_written_for_earlier_versions_are_read():
    settings = {"window": 8, "pooling": "max", "kernel": 5, "normalize": "candidates"}
    old = CacheBudget(4, 24, 20, **settings, ring="paper", selection="votes", seed=3)
    assert (old.ring, old.policy) == ("paper", make_policy("spans", settings))
    assert CacheBudget(4, 24, 20, window=8, selection="random", seed=3).policy == make_policy("random", {"seed": 3})
    small = {"window": 1, "span": 15, "voters": 16}
    assert replace(CacheBudget.of(64), window=1).policy == make_policy("spans", small)
    assert replace(CacheBudget.preset("mixed", 64), window=1).policy == make_policy("mixed", {"window": 1})
    assert replace(CacheBudget.preset("snapstream", 64), window=1).policy == make_policy("snapstream", {"window": 1})
    for name in ("spans", "mixed", "snapstream", "sage-kv", "keydiff", "local-keydiff", "multiscale-keydiff", "spread"):
        assert replace(CacheBudget.preset(name, 64), selection="random").policy == make_policy("random", {})
    assert replace(CacheBudget.preset("streaming", 64), selection="random").policy == make_policy("streaming", {})
    assert replace(CacheBudget.preset("random", 128), selection="votes").policy == make_policy("spans", {})
    assert CacheBudget.parse({"capacity": 64, "policy": "snapstream", "selection": "random"}).policy.name == "random"
    assert CacheBudget(**CacheBudget.of(64).as_dict()) == CacheBudget.of(64)
    text = '{"sink": 4, "recent": 30, "top_k": 30, "window": 8, "selection": "random"}'
    assert CacheBudget.parse(text).policy.name == "random"
    assert CacheBudget.parse({"capacity": 64, "policy": "random", "seed": 7}).policy.seed == 7


def test_settings_that_no_policy_has_are_refused():
    for policy in ("spans", CacheBudget.of(64).policy):
        with pytest.raises(ConfigurationError, match=r"no windows|unknown setting windows"):
            CacheBudget(4, 24, 20, policy=policy, windows=3)
    assert CacheBudget(4, 24, 20, windows=None) == CacheBudget(4, 24, 20)


def test_a_request_for_more_queries_than_are_kept_is_refused(checkpoint):
    llm = make(checkpoint, CacheBudget.of(64))
    for budget, message in [
        (CacheBudget(4, 40, 10, window=65), "its window is 65, but 64 queries are kept here"),
        (CacheBudget.preset("spread", 48), "its policy needs all queries, but 64 queries are kept"),
    ]:
        with pytest.raises(RequestError, match=message):
            llm.generate(prompt(100), greedy(3, kv_budget=budget))
    with pytest.raises(ConfigurationError, match="kept_queries"):
        EngineConfig(kept_queries=-2)


def test_a_policy_that_fails_ends_its_own_request(checkpoint):
    class Failing(LargeValues):
        def votes(self, prompt):
            raise ArithmeticError("somebody else's mistake")

    llm = make(checkpoint, CacheBudget.of(64))
    budgets = [None, CacheBudget(4, 24, 20, policy=Failing()), CacheBudget.of(48)]
    want = [llm.generate(prompt(140), greedy(9, kv_budget=b))[0].token_ids for b in (budgets[0], budgets[2])]
    answers = llm.generate([prompt(140)] * 3, [greedy(9, kv_budget=budget) for budget in budgets])
    assert [a.finish_reason for a in answers] == ["length", "error", "length"]
    assert answers[1].error == "ArithmeticError: somebody else's mistake"
    assert [answers[0].token_ids, answers[2].token_ids] == want


def test_policies_are_plain_data():
    for name in OWN:
        policy = make_policy(name, {})
        assert isinstance(policy, Policy)
        assert policy == make_policy(name, policy.settings())
        assert hash(policy) == hash(make_policy(name, {}))


def test_votes_that_are_none_are_refused_and_negative_zeros_are_zeros(checkpoint):
    class Wrong(LargeValues):
        def votes(self, prompt):
            return prompt.values.double().norm(dim=-1)

    class WrongScores(LargeValues):
        def smooth(self, votes, prompt):
            return votes.double()

    class NegativeZeros(LargeValues):
        def votes(self, prompt):
            return -torch.zeros(prompt.keys.shape[:3])

    llm = make(checkpoint, CacheBudget.of(64))
    answer = llm.generate(prompt(140), greedy(3, kv_budget=CacheBudget(4, 24, 20, policy=Wrong())))[0]
    assert answer.finish_reason == "error"
    assert "of torch.float64; expected (1, 2, 140) of torch.float32" in answer.error
    answer = llm.generate(prompt(140), greedy(3, kv_budget=CacheBudget(4, 24, 20, policy=WrongScores())))[0]
    assert "returned scores (1, 2, 140) of torch.float64" in answer.error
    budget = CacheBudget(4, 24, 20, policy=NegativeZeros())
    kept = llm.generate(prompt(140), greedy(3, kv_budget=budget, return_kept_tokens=True))[0].cache.kept
    assert kept.positions[0][0] == (*range(24), *range(116, 140))  # all alike: the first ones, each once


@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf"), -1.0, -0.5])
@pytest.mark.parametrize("share", [0.5, 1.0])
@pytest.mark.parametrize("smooths", [False, True])
def test_votes_that_are_no_numbers_choose_each_entry_once(value, share, smooths):
    """A prompt whose attention is not finite, or a policy that breaks its word, must not leave entries empty."""

    def broken(votes):
        return torch.where(votes >= votes.quantile(1 - share), value, votes)

    class Broken(LargeValues):
        def votes(self, prompt):
            votes = prompt.values.norm(dim=-1)
            return votes if smooths else broken(votes)

        def smooth(self, votes, prompt):
            return broken(votes) if smooths else votes

    budget = CacheBudget(4, 24, 20, policy=Broken())
    for parts in (layer(150, 160), {part: rows * float("nan") for part, rows in layer(150, 160).items()}):
        assert_each_once(choose(parts, [lay_out(150, budget)], budget), 48, 150)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_prompts_that_are_not_finite_choose_each_entry_once(name, value):
    budget = CacheBudget.preset(name, 200 if name == "full" else 48)
    parts = {part: torch.full_like(rows, value) for part, rows in layer(150, 160).items()}
    assert_each_once(choose(parts, [lay_out(150, budget)], budget), min(150, budget.capacity), 150)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_type_of_the_caller_changes_nothing(name, dtype):
    budget = CacheBudget.preset(name, 48)
    parts, layouts = layer(150, 160), [lay_out(150, budget)]
    expected = choose(parts, layouts, budget)
    torch.set_default_dtype(dtype)
    try:
        assert torch.equal(choose(parts, layouts, budget), expected)
    finally:
        torch.set_default_dtype(torch.float32)


def test_a_block_that_is_longer_than_the_text_is_all_of_it():
    budgets = [replace(CacheBudget.of(48), near=near) for near in (160, 10**6, 2**63 - 1, 10**30)]
    choices = [choose(layer(150, 160), [lay_out(150, budget)], budget) for budget in budgets]
    for chosen in choices[1:]:
        assert torch.equal(chosen, choices[0])


def test_small_caches_have_fewer_voters():
    sizes = (32, 64, 213, 256, 425, 640, 8192)
    assert [CacheBudget.of(size).policy.voters for size in sizes] == [8, 16, 16, 16, 37, 64, 64]
    assert CacheBudget.parse({"capacity": 213, "policy": "spans", "voters": 53}).policy.voters == 53
