"""Maps the tensors of a Hugging Face checkpoint to the parameters of this package's modules."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torch import Tensor

from snapstream.models.spec import ExpertShape, LatentShape, ModelSpec

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


@dataclass(frozen=True)
class Place:
    """The destination of one tensor of a checkpoint: rows from ``start`` of a parameter, or of one expert's part."""

    parameter: str
    shape: tuple[int, ...]
    start: int = 0
    expert: int | None = None

    def of(self, parameter: Tensor) -> Tensor:
        """The view of the parameter that the tensor fills, in the tensor's shape."""
        whole = parameter if self.expert is None else parameter[self.expert]
        whole = whole.flatten(0, -2) if whole.dim() > 2 else whole
        return whole[self.start : self.start + self.shape[0]]


def tensor_places(spec: ModelSpec) -> dict[str, Place]:
    """The destination of every tensor that a checkpoint of this model must have, by name."""
    places = {
        "model.embed_tokens.weight": Place("embedding.weight", (spec.vocab_size, spec.hidden_size)),
        "model.norm.weight": Place("norm.weight", (spec.hidden_size,)),
    }
    if not spec.tied_embeddings:
        places["lm_head.weight"] = Place("head.weight", (spec.vocab_size, spec.hidden_size))
    for layer in range(spec.layers):
        places |= _layer(f"blocks.{layer}", spec, layer)
    if spec.reads_ahead:
        places |= _next_token("ahead", spec, spec.layers)
    return places


def scale_of(name: str) -> str:
    """Name of the tensor with the scales of a float8 weight."""
    return f"{name}_scale_inv"


def may_be_ignored(name: str, spec: ModelSpec) -> bool:
    """Whether a checkpoint may contain a tensor that has no destination."""
    if name.endswith("rotary_emb.inv_freq"):  # old checkpoints contain RoPE frequencies
        return True
    if spec.tied_embeddings and name == "lm_head.weight":  # a second copy
        return True
    layer = _LAYER.match(name)  # multi-token prediction: layers after the last
    return layer is not None and spec.layers <= int(layer[1]) < spec.layers + spec.extra_layers


def _layer(target: str, spec: ModelSpec, layer: int) -> dict[str, Place]:
    source = f"model.layers.{layer}"
    places = _norms(
        source, target, spec, input_layernorm="attention_norm", post_attention_layernorm="feed_forward_norm"
    )
    attention, feed_forward = f"{target}.attention", f"{target}.feed_forward"
    if spec.latent is None:
        places |= _grouped(f"{source}.self_attn", attention, spec)
    else:
        places |= _latent(f"{source}.self_attn", attention, spec, spec.latent)
    if spec.experts is not None and layer >= spec.experts.first_layer:
        return places | _experts(f"{source}.mlp", feed_forward, spec.hidden_size, spec.experts)
    return places | _gated(f"{source}.mlp", feed_forward, spec.hidden_size, spec.intermediate_size, spec.mlp_bias)


def _next_token(target: str, spec: ModelSpec, layer: int) -> dict[str, Place]:
    """The next-token module's own tensors.

    Its embedding and output projection are the model's; checkpoints may contain second copies of them here.
    """
    source, hidden = f"model.layers.{layer}", spec.hidden_size
    places = _norms(source, target, spec, enorm="embedding_norm", hnorm="hidden_norm")
    places[f"{source}.shared_head.norm.weight"] = Place(f"{target}.norm.weight", (hidden,))
    places |= _linear(f"{source}.eh_proj", f"{target}.join", hidden, 2 * hidden, False)
    return places | _layer(f"{target}.block", spec, layer)


def _norms(source: str, target: str, spec: ModelSpec, **names: str) -> dict[str, Place]:
    return {
        f"{source}.{theirs}.weight": Place(f"{target}.{ours}.weight", (spec.hidden_size,))
        for theirs, ours in names.items()
    }


def _linear(source: str, target: str, rows: int, columns: int, bias: bool, start: int = 0) -> dict[str, Place]:
    places = {f"{source}.weight": Place(f"{target}.weight", (rows, columns), start)}
    if bias:
        places[f"{source}.bias"] = Place(f"{target}.bias", (rows,), start)
    return places


def _grouped(source: str, target: str, spec: ModelSpec) -> dict[str, Place]:
    queries, keys, hidden = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden_size
    places = _linear(f"{source}.q_proj", f"{target}.qkv", queries, hidden, spec.qkv_bias)
    places |= _linear(f"{source}.k_proj", f"{target}.qkv", keys, hidden, spec.qkv_bias, queries)
    places |= _linear(f"{source}.v_proj", f"{target}.qkv", keys, hidden, spec.qkv_bias, queries + keys)
    places |= _linear(f"{source}.o_proj", f"{target}.output", hidden, queries, spec.output_bias)
    if spec.qk_norm:
        places[f"{source}.q_norm.weight"] = Place(f"{target}.query_norm.weight", (spec.head_dim,))
        places[f"{source}.k_norm.weight"] = Place(f"{target}.key_norm.weight", (spec.head_dim,))
    return places


def _latent(source: str, target: str, spec: ModelSpec, shape: LatentShape) -> dict[str, Place]:
    hidden, queries = spec.hidden_size, spec.heads * (shape.nope + shape.rope)
    if shape.query_rank is None:
        places = _linear(f"{source}.q_proj", f"{target}.query", queries, hidden, False)
    else:
        places = _linear(f"{source}.q_a_proj", f"{target}.query_down", shape.query_rank, hidden, spec.qkv_bias)
        places[f"{source}.q_a_layernorm.weight"] = Place(f"{target}.query_norm.weight", (shape.query_rank,))
        places |= _linear(f"{source}.q_b_proj", f"{target}.query", queries, shape.query_rank, False)
    latent = shape.rank + shape.rope
    places |= _linear(f"{source}.kv_a_proj_with_mqa", f"{target}.latent", latent, hidden, spec.qkv_bias)
    places[f"{source}.kv_a_layernorm.weight"] = Place(f"{target}.latent_norm.weight", (shape.rank,))
    expanded = spec.heads * (shape.nope + shape.value)
    places[f"{source}.kv_b_proj.weight"] = Place(f"{target}.expand", (expanded, shape.rank))
    places |= _linear(f"{source}.o_proj", f"{target}.output", hidden, spec.heads * shape.value, spec.output_bias)
    return places


def _gated(source: str, target: str, hidden: int, inner: int, bias: bool) -> dict[str, Place]:
    places = _linear(f"{source}.gate_proj", f"{target}.gate_up", inner, hidden, bias)
    places |= _linear(f"{source}.up_proj", f"{target}.gate_up", inner, hidden, bias, inner)
    places |= _linear(f"{source}.down_proj", f"{target}.down", hidden, inner, bias)
    return places


def _experts(source: str, target: str, hidden: int, shape: ExpertShape) -> dict[str, Place]:
    places = {f"{source}.gate.weight": Place(f"{target}.router.weight", (shape.count, hidden))}
    if shape.corrected:
        places[f"{source}.gate.e_score_correction_bias"] = Place(f"{target}.router.correction", (shape.count,))
    for expert in range(shape.count):
        theirs = f"{source}.experts.{expert}"
        inner = (shape.inner, hidden)
        places[f"{theirs}.gate_proj.weight"] = Place(f"{target}.gate_up", inner, 0, expert)
        places[f"{theirs}.up_proj.weight"] = Place(f"{target}.gate_up", inner, shape.inner, expert)
        places[f"{theirs}.down_proj.weight"] = Place(f"{target}.down", (hidden, shape.inner), 0, expert)
    if shape.shared:
        places |= _gated(f"{source}.shared_experts", f"{target}.shared", hidden, shape.shared * shape.inner, False)
    return places
