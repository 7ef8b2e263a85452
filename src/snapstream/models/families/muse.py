"""Muse Glimmer: windows in three of four layers, and no rotation in the fourth; gates, and norms without weights."""

from __future__ import annotations

from typing import Any

from snapstream.models.families.gemma import GEMMA_NAMES
from snapstream.models.families.grouped import grouped_family, grouped_fields
from snapstream.models.names import Place
from snapstream.models.spec import ModelSpec


def _fields(config: Any, architecture: str) -> dict[str, Any]:
    # One rotation for all layers that have any: other values than 0 are not read.
    unrotated = (layer for layer, theta in enumerate(config.layer_rope_theta) if not theta)
    return grouped_fields(config) | {
        "unrotated_layers": frozenset(unrotated),
        "qk_factors": (float(config.qk_scale_factor), 1.0),
        "gates_attention": True,
        "gates_apart": True,
        "norms_after": True,
        "norm_after_epsilon": float(config.post_norm_eps),
        "wide_norms": True,
        "norm_offset": 1.0,
        "norms_embeddings": True,
        "logit_factor": float(config.output_multiplier),
        "logit_cap": float(config.final_logit_softcapping or 0.0),
    }


def _apart(spec: ModelSpec) -> dict[str, Place]:
    """The last norm's weight is not around zero, as the others are."""
    return {"model.norm.weight": Place("norm.weight", (spec.hidden_size,))}


MUSE = grouped_family("MuseGlimmerForCausalLM", fields=_fields, names=GEMMA_NAMES, apart=_apart)
