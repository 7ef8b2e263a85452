"""What may be asked for and what is refused; vLLM's configuration is imitated by its attribute names."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from snapstream.config import CacheBudget
from snapstream.errors import ConfigurationError, RequestError
from snapstream.integrations.vllm.settings import (
    active_budget,
    check_supported,
    granted_budget,
    request_budget,
    requested_budget,
)

BUDGET = CacheBudget.of(512)


def vllm_config(**changes):
    parts = {
        "model": {
            "runner_type": "generate",
            "is_encoder_decoder": False,
            "is_hybrid": False,
            "is_attention_free": False,
        },
        "cache": {"cache_dtype": "auto"},
        "parallel": {
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "decode_context_parallel_size": 1,
            "use_ubatching": False,
            "worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker",
        },
        "scheduler": {"scheduler_cls": None, "async_scheduling": False},
    }
    whole = {"speculative_config": None, "kv_transfer_config": None}
    for name, value in changes.items():
        part, _, field = name.partition("__")
        if field:
            parts[part][field] = value
        else:
            whole[name] = value
    return SimpleNamespace(**{f"{name}_config": SimpleNamespace(**fields) for name, fields in parts.items()}, **whole)


def test_off_unless_asked_for(monkeypatch):
    monkeypatch.delenv("SNAPSTREAM_BUDGET", raising=False)
    for nothing in (None, {}, {"other": 1}, {"snapstream": None}):
        assert requested_budget(nothing) is None


def test_a_number_or_json_by_either_way(monkeypatch):
    monkeypatch.setenv("SNAPSTREAM_BUDGET", "512")
    assert requested_budget(None) == BUDGET
    assert requested_budget({"snapstream": 512}) == BUDGET  # the same twice is no contradiction
    monkeypatch.setenv("SNAPSTREAM_BUDGET", '{"capacity": 512, "policy": "streaming"}')
    assert requested_budget({}) == CacheBudget.preset("streaming", 512)
    monkeypatch.delenv("SNAPSTREAM_BUDGET")
    assert requested_budget({"snapstream": {"capacity": 512, "window": 8}}).policy.window == 8
    assert active_budget(SimpleNamespace(additional_config={"snapstream": BUDGET.as_dict()})) == BUDGET


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("4k", "neither a number of entries nor a JSON object"),
        ('{"capcity": 4096}', "unknown field capcity; allowed: capacity"),
        ('{"capacity": 4096, "window": 0}', "at least one token must vote"),
        ("3", "too few"),
        ("[1]", "neither a number"),
        ("true", "neither a number"),
    ],
)
def test_bad_values_say_what_to_change(monkeypatch, value, message):
    monkeypatch.setenv("SNAPSTREAM_BUDGET", value)
    with pytest.raises(ConfigurationError, match=message):
        requested_budget(None)


def test_two_different_budgets_are_refused(monkeypatch):
    monkeypatch.setenv("SNAPSTREAM_BUDGET", "512")
    with pytest.raises(ConfigurationError, match="different cache budgets"):
        requested_budget({"snapstream": 1024})


def test_per_request_budgets():
    assert request_budget(BUDGET, None) == request_budget(BUDGET, {"other": 1}) == BUDGET
    assert request_budget(BUDGET, {"kv_budget": 256}) == request_budget(BUDGET, {"kv_budget": "256"})
    for host in (BUDGET, CacheBudget.preset("streaming", 512), CacheBudget(4, 480, 28, window=8)):
        for entries in (16, 36, 64, 256, 512):
            assert request_budget(host, {"kv_budget": entries}) == CacheBudget.of(entries)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (513, "a cache has 512 entries here"),
        (8, "give at least"),
        (-1, "give at least"),
        (True, "whole number"),
        (2.5, "whole number"),
        ("many", "whole number"),
        ("\u00b2", "whole number"),
        ("9" * 5000, "whole number"),
        ([256], "whole number"),
    ],
)
def test_bad_per_request_budgets(asked, message):
    with pytest.raises(RequestError, match=message):
        request_budget(BUDGET, {"kv_budget": asked})
    assert granted_budget(BUDGET, {"kv_budget": asked}) == BUDGET  # past the door, it must hurt nobody


def test_pins_of_requests():
    assert request_budget(BUDGET, {"pin": [[0, 3], "5:9"]}).pin == ((0, 3), (5, 9))
    assert request_budget(BUDGET, {"pin": "5:9", "kv_budget": 96}) == replace(CacheBudget.of(96), pin=["5:9"])
    for pin in ("x", [[3, 3]], 7):
        with pytest.raises(RequestError, match="pin"):
            request_budget(BUDGET, {"pin": pin})
        assert granted_budget(BUDGET, {"pin": pin}) == BUDGET


def test_a_plain_configuration_is_supported():
    check_supported(vllm_config(), BUDGET)
    check_supported(vllm_config(parallel__worker_cls="vllm.v1.worker.gpu_worker.Worker"), BUDGET)
    check_supported(vllm_config(speculative_config=SimpleNamespace(method="ngram")), BUDGET)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"speculative_config": SimpleNamespace(method="mtp")},
            "speculative decoding with mtp; only .* would not be compressed",
        ),
        ({"speculative_config": SimpleNamespace(method="eagle3")}, 'only "method": "ngram" is supported'),
        (
            {"speculative_config": SimpleNamespace(method="ngram"), "scheduler__async_scheduling": True},
            "with --async-scheduling; disable one of them",
        ),
        (
            {"speculative_config": SimpleNamespace(method="ngram"), "parallel__pipeline_parallel_size": 2},
            "speculative decoding with pipeline parallelism",
        ),
        (
            {"speculative_config": SimpleNamespace(method="ngram"), "use_v2_model_runner": True},
            "set VLLM_USE_V2_MODEL_RUNNER=0",
        ),
        (
            {"kv_transfer_config": SimpleNamespace(kv_connector="NixlConnector")},
            "the KV connector NixlConnector; only SnapStreamConnector supports compressed caches",
        ),
        (
            {
                "kv_transfer_config": SimpleNamespace(kv_connector="SnapStreamConnector"),
                "parallel__pipeline_parallel_size": 2,
            },
            "set --pipeline-parallel-size to 1",
        ),
        ({"cache__cache_dtype": "fp8"}, "--kv-cache-dtype fp8, because .*; use auto"),
        ({"model__runner_type": "pooling"}, "runner type 'pooling'"),
        ({"model__is_encoder_decoder": True}, "encoder-decoder"),
        ({"model__is_attention_free": True}, "a model without attention"),
        ({"parallel__decode_context_parallel_size": 2}, "decode context parallelism"),
        ({"parallel__use_ubatching": True}, "microbatches"),
        ({"model__is_diffusion": True}, "diffusion"),
        ({"parallel__worker_cls": "my.Worker"}, "--worker-cls my.Worker"),
        ({"scheduler__scheduler_cls": "my.Scheduler"}, "--scheduler-cls my.Scheduler"),
    ],
)
def test_what_cannot_be_served_is_refused_with_advice(changes, message):
    with pytest.raises(ConfigurationError, match=message):
        check_supported(vllm_config(**changes), BUDGET)


def test_every_obstacle_is_named_at_once():
    with pytest.raises(ConfigurationError, match=r"fp8.*random selection"):
        check_supported(
            vllm_config(cache__cache_dtype="fp8", parallel__tensor_parallel_size=2), CacheBudget.preset("random", 64)
        )
