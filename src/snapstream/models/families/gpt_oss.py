"""gpt-oss: experts with biases and a clamped gate, sinks in attention, and windows in every other layer."""

from __future__ import annotations

from typing import Any

import torch

from snapstream.errors import CheckpointError
from snapstream.kernels.plain import GATE_LIMIT, GATE_SLOPE, Activation
from snapstream.models.block import BlockNames
from snapstream.models.experts import ExpertNames
from snapstream.models.families.grouped import grouped_family, grouped_fields, softmax_experts
from snapstream.models.joined import Joined


def _fields(config: Any, architecture: str) -> dict[str, Any]:
    for name, supported in (("swiglu_alpha", GATE_SLOPE), ("swiglu_limit", GATE_LIMIT)):
        value = getattr(config, name, supported)
        if value != supported:
            raise CheckpointError(f"{architecture} with {name}={value} is not supported; supported: {supported}")
    count, inner = config.num_local_experts, config.intermediate_size
    # Published configurations name no dtype; their tensors, apart from those in four bits, are bfloat16.
    dtype = {"dtype": torch.bfloat16} if config.dtype is None else {}
    return (
        grouped_fields(config)
        | dtype
        | {
            "has_sinks": True,
            "activation": Activation.CLAMPED,
            "experts": softmax_experts(config, count=count, inner=inner, normalize=True, biased=True),
        }
    )


GPT_OSS = grouped_family(
    "GptOssForCausalLM", fields=_fields, names=BlockNames(experts=ExpertNames(router="router", joined=Joined.COLUMNS))
)
