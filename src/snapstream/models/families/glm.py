"""GLM-4, which rotates neighboring elements of a half of each head, and GLM-4.5, which has experts like DeepSeek-V3."""

from __future__ import annotations

from typing import Any

from snapstream.models.block import BlockNames
from snapstream.models.experts import check_experts
from snapstream.models.families.grouped import grouped_family, grouped_fields, without_float16
from snapstream.models.spec import ExpertShape


def _fields(config: Any, architecture: str) -> dict[str, Any]:
    own = {"output_bias": False, "rotates_pairs": True, "norms_after": architecture == "Glm4ForCausalLM"}
    return grouped_fields(config) | own | without_float16(config)


def _expert_fields(config: Any, architecture: str) -> dict[str, Any]:
    count, groups = config.n_routed_experts, config.n_group or 1
    chosen, chosen_groups = config.num_experts_per_tok, (config.topk_group or 1) if groups > 1 else 1
    check_experts(count, chosen, groups, chosen_groups, least=2)
    experts = ExpertShape(
        count=count,
        chosen=chosen,
        inner=config.moe_intermediate_size,
        shared_inner=(config.n_shared_experts or 0) * config.moe_intermediate_size,
        dense_layers=frozenset(range(config.first_k_dense_replace or 0)),
        groups=groups,
        chosen_groups=chosen_groups,
        corrected=True,
        normalize=bool(config.norm_topk_prob),
        scale=float(config.routed_scaling_factor),
    )
    return grouped_fields(config) | {
        "output_bias": False,
        "qk_norm": "head" if config.use_qk_norm else None,
        "experts": experts,
        "ignored_layers": getattr(config, "num_nextn_predict_layers", None) or 0,
    }


GLM = grouped_family(
    "GlmForCausalLM",
    "Glm4ForCausalLM",
    fields=_fields,
    names=BlockNames(
        attention_result_norm="post_self_attn_layernorm",
        feed_forward_result_norm="post_mlp_layernorm",
        gate_up="gate_up_proj",
    ),
)
GLM_EXPERTS = grouped_family("Glm4MoeForCausalLM", fields=_expert_fields)
