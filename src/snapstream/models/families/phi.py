"""Phi-3 and Phi-4: joined projections, rotation of a part of each head, and LongRoPE."""

from __future__ import annotations

from typing import Any

from snapstream.models.block import BlockNames
from snapstream.models.families.grouped import grouped_family, grouped_fields, windows_everywhere


def _fields(config: Any, architecture: str) -> dict[str, Any]:
    return grouped_fields(config, windows_everywhere(config))


PHI = grouped_family("Phi3ForCausalLM", fields=_fields, names=BlockNames(joined_qkv=True, gate_up="gate_up_proj"))
