"""What vLLM's block manager has to know: how long a request's row is, and which blocks it gives back when.

The specs say which manager a KV cache group gets; the manager turns tokens into blocks by the layout of
:mod:`~snapstream.integrations.vllm.pages`, and otherwise stays vLLM's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry

from snapstream.config import CacheBudget
from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm.pages import PageLayout, blocks_for, lay_out_pages
from snapstream.integrations.vllm.settings import arriving_tokens, granted_budget


class _Budgeted:
    """What both specs add to vLLM's: a budget, and room in each row for the compressed cache's blocks."""

    budget: CacheBudget | None
    drafts: int
    block_size: int
    page_size_bytes: int

    @property
    def cache_blocks(self) -> int:
        """Most blocks that a sequence holds while it decodes."""
        return blocks_for(self.budget.capacity + self.drafts, self.block_size) if self.budget else 0

    def max_num_blocks_per_req(self, vllm_config: Any, max_len: int) -> int:
        blocks: int = super().max_num_blocks_per_req(vllm_config, max_len + self.drafts)  # type: ignore[misc]
        return blocks + self.cache_blocks

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Most that one request holds: for one step, a prompt of full length and its compressed cache."""
        full: int = super().max_memory_usage_bytes(vllm_config)  # type: ignore[misc]
        return full + (self.cache_blocks + blocks_for(self.drafts, self.block_size)) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[Any]) -> Any:
        merged = super().merge(specs)  # type: ignore[misc]
        return replace(merged, budget=specs[0].budget, drafts=specs[0].drafts)


@dataclass(frozen=True, kw_only=True)
class SnapStreamSpec(_Budgeted, FullAttentionSpec):
    """Full attention with a budget per sequence, and room for drafts behind it."""

    budget: CacheBudget | None = None
    drafts: int = 0


@dataclass(frozen=True, kw_only=True)
class SnapStreamMLASpec(_Budgeted, MLAAttentionSpec):
    """Multi-head latent attention with the same."""

    budget: CacheBudget | None = None
    drafts: int = 0


def budgeted(name: str, spec: Any, budget: CacheBudget, drafts: int = 0) -> Any:
    """The spec of one layer with a budget.

    Raises:
        ConfigurationError: The layer is neither plain full attention nor MLA.
    """
    kinds = {FullAttentionSpec: SnapStreamSpec, MLAAttentionSpec: SnapStreamMLASpec}
    kind = kinds.get(type(spec))
    if kind is None or spec.sliding_window is not None or spec.attention_chunk_size is not None or spec.non_causal:
        raise ConfigurationError(
            f"the SnapStream plugin cannot serve layer {name}: its cache is a {type(spec).__name__} with restrictions "
            "of its own; only plain causal attention over the whole sequence can be compressed"
        )
    given = {field.name: getattr(spec, field.name) for field in fields(spec) if field.init}
    return kind(**given, budget=budget, drafts=drafts)


class SnapStreamBlockManager(FullAttentionManager):
    """vLLM's manager of full attention, with rows as long as a :class:`PageLayout` says.

    Attributes:
        layouts: Of each request that holds blocks, or is about to.
        counters: What compression has done so far, in the order of ``metrics.COUNTERS``: prompts compressed, tokens
            dropped, blocks given back.
    """

    def __init__(self, kv_cache_spec: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.layouts: dict[str, PageLayout] = {}
        self.counters = (0, 0, 0)

    def layout(self, request: Any) -> PageLayout:
        """The layout of ``request``; made anew as long as it holds no blocks (a preempted one comes back longer)."""
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
            )
        return self.layouts[request.request_id]

    def reusable_tokens(self, request: Any) -> int:
        """Whole blocks' worth of tokens at the start that ``request`` may take from the prefix cache."""
        return max(0, self.layout(request).reusable()) // self.block_size * self.block_size

    def grows(self, request: Any) -> bool:
        """Whether a request that runs may yet ask for blocks."""
        layout = self.layouts.get(request.request_id)
        return layout is None or len(self.req_to_blocks.get(request.request_id, ())) < layout.longest

    def get_num_blocks_to_allocate(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> int:
        """Blocks that ``num_tokens`` computed tokens need beyond those held."""
        return super().get_num_blocks_to_allocate(request_id, self._row_tokens(request_id, num_tokens), *args, **kwargs)

    def allocate_new_blocks(self, request_id: str, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        """Lengthen the row to what the layout says for ``num_tokens`` computed tokens."""
        layout = self.layouts[request_id]
        is_longer = layout.blocks(num_tokens) > len(self.req_to_blocks.get(request_id, ()))
        if layout.compressed and layout.has_moved(num_tokens) and is_longer:  # for the last time
            prompts, dropped, blocks = self.counters
            self.counters = (prompts + 1, dropped + layout.prompt.dropped, blocks + layout.front_blocks)
        return super().allocate_new_blocks(request_id, self._row_tokens(request_id, num_tokens), *args, **kwargs)

    def allocate_external_computed_blocks(
        self, request_id: str, num_local_computed_tokens: int, num_external_computed_tokens: int, **kwargs: Any
    ) -> None:
        """Blocks for a cache that another instance sends."""
        tokens = self._row_tokens(request_id, num_local_computed_tokens + num_external_computed_tokens)
        super().allocate_external_computed_blocks(request_id, 0, tokens, **kwargs)

    def cache_blocks(self, request: Any, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        """Publish the blocks that will never change; the copy, where the ring turns, stays private."""
        super().cache_blocks(request, self.layouts[request.request_id].shareable(num_tokens), *args, **kwargs)

    def remove_skipped_blocks(
        self, request_id: str, processed_computed_tokens: int, num_prompt_tokens: int | None = None
    ) -> None:
        """Give the front of the row back once the step that copied it has run."""
        layout = self.layouts.get(request_id)
        if layout is not None and layout.has_moved(processed_computed_tokens):  # does nothing the second time
            self._remove_blocks_in_range(request_id, 0, layout.front_blocks)

    def pop_blocks_for_free(self, request_id: str) -> Sequence[Any]:
        """Forget the request and hand its blocks over."""
        self.layouts.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    def _row_tokens(self, request_id: str, num_tokens: int) -> int:
        """``num_tokens`` as a number that vLLM's own arithmetic turns into the row length of the layout."""
        return self.layouts[request_id].blocks(num_tokens) * self.block_size


def register_specs() -> None:
    """Tell vLLM which manager our specs want; the built-in ones must be there first, or they never register."""
    KVCacheSpecRegistry._ensure_registered()
    for spec in (SnapStreamSpec, SnapStreamMLASpec):
        KVCacheSpecRegistry.register(spec, SnapStreamBlockManager, uniform_type_base_spec=FullAttentionSpec)


# Engine core and workers unpickle specs before they see anything else of ours: registration belongs to the import.
register_specs()
