"""Llama 2 and 3, and models like it: Mistral, Ministral 3, Qwen2 and Qwen3."""

from __future__ import annotations

from typing import Any

from snapstream.models.families.grouped import grouped_family, grouped_fields, query_growth, windows_everywhere


def _fields(config: Any, architecture: str) -> dict[str, Any]:
    is_mistral = architecture in ("MistralForCausalLM", "Ministral3ForCausalLM")
    types = windows_everywhere(config) if is_mistral else None
    fields = grouped_fields(config, types)
    if architecture == "Qwen2ForCausalLM":
        fields["qkv_bias"] = True
    if architecture == "Ministral3ForCausalLM":
        fields["query_growth"] = query_growth(config)
    if architecture == "Qwen3ForCausalLM":
        fields["qk_norm"] = "head"
    return fields


LLAMA = grouped_family(
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Ministral3ForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    fields=_fields,
)
