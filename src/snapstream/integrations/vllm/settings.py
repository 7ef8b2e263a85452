"""The plugin's settings, and the configurations it rejects. It uses vLLM's configuration only by attribute names."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from snapstream.config import CacheBudget
from snapstream.config.pins import read_spans
from snapstream.config.policy import ALL
from snapstream.errors import ConfigurationError, RequestError

ENVIRONMENT = "SNAPSTREAM_BUDGET"
KEY = "snapstream"
REQUEST_KEY, PIN_KEY = "kv_budget", "pin"
TRANSFER_KEY = "kv_transfer_params"
CONNECTOR = "SnapStreamConnector"

_WORKERS = {
    "vllm.v1.worker.cpu_worker.CPUWorker",
    "vllm.v1.worker.gpu_worker.Worker",
}


def requested_budget(additional_config: Any) -> CacheBudget | None:
    """The server's budget, or ``None`` if the plugin is not enabled.

    Args:
        additional_config: vLLM's ``--additional-config``; its key ``snapstream`` holds a number of entries or the
            fields of a :class:`~snapstream.config.CacheBudget`. The environment variable ``SNAPSTREAM_BUDGET`` may
            hold the same, as a number or JSON.

    Raises:
        ConfigurationError: The budget is invalid, or two different ones are given.
    """
    given = {}
    if text := os.environ.get(ENVIRONMENT):
        given[ENVIRONMENT] = CacheBudget.parse(text)
    if (carried := _carried_budget(additional_config)) is not None:
        given[f"--additional-config {KEY}"] = carried
    if len(set(given.values())) > 1:
        raise ConfigurationError(
            f"{ENVIRONMENT} and --additional-config set different cache budgets; remove one of them"
        )
    budget = next(iter(given.values()), None)
    if budget is not None:
        budget.require_fixed_places("vLLM")
    return budget


def active_budget(vllm_config: Any) -> CacheBudget | None:
    """The budget that :mod:`~snapstream.integrations.vllm.plugin` wrote into a checked configuration."""
    return _carried_budget(vllm_config.additional_config)


def _carried_budget(additional_config: Any) -> CacheBudget | None:
    if not isinstance(additional_config, Mapping) or additional_config.get(KEY) is None:
        return None
    return CacheBudget.parse(additional_config[KEY])


def request_budget(budget: CacheBudget, extra_args: Mapping[str, Any] | None) -> CacheBudget:
    """The budget of one request: ``kv_budget`` and ``pin`` in its ``extra_args``, or the server's budget.

    Raises:
        RequestError: ``kv_budget`` is not a number of entries, larger than the server's budget, or too small for the
            policy; or ``pin`` is not a list of spans.
    """
    given = extra_args or {}
    asked, pin = given.get(REQUEST_KEY), given.get(PIN_KEY)
    if isinstance(asked, str) and asked.isascii() and asked.isdigit() and len(asked) < 10:
        asked = int(asked)
    granted = budget.for_request(asked)
    try:
        if pin is not None:
            granted = replace(granted, pin=(*read_spans(pin), *granted.pin))
        granted.require_fixed_places("vLLM")
    except ConfigurationError as error:
        raise RequestError(str(error)) from error
    return granted


def granted_budget(budget: CacheBudget, extra_args: Mapping[str, Any] | None) -> CacheBudget:
    """The budget that a request gets, the same in every process: its own, or the server's if its own is invalid.

    Requests with an invalid budget are rejected when they arrive. If one gets through on another path, it must not stop
    the engine that serves all other requests.
    """
    try:
        return request_budget(budget, extra_args)
    except RequestError:
        return budget


def arriving_tokens(params: Mapping[str, Any] | None) -> int | None:
    """Number of tokens of a prompt whose cache another instance sends; ``None`` if this instance prefills it.

    Args:
        params: ``kv_transfer_params`` of a request. If its cache cannot be fetched, ``do_remote_prefill`` is set to
            false, and the prompt is prefilled here.
    """
    if not params or not params.get("do_remote_prefill"):
        return None
    length = params.get("length")
    return length if isinstance(length, int) and length > 0 else None


def most_drafts(vllm_config: Any) -> int:
    """Maximum number of draft tokens per step and sequence; 0 without speculative decoding."""
    speculative = vllm_config.speculative_config
    return 0 if speculative is None else int(speculative.num_speculative_tokens)


def check_supported(config: Any, budget: CacheBudget) -> None:
    """Reject a configuration of vLLM that the plugin cannot serve correctly.

    Args:
        config: A ``VllmConfig``.
        budget: The server's budget.

    Raises:
        ConfigurationError: The configuration is not supported; the message names every obstacle, and what to change.
    """
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    tensor_parallel, transfer = parallel.tensor_parallel_size, config.kv_transfer_config
    has_fixed = model.is_hybrid or getattr(model, "get_sliding_window", lambda: None)() is not None
    obstacles = [
        (model.runner_type != "generate", f"runner type {model.runner_type!r}; only generation is supported"),
        (model.is_encoder_decoder, "an encoder-decoder model; only decoder-only models are supported"),
        (
            model.is_attention_free,
            "a model without attention, whose state has a fixed size already",
        ),
        *_speculative_obstacles(config),
        (
            transfer is not None and transfer.kv_connector != CONNECTOR,
            f"the KV connector {getattr(transfer, 'kv_connector', None)}; only {CONNECTOR} supports compressed caches",
        ),
        (
            has_fixed and bool(getattr(config.scheduler_config, "disable_hybrid_kv_cache_manager", False)),
            "--disable-hybrid-kv-cache-manager with a model whose layers have sliding windows or states; remove it",
        ),
        (
            model.is_hybrid and config.speculative_config is not None,
            "speculative decoding of a model with states; disable it",
        ),
        (
            transfer is not None and has_fixed,
            "a KV connector with a model whose layers have sliding windows or states, which are not handed out",
        ),
        (
            transfer is not None and parallel.pipeline_parallel_size > 1,
            "a KV connector with pipeline parallelism; set --pipeline-parallel-size to 1",
        ),
        (
            cache.cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
            f"--kv-cache-dtype {cache.cache_dtype}, because tokens are chosen by the keys in vLLM's blocks, and those "
            "would be quantized; use auto",
        ),
        (getattr(cache, "kv_sharing_fast_prefill", False), "--kv-sharing-fast-prefill; remove it"),
        (getattr(cache, "kv_offloading_size", None) is not None, "KV offloading; remove --kv-offloading-size"),
        (parallel.decode_context_parallel_size > 1, "decode context parallelism; set it to 1"),
        (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "prefill context parallelism; set it to 1",
        ),
        (parallel.use_ubatching, "microbatches; remove --enable-dbo and --ubatch-size"),
        (getattr(model, "is_diffusion", False), "a diffusion model; only autoregressive models are supported"),
        (
            budget.policy.name == "random" and tensor_parallel > 1,
            "random selection with tensor parallelism; each rank would select for its own heads only",
        ),
        (
            budget.policy.queries == ALL,
            f"the policy {budget.policy.name}, which needs all queries of a prompt; the plugin keeps only the last",
        ),
        (
            config.scheduler_config.scheduler_cls is not None,
            f"--scheduler-cls {config.scheduler_config.scheduler_cls}; the plugin uses its own scheduler",
        ),
        (
            parallel.worker_cls not in _WORKERS,
            f"--worker-cls {parallel.worker_cls}; the plugin extends {' and '.join(sorted(_WORKERS))}",
        ),
    ]
    found = [text for is_met, text in obstacles if is_met]
    if found:
        raise ConfigurationError("the SnapStream plugin cannot serve this: " + "; ".join(found))


def _speculative_obstacles(config: Any) -> list[tuple[bool, str]]:
    """Obstacles in ``--speculative-config``, each with whether it applies."""
    speculative = config.speculative_config
    if speculative is None:
        return []
    return [
        (
            speculative.method != "ngram",
            f'speculative decoding with {speculative.method}; only "method": "ngram" is supported, because caches of '
            "draft models, MTP and EAGLE would not be compressed",
        ),
        (
            config.parallel_config.pipeline_parallel_size > 1,
            "speculative decoding with pipeline parallelism, which this vLLM's runner cannot start; disable one of "
            "them",
        ),
        (config.scheduler_config.async_scheduling, "speculative decoding with --async-scheduling; disable one of them"),
        (
            getattr(config, "use_v2_model_runner", False),
            "speculative decoding with model runner V2; set VLLM_USE_V2_MODEL_RUNNER=0",
        ),
    ]
