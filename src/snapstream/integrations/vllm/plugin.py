"""The entry point, and the only functions of vLLM that are wrapped.

vLLM calls :func:`register` in every process. It wraps two functions, both of the process that takes requests, and both
do nothing unless a budget is set:

- ``EngineArgs.create_engine_config``: vLLM has no hook that shows a plugin the finished configuration. The wrapper
  reads the budget, rejects unsupported combinations, and selects this package's worker and scheduler. All other
  processes find these, and the budget, in the configuration that they receive.
- ``InputProcessor.process_inputs``: a request with an invalid ``kv_budget`` or ``pin`` must be rejected before it
  reaches the engine, where an error would affect other requests.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from snapstream.config import CacheBudget
from snapstream.config.pins import Span
from snapstream.errors import ConfigurationError, RequestError
from snapstream.integrations.vllm.compatibility import (
    CORE_HOOKS,
    FRONT_HOOKS,
    missing_hook,
    unsupported_version,
)
from snapstream.integrations.vllm.metrics import publish_counters
from snapstream.integrations.vllm.settings import (
    CONNECTOR,
    ENVIRONMENT,
    KEY,
    PIN_KEY,
    REQUEST_KEY,
    TRANSFER_KEY,
    active_budget,
    check_supported,
    request_budget,
    requested_budget,
)
from snapstream.integrations.vllm.tcp import secret
from snapstream.integrations.vllm.transfer import check_transfer, transfer_settings

_WRAPPED = "__snapstream__"
_PACKAGE = "snapstream.integrations.vllm"

logger = logging.getLogger("vllm.snapstream")


def register() -> None:
    """Entry point of the group ``vllm.general_plugins``; safe to call more than once.

    Raises:
        ConfigurationError: ``SNAPSTREAM_BUDGET`` is invalid, or it is set and this vLLM is not supported.
    """
    budget = requested_budget(None)
    obstacle = unsupported_version() or missing_hook(FRONT_HOOKS)
    if obstacle and budget is not None:
        raise ConfigurationError(f"{ENVIRONMENT} is set, but {obstacle}")
    from vllm.engine.arg_utils import EngineArgs

    _wrap(EngineArgs, "create_engine_config", _create_engine_config)
    if obstacle:  # a budget in --additional-config is rejected when the configuration is built
        logger.warning("SnapStream is installed but disabled: %s", obstacle)
        return
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
    from vllm.v1.engine.input_processor import InputProcessor

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, f"{_PACKAGE}.connector", CONNECTOR)
    _wrap(InputProcessor, "process_inputs", _process_inputs)


def _wrap(owner: type, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace ``owner.name`` by ``wrapper(original, self, ...)``, once."""
    original = getattr(owner, name)
    if hasattr(original, _WRAPPED):
        return

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return wrapper(original, self, *args, **kwargs)

    setattr(wrapped, _WRAPPED, True)
    setattr(owner, name, wrapped)


def _create_engine_config(original: Callable[..., Any], arguments: Any, *args: Any, **kwargs: Any) -> Any:
    """Build vLLM's configuration; if a budget is set, check it and select this package's worker and scheduler."""
    budget = requested_budget(arguments.additional_config)
    config = original(arguments, *args, **kwargs)
    if budget is not None:
        if obstacle := unsupported_version() or missing_hook(FRONT_HOOKS | CORE_HOOKS):
            raise ConfigurationError(f"SnapStream cannot work here: {obstacle}")
        check_supported(config, budget)
        if config.kv_transfer_config is not None:
            _check_connector(config)
        _take_over(config, budget)
        publish_counters()
    return config


def _check_connector(config: Any) -> None:
    """Reject invalid settings of the connector before anything is loaded.

    Raises:
        ConfigurationError: The settings are invalid.
    """
    if transfer_settings(config).directory is None:
        secret()


def _take_over(config: Any, budget: CacheBudget) -> None:
    """Write worker, scheduler and budget into a checked configuration."""
    is_async = config.scheduler_config.async_scheduling
    config.parallel_config.worker_cls = f"{_PACKAGE}.worker.SnapStreamWorker"
    name = "SnapStreamAsyncScheduler" if is_async else "SnapStreamScheduler"
    config.scheduler_config.scheduler_cls = f"{_PACKAGE}.scheduler.{name}"
    config.additional_config = {**(config.additional_config or {}), KEY: budget.as_dict()}
    _forbid_full_graphs(config.compilation_config)
    if config.model_config.max_model_len <= budget.capacity:
        logger.warning(
            "SnapStream: a budget of %d entries covers max_model_len %d, so nothing will ever be compressed",
            budget.capacity,
            config.model_config.max_model_len,
        )


def _forbid_full_graphs(compilation: Any) -> None:
    """Keep attention out of CUDA graphs: a replayed graph would not run the plugin's code in the layers."""
    from vllm.config import CUDAGraphMode

    if compilation.cudagraph_mode in (None, CUDAGraphMode.NONE):
        return
    if compilation.is_attention_compiled_piecewise():
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        return
    logger.warning(
        "SnapStream: attention must stay outside of CUDA graphs, but this compilation config does not split it off. "
        "CUDA graphs are disabled instead of %s, and steps are slower. To use graphs, do not set mode and "
        "splitting_ops.",
        compilation.cudagraph_mode.name,
    )
    compilation.cudagraph_mode = CUDAGraphMode.NONE


def _process_inputs(
    original: Callable[..., Any], processor: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    """Reject a request that the plugin cannot serve; the client gets a 400, and other requests are not affected.

    Raises:
        VLLMValidationError: The request cannot be served.
    """
    from vllm.exceptions import VLLMValidationError

    budget, pin = active_budget(processor.vllm_config), set[Span]()
    if budget is not None:
        try:
            pin = {*request_budget(budget, getattr(params, "extra_args", None)).pin} - {*budget.pin}
        except RequestError as error:
            at_fault = PIN_KEY if str(error).startswith(PIN_KEY) else REQUEST_KEY
            raise VLLMValidationError(str(error), parameter=at_fault) from error
        if kwargs.get("resumable"):
            raise VLLMValidationError(
                "streaming input is not supported with the SnapStream plugin; send the whole prompt at once"
            )
    request = original(processor, request_id, prompt, params, *args, **kwargs)
    length, last = len(request.prompt_token_ids or ()), max((end for _, end in pin), default=0)
    if last > length:
        raise VLLMValidationError(f"pin: a span ends at {last}, but the prompt has {length} tokens", parameter=PIN_KEY)
    config = processor.vllm_config
    is_apart = budget is not None and config.kv_transfer_config is not None
    obstacle = check_transfer(params, length, config) if is_apart else None
    if obstacle:
        raise VLLMValidationError(f"the cache cannot be transferred: {obstacle}", parameter=TRANSFER_KEY)
    return request
