"""The block manager: how long a request's row is, and which blocks it frees when.

The specs select the manager of a KV cache group. The manager maps tokens to blocks by the layout of
:mod:`~snapstream.integrations.vllm.pages`; everything else is vLLM's code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from snapstream.config import CacheBudget
from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm.pages import PageLayout, blocks_for, lay_out_pages
from snapstream.integrations.vllm.settings import arriving_tokens, granted_budget


class _Budgeted:
    """Mixin of both specs: adds a budget, and room in each row for the compressed cache's blocks."""

    budget: CacheBudget | None
    drafts: int
    block_size: int
    page_size_bytes: int

    @property
    def cache_blocks(self) -> int:
        """Maximum number of blocks that a sequence holds while it decodes."""
        return blocks_for(self.budget.capacity + self.drafts, self.block_size) if self.budget else 0

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        blocks: int = super().max_num_blocks_per_req(vllm_config, max_len + self.drafts)  # type: ignore[misc]
        return blocks + self.cache_blocks

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Peak memory of one request, in bytes: for one step, a prompt of full length and its compressed cache."""
        full: int = super().max_memory_usage_bytes(vllm_config)  # type: ignore[misc]
        return full + (self.cache_blocks + blocks_for(self.drafts, self.block_size)) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        merged = super().merge(specs)  # type: ignore[misc]
        return replace(merged, budget=specs[0].budget, drafts=specs[0].drafts)


@dataclass(frozen=True, kw_only=True)
class SnapStreamSpec(_Budgeted, FullAttentionSpec):
    """Full attention with a budget per sequence, and room for draft tokens after it."""

    budget: CacheBudget | None = None
    drafts: int = 0


@dataclass(frozen=True, kw_only=True)
class SnapStreamMLASpec(_Budgeted, MLAAttentionSpec):
    """Multi-head latent attention with a budget per sequence, and room for draft tokens after it."""

    budget: CacheBudget | None = None
    drafts: int = 0


def budgeted(name: str, spec: Any, budget: CacheBudget, drafts: int = 0) -> Any:
    """Add a budget to the spec of one layer; layers with a sliding window or a state keep theirs.

    Raises:
        ConfigurationError: The layer's cache is of any other kind than these, plain full attention and MLA.
    """
    if type(spec) in (SlidingWindowSpec, MambaSpec):
        return spec
    kinds = {FullAttentionSpec: SnapStreamSpec, MLAAttentionSpec: SnapStreamMLASpec}
    kind = kinds.get(type(spec))
    if kind is None or spec.sliding_window is not None or spec.attention_chunk_size is not None or spec.non_causal:
        raise ConfigurationError(
            f"the SnapStream plugin cannot serve layer {name}: its cache is a {type(spec).__name__} with unsupported "
            "restrictions; only plain causal attention over the whole sequence can be compressed"
        )
    given = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
    return kind(**given, budget=budget, drafts=drafts)


def is_budgeted(spec: Any) -> bool:
    """Whether the spec of a group has a budget, for plain full attention in all its layers."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(is_budgeted(each) for each in spec.kv_cache_specs.values())
    return isinstance(spec, SnapStreamSpec | SnapStreamMLASpec) and spec.sliding_window is None


class SnapStreamBlockManager(FullAttentionManager):
    """vLLM's manager of full attention, with the row lengths of a :class:`PageLayout`.

    Attributes:
        layouts: Layout of each request that holds blocks, or is about to.
        counters: Totals in the order of ``metrics.COUNTERS``: prompts compressed, tokens dropped, blocks released.
    """

    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.layouts: dict[str, PageLayout] = {}
        self.counters = (0, 0, 0)

    def layout(self, request: Any) -> PageLayout:
        """The layout of ``request``; recomputed while it holds no blocks (a preempted request comes back longer)."""
        if not self.req_to_blocks.get(request.request_id):
            budget = granted_budget(self.kv_cache_spec.budget, request.sampling_params.extra_args)
            arriving = arriving_tokens(request.kv_transfer_params)
            self.layouts[request.request_id] = lay_out_pages(
                arriving or request.num_tokens,
                budget,
                self.block_size,
                shares=self.enable_caching,
                arrives=arriving is not None,
                drafts=self.kv_cache_spec.drafts,
                generated=0 if arriving else request.num_tokens - request.num_prompt_tokens,
            )
        return self.layouts[request.request_id]

    def reusable_tokens(self, request: Any) -> int:
        """Number of leading tokens, in whole blocks, that ``request`` may take from the prefix cache."""
        return max(0, self.layout(request).reusable()) // self.block_size * self.block_size

    def grows(self, request: Any) -> bool:
        """Whether a running request may still need more blocks."""
        layout = self.layouts.get(request.request_id)
        return layout is None or len(self.req_to_blocks.get(request.request_id, ())) < layout.longest

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        """Number of blocks that ``num_tokens`` computed tokens need in addition to those held."""
        return super().get_num_blocks_to_allocate(request_id, self._row_tokens(request_id, num_tokens), *args, **kwargs)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Extend the row to its length in the layout for ``num_tokens`` computed tokens."""
        layout = self.layouts[request_id]
        is_longer = layout.blocks(num_tokens) > len(self.req_to_blocks.get(request_id, ()))
        if layout.compressed and layout.has_moved(num_tokens) and is_longer:  # happens once per prompt
            prompts, tokens, blocks = self.counters
            dropped = layout.prompt.dropped
            self.counters = (prompts + (dropped > 0), tokens + dropped, blocks + layout.front_blocks)
        return super().allocate_new_blocks(request_id, self._row_tokens(request_id, num_tokens), *args, **kwargs)

    def allocate_external_computed_blocks(
        self, request_id: str, num_local_computed_tokens: int, num_external_computed_tokens: int, **kwargs: Any
    ) -> None:
        """Allocate blocks for a cache that another instance sends."""
        tokens = self._row_tokens(request_id, num_local_computed_tokens + num_external_computed_tokens)
        super().allocate_external_computed_blocks(request_id, 0, tokens, **kwargs)

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Publish the blocks that will never change; the copy, which the ring overwrites, stays private."""
        super().cache_blocks(request, self.layouts[request.request_id].shareable(num_tokens), *args, **kwargs)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Free the blocks in front of the copy, once the step that copied them has run."""
        layout = self.layouts.get(request_id)
        if layout is not None and layout.has_moved(processed_computed_tokens):  # idempotent
            self._remove_blocks_in_range(request_id, 0, layout.front_blocks)

    def pop_blocks_for_free(self, request_id: str) -> Sequence[Any]:
        """Drop the request's layout, and return its blocks."""
        self.layouts.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def _row_tokens(self, request_id: str, num_tokens: int) -> int:
        """The number of tokens that vLLM's own arithmetic turns into the layout's row length for ``num_tokens``."""
        return self.layouts[request_id].blocks(num_tokens) * self.block_size


def register_specs() -> None:
    """Register the manager of our specs; the built-in specs must be registered first, or they never are."""
    KVCacheSpecRegistry._ensure_registered()
    for spec in (SnapStreamSpec, SnapStreamMLASpec):
        KVCacheSpecRegistry.register(spec, SnapStreamBlockManager, uniform_type_base_spec=FullAttentionSpec)


# Engine core and workers unpickle specs before they import anything else from here, so importing registers them.
register_specs()
