"""vLLM's schedulers with a block manager that knows each request's budget.

vLLM hands its block manager request ids; budgets and lengths are on the request. The facade in between, vLLM's
``KVCacheManager``, sees both, so ours tells the manager before it passes a call on.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler

from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm.blocks import SnapStreamBlockManager
from snapstream.integrations.vllm.metrics import CounterWriter
from snapstream.integrations.vllm.pages import blocks_for

logger = logging.getLogger("vllm.snapstream")


class SnapStreamKVCacheManager(KVCacheManager):
    """vLLM's facade; lays out every request, and limits what it may take from the prefix cache."""

    @property
    def snapstream(self) -> SnapStreamBlockManager:
        """The block manager of the only KV cache group."""
        manager: SnapStreamBlockManager = self.coordinator.single_type_managers[0]
        return manager

    def get_computed_blocks(self, request: Any) -> Any:
        """Prefix-cache hits of ``request``, cut where the window of a long prompt begins."""
        blocks, tokens, *rest = super().get_computed_blocks(request)
        limit = self.snapstream.reusable_tokens(request)
        if tokens > limit:
            blocks, tokens = self.truncate_computed_blocks(blocks, limit), limit
        return blocks, tokens, *rest

    def allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Blocks for the next tokens of ``request``."""
        self.snapstream.layout(request)
        return super().allocate_slots(request, *args, **kwargs)


class _Budgeted:
    """What both schedulers add to vLLM's."""

    kv_cache_manager: Any
    kv_cache_config: Any
    vllm_config: Any
    max_model_len: int
    running: list[Any]
    policy: SchedulingPolicy

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        if len(managers) != 1 or not isinstance(managers[0], SnapStreamBlockManager):
            kinds = ", ".join(type(manager).__name__ for manager in managers)
            raise ConfigurationError(
                f"the SnapStream plugin needs one KV cache group with a budget, this model has: {kinds}; "
                "hybrid models are not supported"
            )
        # The scheduler builds its facade itself; a subclass without state of its own is put in its place.
        self.kv_cache_manager.__class__ = SnapStreamKVCacheManager
        self._counters = CounterWriter(self.vllm_config.parallel_config.data_parallel_index)
        self._announce(managers[0])

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step. Who is preempted for want of blocks is read again, and compressed at another end than before.

        vLLM takes the blocks of whoever came last. That would change the answer of a sequence that has been compressed,
        and one that still grows would come back the same; so these are put last, in the order in which they came. With
        priorities the user has said who goes first.
        """
        if self.policy == SchedulingPolicy.FCFS:
            self.running.sort(key=self.kv_cache_manager.snapstream.grows)
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """A cache that has arrived cannot be fetched once more: its prompt is read here."""
        if request.kv_transfer_params:
            request.kv_transfer_params["do_remote_prefill"] = False
        return super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Let our counters go out with vLLM's statistics of the step."""
        self._counters.write(self.kv_cache_manager.snapstream.counters)
        return super().make_stats(*args, **kwargs)  # type: ignore[misc]

    def _announce(self, manager: SnapStreamBlockManager) -> None:
        """One line beside vLLM's own "Maximum concurrency", which assumes full caches."""
        blocks = self.kv_cache_config.num_blocks - 1
        budget, held = manager.kv_cache_spec.budget, manager.kv_cache_spec.cache_blocks
        longest = blocks_for(self.max_model_len, manager.block_size)
        beside = max(0, blocks - longest - held) // held
        logger.info(
            "SnapStream: a sequence decodes in %d blocks (%d entries), so the pool of %d holds %d at once, %d while "
            "one prompt of %d tokens is read; with full caches of that length it holds %.2f",
            *(held, budget.capacity, blocks, blocks // held, beside, self.max_model_len, blocks / longest),
        )


class SnapStreamScheduler(_Budgeted, Scheduler):
    """vLLM's scheduler."""


class SnapStreamAsyncScheduler(_Budgeted, AsyncScheduler):
    """vLLM's asynchronous scheduler."""
