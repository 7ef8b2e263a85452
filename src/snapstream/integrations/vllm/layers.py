"""Extends vLLM's attention layers: at the end of a prompt, they copy out the kept entries.

Layers, their kernels (``impl``) and their metadata builders keep the code of their classes; each gets a subclass that
wraps one method. This works the same way for every backend, and for layers that are already built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

import snapstream.kernels.compression  # noqa: F401 (its kernels take the votes)
from snapstream.compression import choose_entries
from snapstream.config import LayerPrompt
from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm.paged import PagedCache
from snapstream.integrations.vllm.step import Outgoing, Sequences, Window

_READ_THE_CACHE = {"CPU_ATTN"}
"""Backends whose kernels are known to read all tokens of a step from the cache, at whatever place."""
_ALIKE = (
    "spans",
    "mixed",
    "snapstream",
    "sage-kv",
    "keydiff",
    "local-keydiff",
    "multiscale-keydiff",
    "streaming",
    "full",
)
"""Policies that treat all layers alike, so that layer names need not contain a number."""


class LayerCompressor:
    """Compresses one layer's prompts.

    Args:
        name: The layer's name in the model.
        index: Its index, for policies that differ between layers.
        layer: vLLM's attention layer.
        sequences: The worker's record of its requests.
        heads_total: KV heads of the layer, over all tensor-parallel ranks.
    """

    def __init__(self, name: str, index: int, layer: Any, sequences: Sequences, heads_total: int) -> None:
        self.name, self.index, self.layer = name, index, layer
        self.sequences = sequences
        self.heads_total = heads_total
        self.cache: PagedCache | None = None
        self.hand_out: Callable[[Outgoing, Tensor, Tensor | None], None] | None = None
        self._is_checked = False
        self._windows: dict[str, list[Tensor]] = {}
        sequences.on_forget.append(self._forget)
        sequences.on_move.append(self._move)

    def bind(self, block_size: int, blocks: int) -> None:
        """Determine the layout of the layer's cache, once it is allocated."""
        self.cache = PagedCache(self.layer, block_size, blocks)

    def __call__(self, queries: Tensor, cache: Tensor) -> None:
        """Do the step's work after the layer's attention has run: compress prompts, and hand out caches.

        Args:
            queries: Rotated queries of the batch, ``[T, H, D]``; for MLA, as projected and not yet absorbed.
            cache: The layer's paged cache.
        """
        step = self.sequences.step
        if step is None:
            return
        if not self._is_checked and step.slot_mapping is not None:
            self._check_writes(step.slot_mapping)
        for window in step.windows:
            part = self._absorb(queries[window.start : window.stop])
            if window.last:
                parts = [*self._windows.pop(window.request_id, ()), part]
                self._copy_out(torch.cat(parts), cache, window)
            else:  # the batch's buffers are reused in the next step
                self._windows.setdefault(window.request_id, []).append(part.clone())
        if self.hand_out is not None:
            for one in step.outgoing:
                self.hand_out(one, *self._entries(cache, step.outgoing_blocks[one.request_id], one))

    def put(self, keys: Tensor, values: Tensor | None, slots: Tensor) -> None:
        """Store a cache that has arrived: keys ``[N, E, D]``, values unless latent, and the slots of its entries."""
        assert self.cache is not None
        self.cache.write(self.layer.kv_cache, keys, values, slots)

    def _entries(self, cache: Tensor, blocks: Tensor, outgoing: Outgoing) -> tuple[Tensor, Tensor | None]:
        """The entries that another instance will decode with: keys ``[N, E, D]``, and values unless latent."""
        assert self.cache is not None
        pages, count = self.cache.read_pages(cache, blocks), outgoing.layout.prompt.count
        keys = self.cache.keys(pages, count)
        return keys, None if self.cache.latent else self.cache.values(pages, _first(keys, count))

    def _check_writes(self, slot_mapping: Tensor) -> None:
        """Check, in the first step that decodes, that the layer's tokens are written by the rewritten slot mapping.

        Raises:
            ConfigurationError: The layer uses a copy. Tokens went to wrong slots, so no answer may be returned.
        """
        from vllm.forward_context import get_forward_context

        mapping = get_forward_context().slot_mapping
        used = mapping.get(self.layer.layer_name) if isinstance(mapping, Mapping) else None
        if used is None or used.data_ptr() != slot_mapping.data_ptr():
            raise ConfigurationError(
                f"SnapStream cannot work here: this vLLM writes the tokens of layer {self.name} by a separate slot "
                "mapping instead of the batch's; please report this with vLLM's version and your options"
            )
        self._is_checked = True

    def _forget(self, request_id: str) -> None:
        self._windows.pop(request_id, None)

    def _move(self, block_size: int, sources: Tensor, targets: Tensor) -> None:
        """Before a step, move entries between slots ``[E]``, if the layer's blocks have that size."""
        assert self.cache is not None
        if self.cache.block_size == block_size:
            keys, values = self.cache.read(self.layer.kv_cache, sources)
            self.put(keys, values, targets)

    def _copy_out(self, queries: Tensor, cache: Tensor, window: Window) -> None:
        """Copy a sequence into its own blocks; a prompt over its budget is compressed by its queries ``[W, H, D]``."""
        step, paged, layout = self.sequences.step, self.cache, window.layout
        assert step is not None
        assert paged is not None
        target = step.targets[window.request_id]
        pages = paged.read_pages(cache, target.blocks)
        keys = paged.keys(pages, layout.source_tokens)
        if layout.compressed:
            values = None
            if layout.budget.policy.needs_values and not paged.latent:
                values = paged.values(pages, _first(keys, keys.shape[1]))[None]
            prompt = LayerPrompt(
                queries.transpose(0, 1)[None],
                keys[None],
                keys[None] if paged.latent else values,
                target.layout,
                layout.budget.sink,
                float(self.layer.impl.scale),
                self.index,
                cap=float(getattr(self.layer.impl, "logits_soft_cap", None) or 0.0),
                sinks=self._sinks(),
                pinned=target.pinned,
                pins_compete=target.pins_compete,
            )
            positions = choose_entries(prompt, layout.budget, combine=self._combine)[0, :, : layout.prompt.limit]
            positions = positions.clamp(min=0)  # entries that are not in use yet
        else:
            positions = _first(keys, layout.copied_entries)
        kept = keys.gather(1, positions[..., None].expand(-1, -1, keys.shape[-1]))
        values = None if paged.latent else paged.values(pages, positions)
        paged.write(cache, kept, values, target.slots)

    def _sinks(self) -> Tensor | None:
        """The logit that each head adds to its softmax, float32 ``[H]``, or ``None``."""
        sinks = getattr(self.layer.impl, "sinks", None)
        return None if sinks is None else sinks.detach().float()

    def _absorb(self, queries: Tensor) -> Tensor:
        """For MLA, queries in the space of the latent cache, ``[T, H, rank + rope]``; otherwise unchanged."""
        layer = self.layer
        if not hasattr(layer, "kv_lora_rank"):
            return queries
        nope, rope = torch.split(queries, [layer.qk_nope_head_dim, layer.qk_rope_head_dim], dim=-1)
        absorbed = torch.einsum("thp,hpr->thr", nope, layer.W_UK_T)  # [H, P, rank]: a head's key from the latent
        return torch.cat([absorbed, rope], dim=-1)

    def _combine(self, votes: Tensor) -> Tensor:
        """Average the votes of ranks that hold the same KV head with different query heads.

        Under tensor parallelism, MLA's latents are replicated on every rank. So are KV heads if there are fewer of them
        than ranks. Without averaging, the ranks would keep different tokens.
        """
        from vllm.distributed import (
            get_tensor_model_parallel_rank,
            get_tensor_model_parallel_world_size,
            tensor_model_parallel_all_reduce,
        )

        ranks = get_tensor_model_parallel_world_size()
        replicas = ranks // self.heads_total
        if replicas <= 1:
            return votes
        head = get_tensor_model_parallel_rank() // replicas
        spread = votes.new_zeros(votes.shape[0], self.heads_total, votes.shape[2])
        spread[:, head] = votes[:, 0] / replicas
        total: Tensor = tensor_model_parallel_all_reduce(spread)
        return total[:, head : head + 1]


def _first(keys: Tensor, count: int) -> Tensor:
    """The first ``count`` positions of each head of keys ``[N, L, D]``: ``[N, count]``."""
    return torch.arange(count, device=keys.device).expand(len(keys), -1)


def _has_window(layer: Any) -> bool:
    """Whether a layer attends to a sliding window."""
    return getattr(layer.impl, "sliding_window", None) not in (None, -1, (-1, -1))


def adopt_layers(vllm_config: Any, sequences: Sequences) -> list[LayerCompressor]:
    """Give every attention layer of a loaded model its compressor; those with a window or a state stay vLLM's.

    Raises:
        ConfigurationError: The attention of a layer depends on the place of entries.
    """
    from vllm.model_executor.layers.attention import Attention, MLAAttention
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.models.utils import extract_layer_index

    compressors = []
    backends: dict[Any, type] = {}
    for name, layer in vllm_config.compilation_config.static_forward_context.items():
        if not isinstance(layer, AttentionLayerBase) or isinstance(layer, MambaBase):
            continue  # a state of fixed size is vLLM's
        if type(layer) not in (Attention, MLAAttention):
            raise ConfigurationError(f"the SnapStream plugin cannot serve layer {name}, a {type(layer).__name__}")
        if _has_window(layer):  # likewise
            continue
        is_latent = isinstance(layer, MLAAttention)
        heads_total = 1 if is_latent else _kv_heads(vllm_config.model_config, extract_layer_index(name))
        heads_here = max(1, heads_total // vllm_config.parallel_config.tensor_parallel_size)
        _check_layer(name, layer, heads_here)
        index = 0 if sequences.budget.policy.name in _ALIKE else extract_layer_index(name)
        compressor = LayerCompressor(name, index, layer, sequences, heads_total)
        if is_latent:
            layer.__class__ = _compressing_latent_layer(type(layer))
            layer.snapstream = compressor
        else:
            layer.impl.__class__ = _compressing_impl(type(layer.impl))
            layer.impl.snapstream = compressor
        backend = layer.attn_backend
        if backend not in backends:
            backends[backend] = _rewriting_backend(backend, sequences)
        layer.attn_backend = backends[backend]
        compressors.append(compressor)
    read_the_batch = {backend.get_name() for backend in backends} - _READ_THE_CACHE
    sequences.placing.at_end = sequences.drafts > 0 and bool(read_the_batch)
    return compressors


# Each of these builds a subclass with one base, which can replace the class of existing objects.


def _compressing_impl(base: Any) -> type:
    """An ``AttentionImpl`` that compresses after its attention; ``snapstream`` is set on each object."""

    class CompressingImpl(base):
        def forward(
            self, layer: Any, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, metadata: Any, **kwargs: Any
        ) -> Any:
            result = super().forward(layer, query, key, value, kv_cache, metadata, **kwargs)
            if metadata is not None:
                self.snapstream(query, kv_cache)
            return result

    return _named(CompressingImpl, base)


def _compressing_latent_layer(base: Any) -> type:
    """An ``MLAAttention`` that compresses. The impl cannot do it: only the layer sees all queries of a batch."""

    class CompressingLayer(base):
        def forward_impl(
            self, q: Tensor, latent: Tensor, rope: Tensor, kv_cache: Tensor, metadata: Any, *args: Any, **kwargs: Any
        ) -> Any:
            result = super().forward_impl(q, latent, rope, kv_cache, metadata, *args, **kwargs)
            if metadata is not None:
                self.snapstream(q, kv_cache)
            return result

    return _named(CompressingLayer, base)


def _rewriting_backend(backend: Any, sequences: Sequences) -> type:
    """A backend whose metadata builders get the rewritten metadata of the step."""
    builder: Any = backend.get_builder_cls()

    class RewritingBuilder(builder):
        # Updating would give a second group of layers the first one's metadata with an unmodified block table.
        supports_update_block_table = False

        def build(self, common_prefix_len: int, common_attn_metadata: Any, *args: Any, **kwargs: Any) -> Any:
            if sequences.step is not None:
                common_prefix_len = 0  # rows no longer start with a common prefix
                common_attn_metadata = sequences.step.rewrite(
                    common_attn_metadata, self.kv_cache_spec.block_size, sequences.block_size
                )
            return super().build(common_prefix_len, common_attn_metadata, *args, **kwargs)

    class RewritingBackend(backend):
        @staticmethod
        def get_builder_cls() -> type:
            return RewritingBuilder

    return _named(RewritingBackend, backend)


def _named(made: type, base: type) -> type:
    """Give a generated class a unique name: vLLM groups layers by the name of their backend."""
    made.__qualname__ = made.__name__ = f"SnapStream{base.__name__}"
    return made


def _is_composite(impl: Any) -> bool:
    """Whether ``impl`` delegates to other implementations, which are not wrapped."""
    variants = getattr(impl, "get_impl_variants", None)
    return variants is not None and tuple(variants()) != (impl,)


def _kv_heads(model_config: Any, layer: int) -> int:
    """KV heads of a layer over all ranks; in some models, layers differ."""
    config, heads = model_config.hf_text_config, None
    if hasattr(config, "per_layer_config") and layer < config.num_hidden_layers:
        heads = getattr(config.per_layer_config[layer], "num_key_value_heads", None)
    return int(heads or model_config.get_total_num_kv_heads())


def _check_layer(name: str, layer: Any, heads: int) -> None:
    """Reject layers whose attention would change if entries were moved.

    Raises:
        ConfigurationError: Names everything that is not supported.
    """
    impl, backend = layer.impl, layer.attn_backend
    obstacles = [
        (getattr(impl, "alibi_slopes", None) is not None, "ALiBi, which depends on the place of entries"),
        (getattr(layer, "kv_sharing_target_layer_name", None) is not None, "the cache of another layer"),
        (
            backend.forward_includes_kv_cache_update and not backend.is_mla(),  # MLA's layer always writes
            f"backend {backend.get_name()}, which writes to its cache itself",
        ),
        (not hasattr(impl, "do_kv_cache_update"), f"backend {backend.get_name()}, which has no cache update"),
        (_is_composite(impl), f"backend {backend.get_name()}, which combines several backends"),
        (layer.num_kv_heads != heads, f"{layer.num_kv_heads} KV heads on a rank, not {heads}"),
        (
            backend.is_mla() and getattr(layer, "W_UK_T", None) is None,
            f"backend {backend.get_name()}, which packs its weights; choose another --attention-backend",
        ),
    ]
    found = [text for is_met, text in obstacles if is_met]
    if found:
        raise ConfigurationError(f"the SnapStream plugin cannot serve layer {name}: it has {'; '.join(found)}")
