"""Gemma 4: heads of two sizes, values from keys, shared caches, per-layer embeddings, experts beside dense blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from snapstream.cache import EntryShape, LayerGroup
from snapstream.errors import CheckpointError
from snapstream.kernels.buffers import BufferView
from snapstream.kernels.operations import Gate, Norm, Operation
from snapstream.models.attention import GroupedAttention, attention_places
from snapstream.models.block import Block, block_places
from snapstream.models.experts import ExpertNames, MixtureOfExperts, expert_places
from snapstream.models.families.family import Family
from snapstream.models.families.gemma import GEMMA_NAMES
from snapstream.models.families.grouped import FULL, SLIDING, grouped_fields, softmax_experts, without_float16
from snapstream.models.joined import Joined
from snapstream.models.layer_inputs import layer_input_places, part_of_layer
from snapstream.models.layers import FeedForward, Linear, Result, RMSNorm
from snapstream.models.names import Place, linear_places, norm_places
from snapstream.models.spec import ExpertShape, LayerInputs, ModelSpec

_EXPERTS = ExpertNames(router="router.proj", joined=Joined.ROWS)


def _fields(config: Any, architecture: str) -> dict[str, Any]:
    if not hasattr(config, "per_layer_config"):
        raise CheckpointError(f"{architecture} needs a later version of transformers; 5.19 is one that works")
    if config.use_bidirectional_attention == "all":
        raise CheckpointError(f"{architecture} with use_bidirectional_attention='all' is not supported")
    count, types = config.num_hidden_layers, list(config.layer_types)
    first = count - config.num_kv_shared_layers
    own, shared = types[:first], range(first, count)
    if not {*types[first:]} <= {*own}:
        raise CheckpointError(f"{architecture}: layers without a cache are of a type that no layer with one has")
    inputs = getattr(config, "hidden_size_per_layer_input", 0) or 0
    read = grouped_fields(config.per_layer_config[0], own)  # the sizes of heads are those of one layer
    groups = tuple(_group(group, own[group.layers[0]], config) for group in read["groups"])
    return (
        read
        | without_float16(config)
        | {
            "kv_heads": groups[0].entry.heads,
            "head_dim": groups[0].entry.size,
            "groups": groups,
            "shared_from": {layer: first - 1 - own[::-1].index(types[layer]) for layer in shared},
            "values_from_keys": frozenset(
                layer for layer, kind in enumerate(types) if kind == FULL and config.attention_k_eq_v
            ),
            "wide_layers": frozenset(shared if config.use_double_wide_mlp else ()),
            "layer_inputs": LayerInputs(inputs, config.vocab_size_per_layer_input) if inputs else None,
            "experts": _experts(config) if getattr(config, "enable_moe_block", False) else None,
            "scale": 1.0,
            "logit_cap": float(config.final_logit_softcapping or 0.0),
            "qk_norm": "head",
            "norms_values": True,
            "norms_after": True,
            "wide_norms": True,
            "embedding_factor": config.hidden_size**0.5,
            "rounds_embedding_factor": True,
        }
    )


def _group(group: LayerGroup, kind: str, config: Any) -> LayerGroup:
    """A group with heads of its own, and its window, even if no sequence is longer."""
    layer = config.per_layer_config[group.layers[0]]
    entry = EntryShape(layer.num_key_value_heads, layer.head_dim, latent=False)
    return replace(group, entry=entry, window=config.sliding_window if kind == SLIDING else None)


def _experts(config: Any) -> ExpertShape:
    config.num_experts_per_tok = config.top_k_experts
    shape = softmax_experts(config, count=config.num_experts, inner=config.moe_intermediate_size, normalize=True)
    return replace(shape, beside=True)


class DenseWithExperts(nn.Module):
    """A feed-forward block and a mixture of experts, whose results are normalized and added up."""

    def __init__(self, spec: ModelSpec, layer: int, shape: ExpertShape) -> None:
        super().__init__()
        size = spec.hidden_size
        self.root = size**-0.5
        self.dense = FeedForward(size, spec.inner_size(layer), activation=spec.activation)
        self.experts = MixtureOfExperts(size, shape, spec.activation)
        self.dense_result_norm, self.router_norm, self.experts_norm, self.experts_result_norm = (
            RMSNorm(size, spec.norm_epsilon, wide=spec.wide_norms) for _ in range(4)
        )

    def operations(self, source: BufferView, result: Result) -> Iterator[Operation]:
        """Both as operations. Experts and their router read the residual stream, not ``source``."""
        assert not result.add, result
        size = source.size
        x, routed, given, made = (BufferView(name, size) for name in ("x", "routed", "given", "beside"))
        yield from self.dense.operations(source, Result(made))
        yield self.dense_result_norm.operation(made, result.target)
        yield self.router_norm.operation(x, routed)
        yield self.experts_norm.operation(x, given)
        yield from self.experts.operations(given, Result(made), routed, self.root)
        yield self.experts_result_norm.operation(made, result.target, add=True)


class Gemma4Block(Block):
    """A layer that may have a third branch, which reads the layer's own input; its result has a factor."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        both = None if spec.experts is None else DenseWithExperts(spec, layer, spec.experts)
        super().__init__(spec, layer, GroupedAttention(spec, layer), both)
        size, self.layer, self.activation = spec.hidden_size, layer, spec.activation
        self.scalar = nn.Parameter(torch.ones(1))
        self.inputs = spec.layer_inputs.size if spec.layer_inputs else 0
        if self.inputs:
            self.input_gate, self.input_projection = Linear(size, self.inputs), Linear(self.inputs, size)
            self.input_norm = RMSNorm(size, spec.norm_epsilon, wide=spec.wide_norms)

    def operations(self, layer: int, x: BufferView, angles: BufferView) -> Iterator[Operation]:
        """The layer as operations; its results are added to ``x``."""
        *most, last = self._branches(layer, x, angles)
        assert isinstance(last, Norm)
        yield from most
        yield replace(last, factor=self.scalar)

    def _branches(self, layer: int, x: BufferView, angles: BufferView) -> Iterator[Operation]:
        yield from super().operations(layer, x, angles)
        if self.inputs:
            own = part_of_layer(self.layer, self.inputs)
            gates, gated, result = (
                BufferView("input_gates", self.inputs),
                BufferView("gated", self.inputs),
                BufferView("branch", x.size),
            )
            yield self.input_gate.operation(x, gates)
            yield Gate(gates, gated, self.activation, own)
            yield self.input_projection.operation(gated, result)
            yield self.input_norm.operation(result, x, add=True)


def _places(source: str, target: str, spec: ModelSpec, layer: int) -> dict[str, Place]:
    hidden, norms = spec.hidden_size, {}
    attention = attention_places(f"{source}.self_attn", f"{target}.attention", spec, layer)
    dense = f"{target}.feed_forward" if spec.experts is None else f"{target}.feed_forward.dense"
    places = block_places(source, target, spec, layer, attention, GEMMA_NAMES, feed_forward=dense)
    places[f"{source}.layer_scalar"] = Place(f"{target}.scalar", (1,))
    if spec.experts is not None:
        target_of_both = f"{target}.feed_forward"
        places |= expert_places(source, f"{target_of_both}.experts", hidden, spec.experts, _EXPERTS)
        places[f"{source}.router.scale"] = Place(f"{target_of_both}.router_norm.weight", (hidden,))
        norms = {
            "post_feedforward_layernorm_1": "feed_forward.dense_result_norm",
            "pre_feedforward_layernorm_2": "feed_forward.experts_norm",
            "post_feedforward_layernorm_2": "feed_forward.experts_result_norm",
        }
    if spec.layer_inputs is not None:
        size = spec.layer_inputs.size
        places |= linear_places(f"{source}.per_layer_input_gate", f"{target}.input_gate", size, hidden)
        places |= linear_places(f"{source}.per_layer_projection", f"{target}.input_projection", hidden, size)
        norms |= {"post_per_layer_input_norm": "input_norm"}
    return places | norm_places(source, target, spec, **norms)


GEMMA4 = Family(
    architectures=("Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM"),
    fields=_fields,
    block=Gemma4Block,
    places=_places,
    apart=layer_input_places,
    joined_experts=Joined.ROWS,
)
