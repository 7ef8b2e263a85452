import dataclasses

import pytest

from snapstream import CacheBudget, ConfigurationError, EngineConfig, RequestError, SamplingParams
from tests.policies import OWN


@pytest.mark.parametrize("capacity", [16, 17, 33, 64, 128, 1000, 4096, 32768])
@pytest.mark.parametrize("policy", OWN)
def test_presets_have_the_asked_capacity(policy, capacity):
    budget = CacheBudget.preset(policy, capacity)
    assert budget.capacity == capacity
    assert budget.window <= max(1, capacity // 4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"policy": "spans", "voters": 0}, "at least one token must vote"),
        ({"policy": "spans", "span": 4}, "span is 4; use an odd number"),
        ({"policy": "spans", "shift": -1}, "shift is -1"),
        ({"policy": "spans", "key_turns": -1}, "key_turns is -1"),
        ({"window": 0}, "at least one token must vote"),
        ({"kernel": 4}, "odd number"),
        ({"pooling": "median"}, "allowed: avg, max"),
        ({"normalize": "none"}, "allowed: all, candidates"),
        ({"ring": "round"}, "allowed: elastic, paper"),
        ({"sink": -1}, "sink is -1"),
        ({"top_k": 2.5}, "whole number"),
        ({"recent": True}, "whole number"),
        ({"sink": 0, "top_k": 0, "recent": 8, "window": 8}, "at least 16"),
    ],
)
def test_bad_budget_says_what_to_change(change, message):
    good = {"sink": 4, "recent": 64, "top_k": 60, "window": 32}
    with pytest.raises(ConfigurationError, match=message):
        CacheBudget(**(good | change))


def test_budget_parse():
    assert CacheBudget.parse(128) == CacheBudget.of(128)
    assert CacheBudget.parse("128") == CacheBudget.of(128)
    assert CacheBudget.parse('{"capacity": 128, "policy": "streaming"}') == CacheBudget.preset("streaming", 128)
    budget = CacheBudget.parse({"capacity": 128, "kernel": 5})
    assert budget == dataclasses.replace(CacheBudget.of(128), kernel=5)
    assert CacheBudget.parse(budget.as_dict()) == budget
    assert CacheBudget.parse({"capacity": 64, "sink": 8}).capacity == 64
    assert CacheBudget.parse({"capacity": 64, "recent": 60}).top_k == 0
    streaming = CacheBudget.parse({"capacity": 64, "policy": "streaming", "sink": 8})
    assert (streaming.sink, streaming.recent, streaming.top_k) == (8, 56, 0)
    for bad, message in [
        ({"capacity": 64, "recent": 40, "top_k": 4}, "are 48 entries, but capacity is 64"),
        ({"capacity": 64, "recent": "many"}, "recent is 'many'; it must be a whole number"),
        ("many", "neither a number"),
        ('{"capcity": 3}', "unknown field capcity"),
        ('{"sink": 3}', "recent, top_k missing"),
        ("[1]", "neither a number"),
        ("1" * 5000, "neither a number"),
        ("[" * 100_000, "neither a number"),
        (True, "neither a number"),
        (8, "at least 16"),
        ({"capacity": 64, "policy": "best"}, "unknown policy"),
    ]:
        with pytest.raises(ConfigurationError, match=message):
            CacheBudget.parse(bad)


@pytest.mark.parametrize("policy", OWN)
def test_resized_keeps_the_policy(policy):
    budget = CacheBudget.preset(policy, 256)
    for capacity in range(64, 257):
        small = budget.resized(capacity)
        assert small.capacity == capacity
        assert (small.sink, small.window) == (budget.sink, budget.window)
        assert small.top_k <= budget.top_k  # so the engine's graph, made for budget, can hold it
        assert (small.top_k == 0) == (budget.top_k == 0)
    with pytest.raises(ConfigurationError, match="at least"):
        budget.resized(15)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("min_tokens", -1),
        ("min_tokens", 129),
        ("prompt_logprobs", -1),
        ("max_tokens", 1.5),
        ("temperature", -1),
        ("temperature", float("nan")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("top_k", -1),
        ("seed", "one"),
        ("logprobs", -1),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
        ("repetition_penalty", 0),
        ("presence_penalty", 3),
        ("kv_budget", 1.5),
        ("temperature", "hot"),
        ("logit_bias", {3: 101}),
        ("logit_bias", {3: float("nan")}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {"3": 1}),
        ("logit_bias", [3]),
        ("top_p", None),
        ("stop", 5),
        ("stop_token_ids", 5),
    ],
)
def test_bad_sampling_is_named(field, value):
    with pytest.raises(RequestError, match=field):
        SamplingParams(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [("slots", 0), ("prefill_chunk", 0), ("dtype", "int8"), ("max_model_len", 3), ("memory_fraction", 0)],
)
def test_bad_engine_setting_is_named(field, value):
    with pytest.raises(ConfigurationError, match=field):
        EngineConfig(**{field: value})
