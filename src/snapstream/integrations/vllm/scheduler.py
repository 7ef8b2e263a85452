"""vLLM's schedulers with a block manager that knows each request's budget.

vLLM passes only request ids to its block manager, but budgets and lengths are attributes of the request. The facade in
between, vLLM's ``KVCacheManager``, sees both; the subclass here informs the manager before it forwards a call.
"""

from __future__ import annotations

import logging
from typing import Any

from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import SchedulingPolicy
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import MambaManager, SlidingWindowManager

from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm.blocks import SnapStreamBlockManager
from snapstream.integrations.vllm.metrics import CounterWriter
from snapstream.integrations.vllm.pages import blocks_for

logger = logging.getLogger("vllm.snapstream")


class SnapStreamKVCacheManager(KVCacheManager):
    """vLLM's facade; computes the layout of every request, and limits its prefix-cache hits."""

    @property
    def snapstream(self) -> SnapStreamBlockManager:
        """The block manager of the KV cache group with a budget; others are vLLM's, of layers of fixed size."""
        managers = self.coordinator.single_type_managers
        return next(each for each in managers if isinstance(each, SnapStreamBlockManager))

    def get_computed_blocks(self, request: Any) -> Any:
        """Prefix-cache hits of ``request``, cut off where the window of a long prompt starts."""
        blocks, tokens, *rest = super().get_computed_blocks(request)
        limit = self.snapstream.reusable_tokens(request)
        if tokens > limit and len(self.coordinator.single_type_managers) == 1:
            blocks, tokens = self.truncate_computed_blocks(blocks, limit), limit
        elif tokens > limit:  # layers with a window or a state keep what is before a hit's end alone
            found, tokens, *uncached = self.coordinator.find_longest_cache_hit(request.block_hashes, limit)
            blocks = self.create_kv_cache_blocks(found)
            if rest and uncached:  # where a later request may resume, which the first of `rest` says
                rest[0] = tokens + uncached[0] if uncached[0] else 0
        return blocks, tokens, *rest

    def allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Allocate blocks for the next tokens of ``request``, with its layout known to the manager."""
        self.snapstream.layout(request)
        return super().allocate_slots(request, *args, **kwargs)


class _Budgeted:
    """Mixin of both schedulers."""

    kv_cache_manager: Any
    kv_cache_config: Any
    vllm_config: Any
    max_model_len: int
    running: list[Any]
    policy: SchedulingPolicy

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        managers = self.kv_cache_manager.coordinator.single_type_managers
        budgeted = [each for each in managers if isinstance(each, SnapStreamBlockManager)]
        fixed = [each for each in managers if isinstance(each, SlidingWindowManager | MambaManager)]
        if len(budgeted) != 1 or len(budgeted) + len(fixed) != len(managers):
            kinds = ", ".join(type(manager).__name__ for manager in managers)
            raise ConfigurationError(
                "the SnapStream plugin needs exactly one KV cache group with a budget, and no others but those of "
                f"layers with a sliding window or a state; here vLLM has made: {kinds}. For such models, leave its "
                "hybrid KV cache manager enabled"
            )
        # The scheduler creates its facade itself, so its class is replaced by a subclass without additional state.
        self.kv_cache_manager.__class__ = SnapStreamKVCacheManager
        self._counters = CounterWriter(self.vllm_config.parallel_config.data_parallel_index)
        self._announce(budgeted[0], fixed)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Plan a step.

        A request preempted for lack of blocks is prefilled again, and compressed at a later position than before. vLLM
        preempts the latest request. Preemption changes the answer of a sequence that has been compressed, but not that
        of one that is still growing. So growing sequences are put last, in their order of arrival. With priority
        scheduling, the user's order is kept.
        """
        if self.policy == SchedulingPolicy.FCFS:
            self.running.sort(key=self.kv_cache_manager.snapstream.grows)
        return super().schedule(*args, **kwargs)  # type: ignore[misc]

    def _preempt_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Preempt a request; a cache that has arrived cannot be fetched again, so its prompt is prefilled here."""
        if request.kv_transfer_params:
            request.kv_transfer_params["do_remote_prefill"] = False
        return super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Publish the plugin's counters along with vLLM's statistics of the step."""
        self._counters.write(self.kv_cache_manager.snapstream.counters)
        return super().make_stats(*args, **kwargs)  # type: ignore[misc]

    def _announce(self, manager: SnapStreamBlockManager, fixed: list[SlidingWindowManager | MambaManager]) -> None:
        """Log the concurrency with compressed caches; vLLM's own "Maximum concurrency" assumes full caches."""
        blocks = self.kv_cache_config.num_blocks - 1
        # A window that does not begin with a block takes one more; a state takes one.
        others = sum(
            blocks_for(min(each.sliding_window, self.max_model_len), each.block_size) + 1
            if isinstance(each, SlidingWindowManager)
            else 1
            for each in fixed
        )
        budget, held = manager.kv_cache_spec.budget, manager.kv_cache_spec.cache_blocks + others
        longest = blocks_for(self.max_model_len, manager.block_size) + others
        beside = max(0, blocks - longest - held) // held
        logger.info(
            "SnapStream: a sequence decodes in %d blocks (%d entries), so the pool of %d holds %d at once, %d while "
            "one prompt of %d tokens is read; with full caches of that length it holds %.2f",
            *(held, budget.capacity, blocks, blocks // held, beside, self.max_model_len, blocks / longest),
        )


class SnapStreamScheduler(_Budgeted, Scheduler):
    """vLLM's scheduler, with budgets."""


class SnapStreamAsyncScheduler(_Budgeted, AsyncScheduler):
    """vLLM's asynchronous scheduler, with budgets."""
