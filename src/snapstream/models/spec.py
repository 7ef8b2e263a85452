"""The shape and other properties of a model, read from its ``transformers`` configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from snapstream.cache import CacheSizes, EntryShape, EntryType, LayerGroup
from snapstream.kernels.formats import Format
from snapstream.kernels.plain import Activation


@dataclass(frozen=True)
class LatentShape:
    """Shape of latent attention (MLA).

    Attributes:
        query_rank: Width of the low-rank form of queries; ``None`` if they are projected directly.
        rank: Elements of a token's compressed keys and values.
        nope: Elements of a query or key head that are not rotated.
        rope: Elements of a query head that are rotated, and elements of a token's single rotated key.
        value: Elements of a value head.
        rope_in_pairs: Whether neighboring elements are rotated together, instead of elements of the two halves.
        norm_epsilon: Epsilon of the norms of the low-rank forms.
    """

    query_rank: int | None
    rank: int
    nope: int
    rope: int
    value: int
    rope_in_pairs: bool
    norm_epsilon: float


@dataclass(frozen=True)
class LayerInputs:
    """What each layer reads besides the residual stream: an embedding of each token, and its own part of a projection.

    Attributes:
        size: Elements per layer.
        vocab_size: Rows of the embedding.
    """

    size: int
    vocab_size: int


@dataclass(frozen=True)
class ExpertShape:
    """Shape of a mixture of experts.

    Attributes:
        count: Number of routed experts.
        chosen: Number of routed experts per token.
        inner: Width inside each expert.
        dense_layers: Layers without experts.
        groups: Number of groups of experts.
        chosen_groups: Number of groups that a token's experts come from.
        corrected: Whether routing works as in DeepSeek-V3: a sigmoid per expert, a learned correction in the selection,
            and groups rated by their two best experts. Otherwise, it is a softmax over all experts.
        normalize: Whether the weights of the selected experts are normalized to a sum of 1 before they are scaled.
        scale: Factor on the weights.
        biased: Whether the router and the products have biases.
        shared_inner: Width of the experts that process every token, together; 0 if there are none.
        gates_shared: Whether their result is multiplied by the sigmoid of a gate.
        beside: Whether layers have a feed-forward block, too, with norms of its own (Gemma 4). Then each expert's
            weight has a factor of its own.
    """

    count: int
    chosen: int
    inner: int
    dense_layers: frozenset[int]
    groups: int
    chosen_groups: int
    corrected: bool
    normalize: bool
    scale: float
    biased: bool = False
    shared_inner: int = 0
    gates_shared: bool = False
    beside: bool = False


@dataclass(frozen=True)
class StoredRows:
    """How some rows of a weight are stored.

    Attributes:
        count: How many.
        format: The format of their blocks; ``None`` for a tensor of numbers.
    """

    count: int
    format: Format | None = None


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder.

    Attributes:
        architecture: Its name in ``config.json``; see :mod:`snapstream.models.families`.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the feed-forward block.
        layers: Decoder layers.
        shared_from: Of each of the last layers that has no cache: the layer whose cache it reads.
        wide_layers: Layers whose feed-forward block is twice as wide.
        groups: Groups of layers, those that a cache budget applies to first. By default, one of all layers.
        heads: Query heads (``H``).
        kv_heads: KV heads in the caches of the first group (``N``); 1 with latent attention.
        head_dim: Elements of a key in these caches (``D``); with latent attention, of the whole latent.
        scale: Factor on attention logits.
        attention_cap: Soft cap of attention logits; 0 for none.
        has_sinks: Whether each head has an extra logit in its softmax, without a value.
        norm_epsilon: Added to the variance in RMS norms.
        max_position: Maximum sequence length that the model was trained for, including RoPE scaling.
        tied_embeddings: Whether the output projection is the embedding.
        qkv_bias: Bias on the query, key and value projections (Qwen2).
        output_bias: Bias on attention's output projection.
        mlp_bias: Bias in the feed-forward block.
        qk_norm: RMS norm of queries and keys: of each ``"head"`` (Qwen3), of ``"all"`` heads together (OLMo), or none.
        qk_factors: What normalized queries and keys are multiplied by, if their norms have no weights.
        norms_values: Whether values are normalized, too, by a norm without weights.
        values_from_keys: Layers whose values are the keys, as they are projected.
        norms_before: Whether attention and feed-forward read normalized states.
        norms_after: Whether their results are normalized before they are added to the residual stream.
        norm_after_epsilon: Epsilon of these norms, if it is another one.
        norms_embeddings: Whether embeddings are normalized, by a norm without weights.
        wide_norms: Whether norms round once, after the product with their weight, which is float32.
        norm_offset: What a norm's weight in a checkpoint lacks: 1 if weights are stored as their distance from it.
        rotated: Elements of a head that are rotated; ``None`` for all of them.
        rotates_pairs: Whether neighboring elements are rotated together, instead of elements of the two halves.
        unrotated_layers: Layers whose queries and keys are not rotated.
        query_growth: By what queries grow with their position, and after how many tokens each time; see
            :class:`~snapstream.kernels.operations.ScaleByPosition`. ``None`` if they do not.
        gates_attention: Whether attention's results are multiplied by the sigmoid of gates, which are projected with
            the queries.
        gates_apart: Whether checkpoints hold these gates in a tensor of their own.
        joined_inputs: Which projections of layers with a state checkpoints join, ``"qkvz"`` or ``"ba"``: rows of all
            key heads in turn (Qwen3-Next).
        value_heads_in_turn: Whether value heads of such layers take key heads in turn; see
            :class:`~snapstream.kernels.recurrence.Recur`.
        activation: Activation of the feed-forward blocks.
        embedding_factor: Factor on embeddings.
        rounds_embedding_factor: Whether it is rounded to the type of the embeddings.
        residual_factor: Factor on what is added to the residual stream.
        logit_factor: Factor on logits.
        logit_cap: Soft cap of logits; 0 for none.
        dtype: Dtype that the checkpoint was saved in.
        eos_token_ids: Tokens that end a sequence.
        source: The ``transformers`` configuration, for RoPE parameters.
        wrapped: Whether the checkpoint is of a model of texts and images, of which this is the part for texts.
        longest: Maximum length of a sequence; LongRoPE has other frequencies for long ones.
        latent: Latent attention, if the model has it.
        experts: Mixture of experts, if the model has one.
        layer_inputs: What layers read besides the residual stream, if anything.
        extra_layers: Number of extra layers for multi-token prediction that the checkpoint may contain.
        ignored_layers: Number of such layers, after these, that are not used. If there are any, tensors named ``mtp.*``
            are ignored, too.
        has_mtp: Whether the first of them is used as a next-token module, which drafts tokens.
        stored_as: Formats of the rows of weights, by the name of the module that holds them; of others, all rows are
            tensors of numbers.
        weight_block: Rows and columns of a block of a float8 weight; each block has one scale. ``None``: one scale per
            weight.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    norm_epsilon: float
    max_position: int
    tied_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    source: Any
    qk_norm: Literal["head", "all"] | None = None
    qk_factors: tuple[float, float] | None = None
    norms_values: bool = False
    values_from_keys: frozenset[int] = frozenset()
    norms_before: bool = True
    norms_after: bool = False
    norm_after_epsilon: float | None = None
    norms_embeddings: bool = False
    wide_norms: bool = False
    norm_offset: float = 0.0
    rotated: int | None = None
    rotates_pairs: bool = False
    unrotated_layers: frozenset[int] = frozenset()
    query_growth: tuple[float, int] | None = None
    gates_attention: bool = False
    gates_apart: bool = False
    joined_inputs: tuple[str, ...] = ()
    value_heads_in_turn: bool = False
    activation: Activation = Activation.SILU
    embedding_factor: float = 1.0
    rounds_embedding_factor: bool = False
    residual_factor: float = 1.0
    logit_factor: float = 1.0
    logit_cap: float = 0.0
    attention_cap: float = 0.0
    has_sinks: bool = False
    latent: LatentShape | None = None
    experts: ExpertShape | None = None
    layer_inputs: LayerInputs | None = None
    shared_from: Mapping[int, int] = field(default_factory=dict)
    wide_layers: frozenset[int] = frozenset()
    extra_layers: int = 0
    ignored_layers: int = 0
    has_mtp: bool = False
    weight_block: tuple[int, int] | None = (128, 128)
    groups: tuple[LayerGroup, ...] = ()
    wrapped: bool = False
    longest: int | None = None
    stored_as: Mapping[str, tuple[StoredRows, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.groups:
            object.__setattr__(self, "groups", (LayerGroup(tuple(range(self.layers)), self.entry),))
        kinds = [(group.has_state, group.slides) for group in self.groups]
        assert kinds == sorted(kinds), "groups with a budget come first, those with a state last"
        assert sorted(layer for group in self.groups for layer in group.layers) == list(range(self.cached_layers))

    def with_next_token(self) -> ModelSpec:
        """The same model with its next-token module, whose cache has the layout of the first group."""
        first, *others = self.groups
        longer = replace(first, layers=(*first.layers, self.layers))
        return replace(self, has_mtp=True, groups=(longer, *others))

    def for_sequences_of(self, longest: int) -> ModelSpec:
        """The same model for sequences of at most ``longest`` tokens: no window needs to be longer."""
        cut = (
            replace(group, window=min(group.window, longest)) if group.window and group.slides else group
            for group in self.groups
        )
        return replace(self, groups=tuple(cut), longest=longest)

    @property
    def has_budget(self) -> bool:
        """Whether a cache budget applies to any layer; if not, all have sliding windows."""
        return self.groups[0].has_budget

    def cache_of(self, layer: int) -> int:
        """The layer whose cache a layer reads: its own, or that of an earlier one."""
        return self.shared_from.get(layer, layer)

    def group_of(self, layer: int) -> int:
        """Index of a layer's group, or that of the layer whose cache it reads."""
        cache = self.cache_of(layer)
        return next(index for index, group in enumerate(self.groups) if cache in group.layers)

    def layer_group(self, layer: int) -> LayerGroup:
        """A layer's group."""
        return self.groups[self.group_of(layer)]

    @property
    def entry(self) -> EntryShape:
        """Shape of the cache entry of one token in a layer, if the layers' do not differ."""
        return EntryShape(self.kv_heads, self.head_dim, self.latent is not None)

    def entry_of(self, layer: int) -> EntryShape:
        """Shape of the cache entry of one token in a layer that attends."""
        entry = self.layer_group(layer).entry
        assert isinstance(entry, EntryShape)
        return entry

    @property
    def entries(self) -> list[EntryShape]:
        """Shapes of the cache entries of one token, one per group of layers that attend."""
        return [group.entry for group in self.groups if isinstance(group.entry, EntryShape)]

    @property
    def largest_head(self) -> int:
        """Elements of the largest key."""
        return max(entry.size for entry in self.entries)

    def values_of(self, entry: EntryShape) -> int:
        """Elements of an entry's value in attention; for a latent, the first ``rank`` elements are the value."""
        return entry.size if self.latent is None else self.latent.rank

    @property
    def value_size(self) -> int:
        """Elements of the largest value in attention."""
        return max(map(self.values_of, self.entries))

    @property
    def cached_layers(self) -> int:
        """Number of layers that have a cache: the first ones, and the next-token module's."""
        return self.own_caches + self.has_mtp

    @property
    def own_caches(self) -> int:
        """Number of layers, not counting that module's, that have a cache of their own."""
        return self.layers - len(self.shared_from)

    def inner_size(self, layer: int) -> int:
        """Width inside a layer's feed-forward block."""
        return self.intermediate_size * (2 if layer in self.wide_layers else 1)

    @property
    def has_dense_experts(self) -> bool:
        """Whether there are experts of which any row is not in blocks."""
        if self.experts is None:
            return False
        layers = (layer for layer in range(self.layers) if layer not in self.experts.dense_layers)
        names = (f"blocks.{layer}.feed_forward.{part}" for layer in layers for part in ("gate_up", "down"))
        return not all(name in self.stored_as and all(run.format for run in self.stored_as[name]) for name in names)

    @property
    def layer_parameters(self) -> int:
        """Approximate number of weights of one layer that a token is multiplied with."""
        inner = self.intermediate_size
        if self.experts is not None:
            dense = self.intermediate_size if self.experts.beside else 0
            inner = self.experts.chosen * self.experts.inner + self.experts.shared_inner + dense
        return self.hidden_size * ((2 * self.heads + 2 * self.kv_heads) * self.largest_head + 3 * inner)

    def kv_bytes_per_token(self, entry_type: EntryType) -> int:
        """Bytes of keys and values, or of latents, that one token takes over all layers."""
        return sum(len(group.layers) * group.entry.nbytes(entry_type) for group in self.groups if not group.has_state)

    def budget_bytes_per_token(self, entry_type: EntryType) -> int:
        """Bytes that one entry of a budget takes over all layers that have one."""
        return sum(len(group.layers) * group.entry.nbytes(entry_type) for group in self.groups if group.has_budget)

    def fixed_cache_bytes(self, entry_type: EntryType) -> int:
        """Bytes of one sequence's cache whatever its budget: windows, states and frames."""
        return self.sizes(entry_type).of([group.entries(0) for group in self.groups])

    def fixed_bytes(self, entry_type: EntryType) -> int:
        """Bytes of one sequence besides its entries: of states, with the inputs they look back to, and of frames."""
        return sum(group.nbytes((group.window or 0) * group.has_state, entry_type) for group in self.groups)

    @property
    def has_states(self) -> bool:
        """Whether any layer has a state."""
        return self.groups[-1].has_state

    def that_takes_back(self, inputs: int) -> ModelSpec:
        """The same model with slots that keep so many more inputs to layers with a state."""
        groups = (replace(group, taken_back=inputs) if group.has_state else group for group in self.groups)
        return replace(self, groups=tuple(groups))

    def sizes(self, entry_type: EntryType) -> CacheSizes:
        """Sizes of caches with entries of a type."""
        return CacheSizes(self.groups, entry_type)


def end_tokens(value: Any) -> tuple[int, ...]:
    """The ``eos_token_id`` of a configuration as a tuple; it may be one token, several or ``None``."""
    return () if value is None else (value,) if isinstance(value, int) else tuple(map(int, value))
