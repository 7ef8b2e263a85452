"""Llama 2 and 3, and models like it: Mistral, Qwen2 and Qwen3."""

from __future__ import annotations

from typing import Any

from snapstream.models.families.grouped import grouped_family, grouped_fields, windows_everywhere


def _fields(config: Any, architecture: str) -> dict[str, Any]:
    types = windows_everywhere(config) if architecture == "MistralForCausalLM" else None
    fields = grouped_fields(config, types)
    if architecture == "Qwen2ForCausalLM":
        fields["qkv_bias"] = True
    if architecture == "Qwen3ForCausalLM":
        fields["qk_norm"] = "head"
    return fields


LLAMA = grouped_family("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", fields=_fields)
