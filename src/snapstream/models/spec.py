"""The shape and other properties of a model, read from its ``transformers`` configuration."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from snapstream.cache import EntryShape
from snapstream.errors import CheckpointError
from snapstream.models.rope import longest_sequence

SUPPORTED_ARCHITECTURES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM",
)
_LATENT = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")


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
class ExpertShape:
    """Shape of a mixture of experts.

    Attributes:
        count: Number of routed experts.
        chosen: Number of routed experts per token.
        inner: Width inside each expert.
        shared: Number of experts that process every token.
        first_layer: First layer with experts; the layers before it are dense.
        groups: Number of groups of experts.
        chosen_groups: Number of groups that a token's experts come from.
        corrected: Whether routing works as in V3: a sigmoid per expert, a learned correction in the selection, and
            groups rated by their two best experts. Otherwise, as in V2, it is a softmax over all experts.
        normalize: Whether the weights of the selected experts are normalized to a sum of 1 before they are scaled.
        scale: Factor on the weights.
    """

    count: int
    chosen: int
    inner: int
    shared: int
    first_layer: int
    groups: int
    chosen_groups: int
    corrected: bool
    normalize: bool
    scale: float


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder.

    Attributes:
        architecture: One of :data:`SUPPORTED_ARCHITECTURES`.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the feed-forward block.
        layers: Decoder layers.
        heads: Query heads (``H``).
        kv_heads: KV heads in the cache (``N``); 1 with latent attention.
        head_dim: Elements of a cache entry's key (``D``); with latent attention, of the whole latent.
        scale: Factor on attention logits.
        norm_epsilon: Added to the variance in RMS norms.
        max_position: Maximum sequence length that the model was trained for, including RoPE scaling.
        tied_embeddings: Whether the output projection is the embedding.
        qkv_bias: Bias on the query, key and value projections (Qwen2).
        output_bias: Bias on attention's output projection.
        mlp_bias: Bias in the feed-forward block.
        qk_norm: RMS norm on each query and key head (Qwen3).
        dtype: Dtype that the checkpoint was saved in.
        eos_token_ids: Tokens that end a sequence.
        source: The ``transformers`` configuration, for RoPE parameters.
        latent: Latent attention, if the model has it.
        experts: Mixture of experts, if the model has one.
        extra_layers: Number of extra layers for multi-token prediction that the checkpoint may contain.
        reads_ahead: Whether the first of them is used as a next-token module, which drafts tokens.
        weight_block: Rows and columns of a block of a float8 weight; each block has one scale.
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
    qk_norm: bool
    dtype: torch.dtype
    eos_token_ids: tuple[int, ...]
    source: Any
    latent: LatentShape | None = None
    experts: ExpertShape | None = None
    extra_layers: int = 0
    reads_ahead: bool = False
    weight_block: tuple[int, int] = (128, 128)

    @classmethod
    def from_config(cls, config: Any, more_ends: tuple[int, ...] = ()) -> ModelSpec:
        """Read a ``transformers`` configuration.

        Args:
            config: The configuration.
            more_ends: Tokens that end a sequence, in addition to those in the configuration.

        Raises:
            CheckpointError: The architecture, or one of its features, is not supported.
        """
        architecture = (
            getattr(config, "architectures", None) or [type(config).__name__.replace("Config", "ForCausalLM")]
        )[0]
        if architecture not in SUPPORTED_ARCHITECTURES:
            raise CheckpointError(
                f"architecture {architecture} is not supported; supported: {', '.join(SUPPORTED_ARCHITECTURES)}"
            )
        if config.hidden_act != "silu":
            raise CheckpointError(f"activation {config.hidden_act!r} is not supported; supported: silu")
        rope_type = config.rope_parameters.get("rope_type", "default")
        if rope_type not in ("default", "linear", "llama3", "yarn"):
            raise CheckpointError(
                f"RoPE scaling {rope_type!r} is not supported; supported: default, linear, llama3, yarn"
            )
        max_position = longest_sequence(config)
        window = _sliding_window(config, architecture)
        if window is not None and window < max_position:
            raise CheckpointError(
                f"sliding-window attention ({window} of {max_position} tokens) is not supported: such a model drops "
                "tokens itself; set sliding_window to null in config.json only if the model was trained without it"
            )
        bias = bool(getattr(config, "attention_bias", False))
        latent = _latent(config) if architecture in _LATENT else None
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(
            architecture=architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=1 if latent else config.num_key_value_heads or config.num_attention_heads,
            head_dim=latent.rank + latent.rope if latent else head_dim,
            scale=_latent_scale(config, latent) if latent else head_dim**-0.5,
            norm_epsilon=config.rms_norm_eps,
            max_position=max_position,
            tied_embeddings=bool(config.tie_word_embeddings),
            qkv_bias=bias or architecture == "Qwen2ForCausalLM",
            output_bias=bias,
            mlp_bias=bool(getattr(config, "mlp_bias", False)),
            qk_norm=architecture == "Qwen3ForCausalLM",
            dtype=_dtype(config),
            eos_token_ids=tuple(sorted({*end_tokens(getattr(config, "eos_token_id", None)), *more_ends})),
            source=config,
            latent=latent,
            experts=_experts(config, architecture) if architecture in _LATENT else None,
            extra_layers=getattr(config, "num_nextn_predict_layers", None) or 0,
            weight_block=_weight_block(config),
        )

    @property
    def entry(self) -> EntryShape:
        """Shape of the cache entry of one token in one layer."""
        return EntryShape(self.kv_heads, self.head_dim, self.latent is not None)

    @property
    def value_size(self) -> int:
        """Elements of a value in attention; for a latent, the first ``rank`` elements are the value."""
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def cached_layers(self) -> int:
        """Number of layers that have a cache; the next-token module's is the last."""
        return self.layers + self.reads_ahead

    @property
    def layer_parameters(self) -> int:
        """Approximate number of weights of one layer that a token is multiplied with."""
        inner = self.intermediate_size
        if self.experts is not None:
            inner = (self.experts.chosen + self.experts.shared) * self.experts.inner
        return self.hidden_size * ((2 * self.heads + 2 * self.kv_heads) * self.head_dim + 3 * inner)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values, or of latents, that one token takes over all layers."""
        return self.cached_layers * self.entry.nbytes(dtype)

    def saved_bytes_per_entry(self, dtype: torch.dtype) -> int:
        """Bytes of one saved entry over all layers: like :meth:`kv_bytes_per_token`, plus each head's true position."""
        return self.kv_bytes_per_token(dtype) + self.cached_layers * self.kv_heads * 4


def end_tokens(value: Any) -> tuple[int, ...]:
    """The ``eos_token_id`` of a configuration as a tuple; it may be one token, several or ``None``."""
    return () if value is None else (value,) if isinstance(value, int) else tuple(map(int, value))


def _dtype(config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None) or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(f"checkpoint dtype {dtype} is not supported; supported: float32, bfloat16, float16")
    return dtype


def _sliding_window(config: Any, architecture: str) -> int | None:
    """How many tokens attention can look back, or ``None`` for all."""
    window: int | None = getattr(config, "sliding_window", None)
    if architecture == "MistralForCausalLM":
        return window
    return window if "sliding_attention" in (getattr(config, "layer_types", None) or ()) else None


def _latent(config: Any) -> LatentShape:
    # The norms inside attention have transformers' default epsilon; the configured one is for the other norms.
    return LatentShape(
        query_rank=config.q_lora_rank,
        rank=config.kv_lora_rank,
        nope=config.qk_nope_head_dim,
        rope=config.qk_rope_head_dim,
        value=config.v_head_dim,
        rope_in_pairs=bool(getattr(config, "rope_interleave", True)),
        norm_epsilon=1e-6,
    )


def _latent_scale(config: Any, shape: LatentShape) -> float:
    """Factor on attention logits; YaRN's ``mscale_all_dim`` sharpens attention in long contexts."""
    rope = config.rope_parameters
    scale: float = (shape.nope + shape.rope) ** -0.5
    factor, all_dim = rope.get("factor", 1.0), rope.get("mscale_all_dim")
    if rope.get("rope_type", "default") == "default" or not all_dim or factor <= 1:
        return scale
    return scale * float(0.1 * all_dim * math.log(factor) + 1.0) ** 2


def _experts(config: Any, architecture: str) -> ExpertShape | None:
    """The shape of the mixture of experts, or ``None`` if all layers are dense.

    Raises:
        CheckpointError: The kind of routing is not supported.
    """
    first = config.first_k_dense_replace or 0
    if first >= config.num_hidden_layers:
        return None
    corrected = architecture == "DeepseekV3ForCausalLM"
    allowed: dict[str, tuple[Any, ...]]
    if corrected:
        allowed = {"topk_method": ("noaux_tc",), "scoring_func": ("sigmoid",)}
    else:  # transformers and the model's own code disagree about normalized weights in V2
        allowed = {
            "topk_method": ("greedy", "group_limited_greedy"),
            "scoring_func": ("softmax",),
            "norm_topk_prob": (False, None),
        }
    allowed["moe_layer_freq"] = (1,)
    for name, values in allowed.items():
        value = getattr(config, name, values[0])
        if value not in values:
            raise CheckpointError(
                f"{architecture} with {name}={value!r} is not supported; supported: {', '.join(map(str, values))}"
            )
    grouped = corrected or config.topk_method == "group_limited_greedy"
    groups = (config.n_group or 1) if grouped else 1
    count, chosen_groups = config.n_routed_experts, (config.topk_group or 1) if groups > 1 else 1
    chosen = config.num_experts_per_tok
    if count % groups or (groups > 1 and corrected and count // groups < 2):
        raise CheckpointError(f"{count} experts cannot be divided into {groups} groups of two or more")
    if not chosen or chosen > count // groups * chosen_groups:
        raise CheckpointError(f"num_experts_per_tok is {chosen}; {chosen_groups} of {groups} groups hold fewer experts")
    return ExpertShape(
        count=count,
        chosen=chosen,
        inner=config.moe_intermediate_size,
        shared=config.n_shared_experts or 0,
        first_layer=first,
        groups=groups,
        chosen_groups=chosen_groups,
        corrected=corrected,
        normalize=corrected and bool(config.norm_topk_prob),
        scale=float(config.routed_scaling_factor),
    )


def _weight_block(config: Any) -> tuple[int, int]:
    """The block size of float8 weights.

    Raises:
        CheckpointError: The weights are quantized in another way.
    """
    quantisation = getattr(config, "quantization_config", None)
    if quantisation is None:
        return 128, 128
    settings = quantisation if isinstance(quantisation, dict) else quantisation.to_dict()
    method, block = settings.get("quant_method"), settings.get("weight_block_size")
    if method != "fp8" or not isinstance(block, list | tuple) or len(block) != 2:
        raise CheckpointError(
            f"weights quantized with {method!r} (blocks {block}) are not supported; supported: 'fp8' with "
            "weight_block_size, which is converted to the engine's dtype on load"
        )
    return int(block[0]), int(block[1])
