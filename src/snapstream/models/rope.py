"""Rotary position embedding, with the parameters and scalings of ``transformers``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from snapstream.errors import CheckpointError
from snapstream.kernels.buffers import BufferView
from snapstream.kernels.operations import Angles

_SUPPORTED = ("default", "linear", "llama3", "longrope", "proportional", "yarn")


class Rotation(nn.Module):
    """One set of rotary frequencies, which layers of a group share.

    Attributes:
        name: Name of the set of parameters; ``None`` if there is only one.
        frequencies: Inverse frequencies, float32 ``[D / 2]``, whatever the dtype of the weights.
        scaling: Factor on sine and cosine.
    """

    frequencies: Tensor

    def __init__(self, config: Any, name: str | None, longest: int | None) -> None:
        """Read the parameters.

        Args:
            config: The ``transformers`` configuration.
            name: See above.
            longest: Maximum length of a sequence; ``None`` for what the model was trained for.
        """
        super().__init__()
        self.name, self._config, self._longest = name, config, longest
        frequencies, self.scaling = rope_frequencies(config, name, longest)
        self.register_buffer("frequencies", frequencies, persistent=False)

    def compute(self, device: torch.device) -> None:
        """Set the frequencies, which are not loaded."""
        self.frequencies = rope_frequencies(self._config, self.name, self._longest)[0].to(device)

    def operation(self) -> Angles:
        """The rotary angles of the tokens' positions."""
        buffer = "angles" if self.name is None else f"angles of {self.name}"
        target = BufferView(buffer, 2 * len(self.frequencies), dtype=torch.float32)
        return Angles(self.frequencies, self.scaling, target)


def rope_sets(config: Any) -> dict[str | None, Mapping[str, Any]]:
    """The RoPE parameters of a configuration, by name: a set for every kind of layers, or a single one (``None``).

    Raises:
        CheckpointError: Their kind is not supported.
    """
    parameters = config.rope_parameters
    named = parameters and all(isinstance(value, Mapping) for value in parameters.values())
    sets: dict[str | None, Mapping[str, Any]] = dict(parameters) if named else {None: parameters}
    for each in sets.values():
        kind = each.get("rope_type", "default")
        if kind not in _SUPPORTED:
            raise CheckpointError(f"RoPE scaling {kind!r} is not supported; supported: {', '.join(_SUPPORTED)}")
    return sets


def rope_frequencies(config: Any, name: str | None = None, longest: int | None = None) -> tuple[Tensor, float]:
    """The inverse frequencies ``[D / 2]`` (float32) and the factor on sine and cosine.

    LongRoPE has one set of frequencies for short sequences and one for long ones. Entries of a cache keep their
    rotation, so the longest sequence decides for all, as in vLLM.

    Args:
        config: The ``transformers`` configuration.
        name: Name of a set of parameters, see :func:`rope_sets`.
        longest: Maximum length of a sequence; ``None`` for what the model was trained for.
    """
    parameters = rope_sets(config)[name]
    if name is not None and hasattr(config, "per_layer_config"):  # heads may differ
        config = config.per_layer_config[name]
    kind = parameters.get("rope_type", "default")
    with torch.device("cpu"):
        if kind != "default":
            from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

            options: dict[str, Any] = {} if name is None else {"layer_type": name}
            if kind == "longrope":
                options["seq_len"] = longest or longest_sequence(config)
            frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, **options)
            return frequencies.float(), float(scaling)
        # In transformers, this case exists only in model files, which take 40 MB to import.
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = int(size * (parameters.get("partial_rotary_factor") or 1.0))
        return 1.0 / (parameters["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size)), 1.0


def chosen_frequencies(config: Any, longest: int | None) -> str:
    """Which of two sets of frequencies is used: ``"long"`` or ``"short"`` for LongRoPE, and otherwise nothing."""
    for each in rope_sets(config).values():
        if each.get("rope_type") == "longrope":
            original = each.get("original_max_position_embeddings") or config.original_max_position_embeddings
            return "long" if (longest or longest_sequence(config)) > original else "short"
    return ""


def longest_sequence(config: Any) -> int:
    """Maximum sequence length in tokens after RoPE scaling, by the same rules as vLLM.

    With ``linear`` scaling, ``max_position_embeddings`` is the length before scaling, so it is multiplied by the
    factor; not where kinds of layers have sets of their own (Gemma 3), which state the length after scaling. ``yarn``
    states the length before scaling separately. With ``llama3``, ``max_position_embeddings`` is usually the length
    after scaling. Of several sets of parameters, that of full attention counts.
    """
    sets = rope_sets(config)
    parameters = sets.get("full_attention") or next(iter(sets.values()))
    longest: int = config.max_position_embeddings
    kind, factor = parameters.get("rope_type", "default"), parameters.get("factor") or 1.0
    original = parameters.get("original_max_position_embeddings")
    if kind == "yarn":
        return int((original or longest) * factor)
    if (kind == "linear" and None in sets) or (kind == "llama3" and original and longest <= original):
        return int(longest * factor)
    return longest
