"""The numbers of a model, read from its ``transformers`` configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from snapstream.errors import CheckpointError

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")


@dataclass(frozen=True)
class ModelSpec:
    """Shape of a decoder of the Llama family.

    Attributes:
        architecture: One of :data:`SUPPORTED_ARCHITECTURES`.
        vocab_size: Rows of the embedding.
        hidden_size: Width of the residual stream.
        intermediate_size: Width inside the feed-forward block.
        layers: Decoder layers.
        heads: Query heads (``H``).
        kv_heads: KV heads (``N``).
        head_dim: Head size (``D``).
        norm_epsilon: Added to the variance in RMS norms.
        max_position: Longest sequence the model was made for.
        tied_embeddings: Whether the output projection is the embedding.
        qkv_bias: Bias on the query, key and value projections (Qwen2).
        output_bias: Bias on attention's output projection.
        mlp_bias: Bias in the feed-forward block.
        qk_norm: RMS norm on each query and key head (Qwen3).
        dtype: Type the checkpoint was saved in.
        eos_token_ids: Tokens that end a sequence.
        source: The ``transformers`` configuration, for RoPE parameters.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
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

    @classmethod
    def from_config(cls, config: Any, more_ends: tuple[int, ...] = ()) -> ModelSpec:
        """Read a ``transformers`` configuration.

        Args:
            config: The configuration.
            more_ends: Tokens that end a sequence besides those it names.

        Raises:
            CheckpointError: An architecture or a feature of it that is not supported.
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
        max_position = config.max_position_embeddings
        window = _sliding_window(config, architecture)
        if window is not None and window < max_position:
            raise CheckpointError(
                f"sliding-window attention ({window} of {max_position} tokens) is not supported: such a model drops "
                "tokens by itself; set sliding_window to null in config.json only if the model was trained without it"
            )
        bias = bool(getattr(config, "attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads or config.num_attention_heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
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
        )

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token takes over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * dtype.itemsize


def end_tokens(value: Any) -> tuple[int, ...]:
    """The ``eos_token_id`` of a configuration, which may be one token, several or none."""
    return () if value is None else (value,) if isinstance(value, int) else tuple(map(int, value))


def _dtype(config: Any) -> torch.dtype:
    dtype = getattr(config, "dtype", None) or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise CheckpointError(f"checkpoint dtype {dtype} is not supported; supported: float32, bfloat16, float16")
    return dtype


def _sliding_window(config: Any, architecture: str) -> int | None:
    """Tokens that attention may look back, or ``None`` for all."""
    window: int | None = getattr(config, "sliding_window", None)
    if architecture == "MistralForCausalLM":
        return window
    return window if "sliding_attention" in (getattr(config, "layer_types", None) or ()) else None
