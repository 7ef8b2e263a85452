"""SmolLM3: every fourth layer has no rotation."""

from __future__ import annotations

from typing import Any

from snapstream.models.families.grouped import grouped_family, grouped_fields


def _fields(config: Any, architecture: str) -> dict[str, Any]:
    rotated = config.no_rope_layers  # 1 where there is rotation
    unrotated = frozenset(layer for layer in range(config.num_hidden_layers) if not rotated[layer])
    fields = grouped_fields(config)
    return fields | {"unrotated_layers": unrotated}


SMOLLM = grouped_family("SmolLM3ForCausalLM", fields=_fields)
