"""Which vLLM releases are supported: versions, names and signatures are checked before anything is changed."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import re
from typing import Any

OLDEST, NEWEST = (0, 32), (0, 33)
SUPPORTED = f"{OLDEST[0]}.{OLDEST[1]} or {NEWEST[0]}.{NEWEST[1]}"

_MANAGER = "vllm.v1.core.single_type_kv_cache_manager:FullAttentionManager"
_SPEC = "vllm.v1.kv_cache_interface:FullAttentionSpec"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"

# Functions, with the arguments that this package relies on.
FRONT_HOOKS: dict[str, tuple[str, ...]] = {
    "vllm.engine.arg_utils:EngineArgs.create_engine_config": ("self",),
    "vllm.v1.engine.input_processor:InputProcessor.process_inputs": ("self", "request_id", "prompt", "params"),
}
CORE_HOOKS: dict[str, tuple[str, ...]] = {
    "vllm.v1.core.kv_cache_manager:KVCacheManager.get_computed_blocks": ("self", "request"),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots": ("self", "request"),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.truncate_computed_blocks": ("self", "blocks", "num_computed_tokens"),
    "vllm.v1.core.kv_cache_manager:KVCacheManager.create_kv_cache_blocks": ("self", "blocks"),
    "vllm.v1.core.kv_cache_coordinator:HybridKVCacheCoordinator.find_longest_cache_hit": (
        *("self", "block_hashes", "max_cache_hit_length"),
    ),
    f"{_MANAGER}.get_num_blocks_to_allocate": ("self", "request_id", "num_tokens"),
    f"{_MANAGER}.allocate_new_blocks": ("self", "request_id", "num_tokens"),
    f"{_MANAGER}.remove_skipped_blocks": ("self", "request_id", "processed_computed_tokens"),
    f"{_MANAGER}.cache_blocks": ("self", "request", "num_tokens"),
    f"{_MANAGER}.pop_blocks_for_free": ("self", "request_id"),
    f"{_MANAGER}._remove_blocks_in_range": ("self", "request_id", "first_block", "last_block"),
    f"{_SPEC}.max_num_blocks_per_req": ("self", "vllm_config", "max_len"),
    f"{_SPEC}.max_memory_usage_bytes": ("self", "vllm_config"),
    f"{_SPEC}.merge": ("specs",),
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry._ensure_registered": (),
    "vllm.v1.core.sched.scheduler:Scheduler.schedule": ("self",),
    "vllm.v1.core.sched.scheduler:Scheduler.make_stats": ("self",),
    "vllm.v1.core.sched.async_scheduler:AsyncScheduler.make_stats": ("self",),
    "vllm.v1.kv_cache_spec_registry:KVCacheSpecRegistry.register": ("kvcache_spec_cls", "manager_class"),
}
# For KV transfer.
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.base:KVConnectorBase_V1"
CORE_HOOKS |= {
    f"{_CONNECTOR}.on_new_request": ("self", "request"),
    f"{_CONNECTOR}.get_num_new_matched_tokens": ("self", "request", "num_computed_tokens"),
    f"{_CONNECTOR}.update_state_after_alloc": ("self", "request", "blocks", "num_external_tokens"),
    f"{_CONNECTOR}.build_connector_meta": ("self", "scheduler_output"),
    f"{_CONNECTOR}.update_connector_output": ("self", "connector_output"),
    f"{_CONNECTOR}.request_finished": ("self", "request", "block_ids"),
    f"{_CONNECTOR}.start_load_kv": ("self", "forward_context"),
    f"{_CONNECTOR}.wait_for_save": ("self",),
    f"{_CONNECTOR}.get_transfer_results": ("self", "finished_req_ids"),
    f"{_MANAGER}.allocate_external_computed_blocks": (
        *("self", "request_id", "num_local_computed_tokens", "num_external_computed_tokens"),
    ),
    "vllm.v1.core.sched.scheduler:Scheduler._preempt_request": ("self", "request"),
}
WORKER_HOOKS: dict[str, tuple[str, ...]] = {
    f"{_WORKER}.init_device": ("self",),
    f"{_WORKER}.load_model": ("self",),
    f"{_WORKER}.get_kv_cache_spec": ("self",),
    f"{_WORKER}.determine_available_memory": ("self",),
    f"{_WORKER}.initialize_from_config": ("self", "kv_cache_config"),
    "vllm.v1.attention.backend:AttentionImpl.forward": (
        *("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata"),
    ),
    "vllm.v1.attention.backend:AttentionMetadataBuilder.build": ("self", "common_prefix_len", "common_attn_metadata"),
    "vllm.model_executor.layers.attention.mla_attention:MLAAttention.forward_impl": (
        *("self", "q", "k_c_normed", "k_pe", "kv_cache", "attn_metadata", "output"),
    ),
}
RUNNER_V1_HOOKS: dict[str, tuple[str, ...]] = {
    f"{_RUNNER_V1}._update_states": ("self", "scheduler_output"),
    f"{_RUNNER_V1}._prepare_inputs": ("self", "scheduler_output", "num_scheduled_tokens"),
    f"{_RUNNER_V1}.execute_model": ("self", "scheduler_output"),
}
RUNNER_V2_HOOKS: dict[str, tuple[str, ...]] = {
    f"{_RUNNER_V2}.add_requests": ("self", "scheduler_output"),
    f"{_RUNNER_V2}.finish_requests": ("self", "scheduler_output"),
    f"{_RUNNER_V2}.prepare_inputs": ("self", "scheduler_output"),
    f"{_RUNNER_V2}.execute_model": ("self", "scheduler_output"),
}


def unsupported_version() -> str | None:
    """Why the installed vLLM release is not supported, or ``None``."""
    import vllm

    match = re.match(r"(\d+)\.(\d+)", vllm.__version__)
    if match is None or not OLDEST <= (int(match[1]), int(match[2])) <= NEWEST:
        return f"vLLM {vllm.__version__} is not supported by this SnapStream; install vLLM {SUPPORTED}"
    return None


def unknown_field(known: frozenset[str]) -> str | None:
    """An error message if vLLM's attention metadata has fields that are not in ``known``, or ``None``."""
    import vllm
    from vllm.v1.attention.backend import CommonAttentionMetadata

    found = [one.name for one in dataclasses.fields(CommonAttentionMetadata) if one.name not in known]
    if not found:
        return None
    return (
        f"CommonAttentionMetadata of vLLM {vllm.__version__} has {', '.join(found)}, which could hold lengths of full "
        f"caches; install vLLM {SUPPORTED}"
    )


def missing_hook(hooks: dict[str, tuple[str, ...]]) -> str | None:
    """An error message if ``hooks`` and the installed vLLM differ, or ``None``."""
    import vllm

    advice = f"install a release of vLLM {SUPPORTED}"
    for path, wanted in hooks.items():
        module, name = path.split(":")
        try:
            target: Any = functools.reduce(getattr, name.split("."), importlib.import_module(module))
            found = tuple(inspect.signature(target).parameters)
        except (ImportError, AttributeError):
            return f"vLLM {vllm.__version__} has no {path}; {advice}"
        if found[: len(wanted)] != wanted:
            takes = f"({', '.join(found)}), not ({', '.join(wanted)}, ...)"
            return f"{path} of vLLM {vllm.__version__} takes {takes}; {advice}"
    return None
