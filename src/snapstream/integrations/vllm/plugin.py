"""The entry point, and the only code of vLLM that is wrapped.

vLLM calls :func:`register` in every process. Two functions are wrapped there, both in the process that takes requests,
and both do nothing unless a budget was asked for:

- ``EngineArgs.create_engine_config``: vLLM has no hook that lets a plugin see the finished configuration. Here the
  budget is read, unsupported combinations are refused, and worker and scheduler are set to ours; every other process
  finds them, and the budget, in the configuration it is sent.
- ``InputProcessor.process_inputs``: a request with a bad ``kv_budget`` must be refused before it reaches the engine,
  where an error would hurt others.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from snapstream.config import CacheBudget
from snapstream.errors import ConfigurationError, RequestError
from snapstream.integrations.vllm.compatibility import (
    CONNECTOR_HOOKS,
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
        ConfigurationError: ``SNAPSTREAM_BUDGET`` is set, and bad, or this vLLM is not supported.
    """
    budget = requested_budget(None)
    obstacle = unsupported_version() or missing_hook(FRONT_HOOKS)
    if obstacle and budget is not None:
        raise ConfigurationError(f"{ENVIRONMENT} is set, but {obstacle}")
    from vllm.engine.arg_utils import EngineArgs

    _wrap(EngineArgs, "create_engine_config", _create_engine_config)
    if obstacle:  # whoever asks by --additional-config is refused when the configuration is made
        logger.warning("SnapStream is installed but off: %s", obstacle)
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
    """Build vLLM's configuration; if a budget was asked for, check it and make it ours."""
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
    """Refuse settings of the connector that no instance could work with, before anything is loaded."""
    if obstacle := missing_hook(CONNECTOR_HOOKS):
        raise ConfigurationError(f"{CONNECTOR} cannot work here: {obstacle}")
    if transfer_settings(config).directory is None:
        secret()


def _take_over(config: Any, budget: CacheBudget) -> None:
    """Write worker, scheduler and budget into a configuration that was found supported."""
    is_async = config.scheduler_config.async_scheduling
    config.parallel_config.worker_cls = f"{_PACKAGE}.worker.SnapStreamWorker"
    name = "SnapStreamAsyncScheduler" if is_async else "SnapStreamScheduler"
    config.scheduler_config.scheduler_cls = f"{_PACKAGE}.scheduler.{name}"
    config.additional_config = {**(config.additional_config or {}), KEY: budget.as_dict()}
    _forbid_full_graphs(config.compilation_config)
    if config.model_config.max_model_len <= budget.capacity:
        logger.warning(
            "SnapStream: a budget of %d entries holds all of max_model_len %d, so nothing will ever be compressed",
            budget.capacity,
            config.model_config.max_model_len,
        )


def _forbid_full_graphs(compilation: Any) -> None:
    """Keep attention out of CUDA graphs: a replayed graph would run none of the plugin's code in the layers."""
    from vllm.config import CUDAGraphMode

    if compilation.cudagraph_mode in (None, CUDAGraphMode.NONE):
        return
    if compilation.is_attention_compiled_piecewise():
        compilation.cudagraph_mode = CUDAGraphMode.PIECEWISE
        return
    logger.warning(
        "SnapStream: attention must stay outside of CUDA graphs, and this compilation does not split it off. So there "
        "are no graphs instead of %s, and steps are slower. For graphs, leave mode and splitting_ops as they are.",
        compilation.cudagraph_mode.name,
    )
    compilation.cudagraph_mode = CUDAGraphMode.NONE


def _process_inputs(
    original: Callable[..., Any], processor: Any, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
) -> Any:
    """Refuse a request that the plugin cannot serve; the client gets a 400, others are unharmed."""
    from vllm.exceptions import VLLMValidationError

    budget = active_budget(processor.vllm_config)
    if budget is not None:
        try:
            request_budget(budget, getattr(params, "extra_args", None))
        except RequestError as error:
            raise VLLMValidationError(str(error), parameter=REQUEST_KEY) from error
        if kwargs.get("resumable"):
            raise VLLMValidationError(
                "streaming input is not supported with the SnapStream plugin; send the whole prompt at once"
            )
    request = original(processor, request_id, prompt, params, *args, **kwargs)
    config = processor.vllm_config
    is_apart = budget is not None and config.kv_transfer_config is not None
    obstacle = check_transfer(params, len(request.prompt_token_ids or ()), config) if is_apart else None
    if obstacle:
        raise VLLMValidationError(f"a cache cannot travel: {obstacle}", parameter=TRANSFER_KEY)
    return request
