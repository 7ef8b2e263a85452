"""Resolves the user's settings into the engine's setup."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from snapstream.assets import PACKAGED
from snapstream.attention import AttentionBackend, choose_backend
from snapstream.attention.sdpa import SdpaAttention
from snapstream.cache import EntryType
from snapstream.config import CacheBudget, EngineConfig, SamplingParams
from snapstream.config.engine import QUANTIZED
from snapstream.config.policy import most_queries
from snapstream.engine.cache_settings import Budget, choose_cache, choose_entry_type
from snapstream.engine.decode.lagging import inputs_to_keep
from snapstream.errors import CheckpointError, ConfigurationError, RequestError, first_line
from snapstream.kernels.products import keeps_blocks
from snapstream.models.files import resolve_config
from snapstream.models.gguf import is_gguf, load_gguf_tokenizer
from snapstream.models.spec import ModelSpec
from snapstream.models.storage import formats_in_use
from snapstream.models.tokenizer import NO_LIMIT
from snapstream.models.weights import is_quantized, load_spec, with_chosen_formats

logger = logging.getLogger(__name__)

CHUNKS = {"cpu": 512, "cuda": 2048}
"""Prompt tokens per prefill launch, unless the user says otherwise."""


@dataclass(frozen=True)
class Types:
    """The types of an engine's tensors, each independent of the others.

    Attributes:
        weights: Parameters of the model.
        activations: What is between two operations, and the staging cache of prefill.
        cache: Entries of the slots' caches, and of what is saved from them.
        prefixes: Entries of cached prefixes; ``None`` for the type of activations.
    """

    weights: torch.dtype
    activations: torch.dtype
    cache: EntryType
    prefixes: EntryType | None = None

    @classmethod
    def all(cls, dtype: torch.dtype) -> Types:
        """One dtype for everything."""
        return cls(dtype, dtype, dtype)

    @property
    def of_prefixes(self) -> EntryType:
        """Type of the entries of cached prefixes."""
        return self.activations if self.prefixes is None else self.prefixes


@dataclass(frozen=True)
class Setup:
    """All settings of an engine, resolved before anything is loaded.

    Attributes:
        spec: The model.
        config: The user's settings.
        device: Device of the engine.
        types: Dtypes of weights, activations and caches.
        max_model_len: Maximum sequence length.
        budget: Cache budget of one slot.
        backend: Attention backend.
        drafter: Setup of the draft model, if there is one.
        eager: Whether decode steps are neither captured as graphs nor warmed up. Always true on a CPU, where prefill is
            large matrix products and decoding is a native loop.
    """

    spec: ModelSpec
    config: EngineConfig
    device: torch.device
    types: Types
    max_model_len: int
    budget: CacheBudget
    backend: AttentionBackend
    eager: bool
    drafter: Setup | None = None

    @property
    def weight_formats(self) -> str:
        """Formats of the weights, for people."""
        return ", ".join(formats_in_use(self.spec)) or f"{self.types.weights}".removeprefix("torch.")

    @property
    def queries(self) -> int:
        """How many of a prompt's last queries are kept; ``ALL`` for all of them."""
        return most_queries(self.budget.queries, self.config.kept_queries)

    @property
    def chunk(self) -> int:
        """Prompt tokens per prefill launch."""
        return self.config.prefill_chunk or CHUNKS[self.device.type]

    @property
    def captured(self) -> bool:
        """Whether graphs are captured, which keep their temporaries."""
        return self.device.type == "cuda" and not self.eager


def set_up(model: str, budget: Budget, config: EngineConfig, *, must_exist: bool = True) -> Setup:
    """Choose every setting that the user left open.

    Args:
        model: Checkpoint directory, hub id or shipped model; only its ``config.json`` is read.
        budget: Cache budget of one slot.
        config: The user's settings.
        must_exist: Whether the device must be present; not needed to plan for another machine.

    Raises:
        ConfigurationError: Settings do not work together, or not on this machine.
        CheckpointError: The checkpoint is missing, corrupt or unsupported.
    """
    spec = load_spec(resolve_config(model))
    if config.speculative == "mtp":
        if spec.ignored_layers:
            raise ConfigurationError(
                f"speculative is 'mtp', but the module for multi-token prediction of {spec.architecture} is not "
                "supported; use 'lookup' or 'draft-model'"
            )
        if not spec.extra_layers:
            raise ConfigurationError(
                f"speculative is 'mtp', but {model} has no module for multi-token prediction (num_nextn_predict_layers "
                "is 0 or missing in config.json); use 'lookup' or 'draft-model'"
            )
        spec = spec.with_next_token()
    device = choose_device(config.device, must_exist=must_exist)
    if config.max_gap is not None and device.type != "cpu":
        raise ConfigurationError(f"max_gap is {config.max_gap}, which works on a CPU only; leave it out on {device}")
    dtype = choose_dtype(config.dtype, spec.dtype, device)
    max_model_len = choose_max_model_len(config.max_model_len, spec.max_position)
    spec = spec.for_sequences_of(max_model_len).that_takes_back(inputs_to_keep(config))
    backend = choose_backend(
        config.attention,
        device,
        dtype,
        spec.largest_head,
        spec.value_size,
        others={entry.size for entry in spec.entries} - {spec.largest_head},
    )
    chosen, entry_type = choose_cache(
        budget, config.kv_dtype, dtype, spec, max_model_len, reads_codes=not isinstance(backend, SdpaAttention)
    )
    prefixes = None
    if config.prefix_kv_dtype != "auto":
        prefixes = choose_entry_type(config.prefix_kv_dtype, dtype, spec, "prefix_kv_dtype")
    if keeps_blocks(device, dtype):
        spec = with_chosen_formats(resolve_config(model), spec, config.weights)
    elif config.weights in QUANTIZED:
        raise ConfigurationError(
            f"weights is {config.weights!r}, but no kernel here multiplies it with {dtype} on {device}: on a CPU there "
            "must be CPU kernels, and float32 or bfloat16; on a GPU triton, and float32, bfloat16 or float16; give "
            "weights='auto'"
        )
    return Setup(
        spec=spec,
        config=config,
        device=device,
        types=Types(dtype, dtype, entry_type, prefixes),
        max_model_len=max_model_len,
        budget=chosen,
        backend=backend,
        eager=config.enforce_eager or device.type == "cpu" or not _can_be_captured(spec, device),
        drafter=_set_up_drafter(config, chosen, max_model_len, must_exist=must_exist),
    )


def _set_up_drafter(config: EngineConfig, budget: CacheBudget, max_model_len: int, *, must_exist: bool) -> Setup | None:
    """The draft model's setup: the same slots and cache budget, and sequences as long as it supports."""
    if config.draft_model is None:
        return None
    longest = min(max_model_len, load_spec(resolve_config(config.draft_model)).max_position)
    # Not "off", because its steps take several tokens too. Only its likeliest tokens are needed.
    own = replace(
        config,
        draft_model=None,
        speculative="lookup",
        max_model_len=longest,
        sessions=0,
        context_bytes=0,
        prefix_cache=0,
        prefix_contexts=0,
        prefix_dir=None,
    )
    own = replace(own, decode_steps=1, max_logprobs=1)
    if config.weights in QUANTIZED and is_quantized(resolve_config(config.draft_model)):
        own = replace(own, weights="auto")
    # The pinned places of a draft model are never renewed.
    ring = "elastic" if budget.ring == "resnap" else budget.ring
    return set_up(config.draft_model, replace(budget, ring=ring), own, must_exist=must_exist)


def _can_be_captured(spec: ModelSpec, device: torch.device) -> bool:
    """Whether a step can be captured: torch's product of experts runs without the host on some devices only."""
    if not spec.has_dense_experts or device.type != "cuda" or not torch.cuda.is_available():
        return True
    capability = torch.cuda.get_device_capability(device)
    if capability == (9, 0) or capability[0] == 10:
        return True
    logger.warning(
        "Decode steps are not captured as graphs: with compute capability %d.%d, torch's product of experts needs the "
        "host (9.0 and 10.x do not).",
        *capability,
    )
    return False


def choose_device(name: str, *, must_exist: bool = True) -> torch.device:
    """The device called ``name``; ``auto`` is CUDA if available.

    Raises:
        ConfigurationError: There is no such kind of device or, if it must exist, no such device on this machine.
    """
    name = str(name)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or (index and not index.isdigit()):
        raise ConfigurationError(f"device is {name!r}; allowed: auto, cpu, cuda, cuda:N")
    if kind == "cuda" and must_exist and int(index or 0) >= torch.cuda.device_count():
        raise ConfigurationError(f"device is {name!r}, but torch finds {torch.cuda.device_count()} CUDA devices here")
    return torch.device(kind, int(index or 0)) if kind == "cuda" else torch.device(kind)


def choose_dtype(name: str, stored: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of weights and activations; ``auto`` is the checkpoint's own.

    On a CPU, ``auto`` replaces float16 by bfloat16, because the CPU kernels do not support float16 and its matrix
    products take three times as long.
    """
    if name != "auto":
        dtype: torch.dtype = getattr(torch, name)
        return dtype
    if stored == torch.float16 and device.type == "cpu":
        logger.warning(
            "The checkpoint is in float16, which is slow on a CPU: it is loaded as bfloat16 (dtype float16 keeps it)."
        )
        return torch.bfloat16
    return stored


def choose_max_model_len(wanted: int | None, trained: int) -> int:
    """The engine's maximum sequence length.

    Raises:
        ConfigurationError: It is longer than the model supports.
    """
    if wanted is not None and wanted > trained:
        raise ConfigurationError(
            f"max_model_len is {wanted}, but the model was made for {trained} tokens; give at most that"
        )
    return wanted or trained


def load_tokenizer(checkpoint: str) -> Any:
    """Load the checkpoint's tokenizer.

    Raises:
        CheckpointError: There is no tokenizer, or it has no fast implementation.
    """
    try:
        if is_gguf(checkpoint):
            return load_gguf_tokenizer(Path(checkpoint))
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=False)
    except CheckpointError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise CheckpointError(f"{checkpoint}: the tokenizer could not be loaded: {first_line(error)}") from error
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise CheckpointError(f"{checkpoint}: the tokenizer has no fast implementation (tokenizer.json)")
    # A prompt may be longer than the tokenizer's configuration allows; the engine checks lengths itself.
    tokenizer.model_max_length = NO_LIMIT
    return tokenizer


def load_sampling_defaults(checkpoint: str) -> dict[str, Any]:
    """The recommended sampling parameters in ``generation_config.json``, by field of :class:`SamplingParams`.

    The engine itself does not apply them. The server does, for parameters that a request leaves out.
    """
    if is_gguf(checkpoint):
        return next((dict(one.sampling) for one in PACKAGED.values() if one.file == Path(checkpoint).name), {})
    try:
        proposed = json.loads((Path(checkpoint) / "generation_config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(proposed, dict):
        return {}
    if proposed.get("top_k") == -1:  # as vLLM writes that there is no limit
        proposed["top_k"] = 0
    names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
    return {name: proposed[name] for name in names if _is_allowed(checkpoint, name, proposed.get(name))}


def _is_allowed(checkpoint: str, name: str, value: Any) -> bool:
    """Whether a sampling parameter may have a value; one that it may not have is left out, and the log says so."""
    if value is None:
        return False
    try:
        SamplingParams(**{name: value})
    except (ConfigurationError, RequestError, TypeError) as error:
        logger.warning("%s: generation_config.json is ignored where it is wrong: %s", checkpoint, first_line(error))
        return False
    return True
