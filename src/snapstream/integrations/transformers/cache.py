"""The cache object: a SnapStream layer for each layer with full attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin

from snapstream.config import CacheBudget
from snapstream.config.pins import Span
from snapstream.errors import ConfigurationError, RequestError
from snapstream.integrations.transformers.attention import ATTENTION
from snapstream.integrations.transformers.coding import Coding
from snapstream.integrations.transformers.layer import SnapStreamLayer
from snapstream.integrations.transformers.pins import pins_of
from snapstream.integrations.transformers.sliding import SlidingLayer

_REFUSED = {
    "diffllama": "each layer attends to its cache twice",
    "doge": "its attention adds a learned mask that belongs to tokens",
}
_SUPPORTED_LAYERS = ("full_attention", "sliding_attention")


class SnapStreamCache(Cache):  # type: ignore[misc]
    """A ``transformers.Cache`` of fixed size per sequence.

    A prompt is prefilled with full attention and compressed at its end. Decoding runs inside the remaining entries,
    with shapes that never change. Layers with a sliding window keep their window, which already has a fixed size.

    Example:
        >>> model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="snapstream")  # doctest: +SKIP
        >>> cache = SnapStreamCache(model.config, budget=4096)  # doctest: +SKIP
        >>> model.generate(**inputs, past_key_values=cache)  # doctest: +SKIP
    """

    def __init__(
        self,
        config: Any,
        budget: CacheBudget | int | str | Mapping[str, Any],
        *,
        pin: Sequence[Span | str] | Sequence[Sequence[Span | str]] = (),
        chunked_prefill: bool = False,
        kv_dtype: str = "auto",
        offloading: bool = False,
    ) -> None:
        """Create an empty cache for one model; memory is allocated with the first token.

        Args:
            config: The model's configuration, ``model.config``.
            budget: Cache of one sequence: a :class:`CacheBudget`, its number of entries, or what
                :meth:`CacheBudget.parse` reads.
            pin: Spans of tokens that are kept whatever the policy selects: pairs of positions, first and one past the
                last, not counting padding; for all sequences, or a list of spans for each. See
                :attr:`CacheBudget.pin`.
            chunked_prefill: Whether the prompt comes in several forward passes (``prefill_chunk_size`` of
                ``generate``). Compression then waits for the first single token, so the whole prompt stays in memory
                until then. Otherwise every layer is compressed as soon as it has processed the prompt.
            kv_dtype: Type of entries: ``auto``, that of the model's keys and values; ``int8``; ``int4``; or one for
                keys and one for values, such as ``int8/int4``. Layers with a sliding window keep the model's type.
            offloading: Not supported; accepted only to raise an informative error.

        Raises:
            ConfigurationError: A pin is invalid, or the model has layers that cannot be compressed, or does not use the
                attention implementation ``snapstream``.
        """
        if offloading:
            raise ConfigurationError(
                "SnapStreamCache cannot be offloaded: its size is fixed; give it fewer entries, or kv_dtype='int8'"
            )
        if getattr(config, "is_encoder_decoder", False):
            raise ConfigurationError(
                f"{type(config).__name__} is an encoder-decoder; SnapStreamCache is for decoder-only models"
            )
        config = config.get_text_config(decoder=True)
        name = type(config).__name__
        if getattr(config, "model_type", None) in _REFUSED:
            raise ConfigurationError(f"{name} is not supported by SnapStreamCache: {_REFUSED[config.model_type]}")
        implementation = getattr(config, "_attn_implementation", None)
        if implementation != ATTENTION:
            raise ConfigurationError(
                f"the model's attention implementation is {implementation!r}, which does not pass queries to the "
                f"cache; load the model with attn_implementation='{ATTENTION}', or call "
                f"model.set_attn_implementation('{ATTENTION}') (a model that ignores this is not supported)"
            )
        self.budget = CacheBudget.parse(budget)
        self.budget.require_fixed_places("transformers")
        pins, coding = pins_of(pin), Coding.named(kv_dtype)
        windows = _windows(config, name)
        latent = bool(getattr(config, "kv_lora_rank", None))
        layers: list[CacheLayerMixin] = [
            SnapStreamLayer(
                index, self.budget, latent=latent, chunked_prefill=chunked_prefill, pins=pins, coding=coding
            )
            if window is None
            else SlidingLayer(max_cache_len=window, sliding_window=window)
            for index, window in enumerate(windows)
        ]
        super().__init__(layers=layers)
        self._ours = [layer for layer in layers if isinstance(layer, SnapStreamLayer)]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Store new tokens of one layer; see :meth:`SnapStreamLayer.update`.

        Raises:
            RequestError: An earlier forward pass was interrupted, so the layers hold different tokens.
        """
        first = self._ours[0]
        begins = layer_idx == first.index and not torch.compiler.is_compiling()
        if begins and any(layer.updates != first.updates for layer in self._ours):
            raise RequestError(
                "a forward pass was interrupted and left layers with different tokens; reset() the cache"
            )
        keys, values = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return keys, values

    def activate_past_recording(self) -> None:
        """Reject assisted generation before it starts.

        Raises:
            RequestError: Always.
        """
        self.crop(-1)

    def crop(self, tokens_to_remove: int) -> None:
        """Reject; see :meth:`SnapStreamLayer.crop`.

        Raises:
            RequestError: Always, unless there is nothing to remove.
        """
        self._ours[0].crop(tokens_to_remove)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values held now, over all layers and sequences."""
        return sum(layer.nbytes for layer in self.layers)

    @property
    def nbytes_uncompressed(self) -> int:
        """Bytes that ``DynamicCache`` would hold by now: every token in every layer without a window."""
        total = 0
        for layer in self.layers:
            if layer.is_initialized:
                if isinstance(layer, SnapStreamLayer):
                    total += layer.nbytes_per_token * int(layer.get_seq_length())
                else:
                    total += layer.keys.nbytes + layer.values.nbytes
        return total


def _windows(config: Any, name: str) -> list[int | None]:
    """Per layer, the size of its sliding window in tokens, or ``None`` for full attention.

    Raises:
        ConfigurationError: A layer has neither, or no layer has full attention.
    """
    layers = config.num_hidden_layers
    window: int | None = getattr(config, "sliding_window", None)
    types = getattr(config, "layer_types", None)
    longest = getattr(config, "max_position_embeddings", None)
    if types is None:
        types = ["full_attention" if window is None else "sliding_attention"] * layers
    if window is not None and longest is not None and window >= longest:
        types = ["full_attention" if kind == "sliding_attention" else kind for kind in types]
    # generate() of Phi-3 drops the cache it is given when a sequence exceeds the original training length.
    first = getattr(config, "original_max_position_embeddings", None)
    if str(getattr(config, "model_type", "")).startswith(("phi3", "phimoe", "phi4")) and first and first < longest:
        raise ConfigurationError(
            f"{name} is not supported by SnapStreamCache where max_position_embeddings ({longest}) is above "
            f"original_max_position_embeddings ({first}): its generate() drops the cache it is given at that length"
        )
    unknown = sorted(set(types) - set(_SUPPORTED_LAYERS))
    for setting in ("attention_chunk_size", "num_kv_shared_layers", "index_topk"):
        if getattr(config, setting, None) and "chunked_attention" not in unknown:
            unknown.append(setting)
    if unknown:
        raise ConfigurationError(
            f"{name} has layers whose cache cannot be compressed ({', '.join(unknown)}); supported: "
            f"{', '.join(_SUPPORTED_LAYERS)}"
        )
    if "full_attention" not in types:
        raise ConfigurationError(
            f"{name} has a sliding window of {window} tokens in every layer, so its cache already has a fixed size; "
            "use DynamicCache"
        )
    return [window if kind == "sliding_attention" else None for kind in types[:layers]]
