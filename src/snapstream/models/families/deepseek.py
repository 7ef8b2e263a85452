"""DeepSeek-V2, V3 and R1, and Mistral 4: multi-head latent attention (MLA) and mixtures of experts.

MLA caches one vector per token for all heads, the *latent*: a compressed form of all keys and values (``rank``
elements) and one rotated key (``rope`` elements). The keys of a head are a linear map of the compressed part. This map
is applied to the query (*absorbed*) instead of expanding the keys, so heads attend to latents directly.

This is one KV head whose keys are the latents and whose values are their first ``rank`` elements. To the rest of the
package it is grouped attention with one group (DeepSeek-V2, arXiv 2405.04434, section 2.1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from snapstream.errors import CheckpointError
from snapstream.kernels.buffers import BufferView
from snapstream.kernels.operations import Attend, HeadProduct, Operation, Rotate, ScaleByPosition, Store
from snapstream.kernels.weight import DenseWeight
from snapstream.models.block import Block, block_places
from snapstream.models.experts import check_experts
from snapstream.models.families.family import Family
from snapstream.models.families.grouped import query_growth
from snapstream.models.joined import Joined
from snapstream.models.layers import Linear, Result, RMSNorm
from snapstream.models.names import Place, linear_places
from snapstream.models.spec import ExpertShape, LatentShape, ModelSpec

_MISTRAL = "Mistral4ForCausalLM"


class LatentAttention(nn.Module):
    """The projections before and after attention in MLA, in absorbed form."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        shape = spec.latent
        assert shape is not None
        self.heads, self.shape, self.scale, self.growth = spec.heads, shape, spec.scale, spec.query_growth
        queries = spec.heads * (shape.nope + shape.rope)
        self.query_down: Linear | None = None
        self.query_norm: RMSNorm | None = None
        if shape.query_rank is not None:
            self.query_down = Linear(spec.hidden_size, shape.query_rank, bias=spec.qkv_bias)
            self.query_norm = RMSNorm(shape.query_rank, shape.norm_epsilon)
        self.query = Linear(shape.query_rank or spec.hidden_size, queries, bias=False)
        self.latent = Linear(spec.hidden_size, shape.rank + shape.rope, bias=spec.qkv_bias)
        self.latent_norm = RMSNorm(shape.rank, shape.norm_epsilon)
        # Would expand a latent: per head, to `nope` elements of its key and `value` elements of its value.
        self.expand = nn.Parameter(torch.empty(spec.heads, shape.nope + shape.value, shape.rank))
        self.output = Linear(spec.heads * shape.value, spec.hidden_size, bias=spec.output_bias)

    def operations(self, layer: int, source: BufferView, result: Result, angles: BufferView) -> Iterator[Operation]:
        """Attention as operations."""
        H, shape = self.heads, self.shape
        width, entry = shape.nope + shape.rope, shape.rank + shape.rope
        low = source
        if self.query_down is not None and self.query_norm is not None:
            low = BufferView("low", self.query_down.out_features)
            yield self.query_down.operation(source, low)
            yield self.query_norm.operation(low, low)
        yield self.query.operation(low, BufferView("heads", H * width))
        yield self.latent.operation(source, BufferView("latent", entry))
        compressed, key = BufferView("latent", shape.rank), BufferView("latent", shape.rope, offset=shape.rank)
        yield self.latent_norm.operation(compressed, compressed)
        yield Rotate(key, key, angles, shape.rope_in_pairs)
        yield Store(BufferView("latent", entry), None, layer)
        nope, rope = (
            BufferView("heads", shape.nope, H, stride=width),
            BufferView("heads", shape.rope, H, shape.nope, width),
        )
        absorbed, turned = (
            BufferView("query", shape.rank, H, stride=entry),
            BufferView("query", shape.rope, H, shape.rank, entry),
        )
        yield HeadProduct(nope, absorbed, DenseWeight(self.expand[:, : shape.nope]), transposed=True)
        yield Rotate(rope, turned, angles, shape.rope_in_pairs)
        if self.growth is not None:
            yield ScaleByPosition(BufferView("query", entry, H), *self.growth)
        mixed, value = BufferView("attended", shape.rank, H), BufferView("value", shape.value, H)
        yield Attend(BufferView("query", entry, H), mixed, layer, self.scale)
        yield HeadProduct(mixed, value, DenseWeight(self.expand[:, shape.nope :]), transposed=False)
        yield self.output.operation(BufferView("value", H * shape.value), result)


def _fields(config: Any, architecture: str) -> dict[str, Any]:
    bias, latent = bool(getattr(config, "attention_bias", False)), _latent(config)
    return {
        "kv_heads": 1,
        "head_dim": latent.rank + latent.rope,
        "scale": _scale(config, latent),
        "qkv_bias": bias,
        "output_bias": bias,
        "latent": latent,
        "experts": _experts(config, architecture),
        "query_growth": query_growth(config) if architecture == _MISTRAL else None,
        "extra_layers": getattr(config, "num_nextn_predict_layers", None) or 0,
    }


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


def _scale(config: Any, shape: LatentShape) -> float:
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
    elif architecture == _MISTRAL:  # groups of its softmax would be rated by their two best experts
        allowed = {"n_group": (1, None)}
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
    grouped = corrected or getattr(config, "topk_method", None) == "group_limited_greedy"
    groups = (config.n_group or 1) if grouped else 1
    count, chosen_groups = config.n_routed_experts, (config.topk_group or 1) if groups > 1 else 1
    chosen = config.num_experts_per_tok
    check_experts(count, chosen, groups, chosen_groups, least=2 if corrected else 1)
    return ExpertShape(
        count=count,
        chosen=chosen,
        inner=config.moe_intermediate_size,
        shared_inner=(config.n_shared_experts or 0) * config.moe_intermediate_size,
        dense_layers=frozenset(range(first)),
        groups=groups,
        chosen_groups=chosen_groups,
        corrected=corrected,
        normalize=bool(config.norm_topk_prob),  # never in V2
        scale=float(config.routed_scaling_factor),
    )


def attention_places(source: str, target: str, spec: ModelSpec) -> dict[str, Place]:
    """Where the tensors of latent attention go."""
    shape = spec.latent
    assert shape is not None
    hidden, queries = spec.hidden_size, spec.heads * (shape.nope + shape.rope)
    if shape.query_rank is None:
        places = linear_places(f"{source}.q_proj", f"{target}.query", queries, hidden, False)
    else:
        places = linear_places(f"{source}.q_a_proj", f"{target}.query_down", shape.query_rank, hidden, spec.qkv_bias)
        places[f"{source}.q_a_layernorm.weight"] = Place(f"{target}.query_norm.weight", (shape.query_rank,))
        places |= linear_places(f"{source}.q_b_proj", f"{target}.query", queries, shape.query_rank, False)
    latent = shape.rank + shape.rope
    places |= linear_places(f"{source}.kv_a_proj_with_mqa", f"{target}.latent", latent, hidden, spec.qkv_bias)
    places[f"{source}.kv_a_layernorm.weight"] = Place(f"{target}.latent_norm.weight", (shape.rank,))
    expanded = spec.heads * (shape.nope + shape.value)
    places[f"{source}.kv_b_proj.weight"] = Place(f"{target}.expand", (expanded, shape.rank))
    places |= linear_places(f"{source}.o_proj", f"{target}.output", hidden, spec.heads * shape.value, spec.output_bias)
    return places


DEEPSEEK = Family(
    architectures=("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", _MISTRAL),
    fields=_fields,
    block=lambda spec, layer: Block(spec, layer, LatentAttention(spec)),
    places=lambda source, target, spec, layer: block_places(
        source, target, spec, layer, attention_places(f"{source}.self_attn", f"{target}.attention", spec)
    ),
    joined_experts=Joined.ROWS,
)
