"""Settings of the built-in engine."""

from __future__ import annotations

from dataclasses import dataclass, replace

from snapstream.config.budget import MIN_CAPACITY
from snapstream.config.checks import require_count, require_integer
from snapstream.config.policy import ALL, KEPT_QUERIES
from snapstream.errors import ConfigurationError
from snapstream.sizes import parse_bytes

SPECULATIVE = ("off", "lookup", "mtp", "draft-model")
"""Kinds of drafters."""
QUANTIZED = ("q8_0", "q6_k", "q5_k", "q5_1", "q5_0", "q4_k", "q4_1", "q4_0")
"""Formats that weights can be quantized to while loading."""
KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "int4", "int8/int4", "int4/int8")
"""Types of cache entries: of both keys and values, or of each."""
_TYPES = {
    "dtype": ("auto", "float32", "bfloat16", "float16"),
    "weights": ("auto", "dense", *QUANTIZED),
    "kv_dtype": KV_DTYPES,
    "prefix_kv_dtype": KV_DTYPES,
}
LONGEST_GAP = 3600
"""Largest ``max_gap``, in seconds."""
MOST_GUESSES = 15
"""Maximum number of draft tokens that one step can verify."""


@dataclass(frozen=True)
class EngineConfig:
    """Settings of the built-in engine.

    Attributes:
        max_model_len: Maximum length of prompt plus output of one request, in tokens; also the length of prefill's
            staging cache. ``None`` means what the model was trained for.
        slots: Sequences that are decoded concurrently.
        prefill_chunk: Prompt tokens per prefill launch; decoding waits for at most one such chunk, in one layer.
            ``None``: 512 on a CPU, and 2048 on a GPU, where launching a shorter chunk takes the host longer than
            computing it takes the device.
        decode_steps: Tokens decoded per launch. More means fewer host round trips, and later stops.
        max_gap: Target for the longest time between two tokens of a sequence, in seconds; on a CPU only. See
            :class:`snapstream.engine.pace.Pace`.
        speculative: Source of the draft tokens that the model verifies, several in one step: ``off``; ``lookup``, which
            searches the prompt and the output so far; ``mtp``, the checkpoint's module for multi-token prediction
            (DeepSeek-V3 and R1); or ``draft-model``, a small model with the same tokenizer. The output does not change;
            see docs/speculation.md.
        draft_model: Checkpoint of the small model, with ``speculative="draft-model"``.
        speculative_tokens: Maximum number of draft tokens per sequence and step.
        dtype: ``auto`` (the checkpoint's), ``float32``, ``bfloat16`` or ``float16``.
        weights: Format of weights: ``auto``, as the checkpoint stores them; ``dense``, numbers of ``dtype``;
            or a format of :data:`QUANTIZED`, quantized while loading.
        kv_dtype: Type of cache entries: ``auto``, that of activations, or what a budget in bytes chooses; a dtype;
            ``int8``; ``int4``; or one of these two for keys and one for values, such as ``int8/int4``. See
            :mod:`snapstream.cache.codes`.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        attention: ``auto``, or the name of a backend (see :mod:`snapstream.attention`).
        enforce_eager: On CUDA, do not capture decode steps as graphs. This is slower but starts sooner, and kernels are
            built when they are first needed. A CPU uses no graphs either way.
        sessions: Memory for conversations that keep their compressed cache between turns: a size such as ``"2GiB"``, or
            the number of conversations that use their whole budget. See
            :meth:`snapstream.engine.engine.Engine.add_request`.
        context_bytes: Memory planned for contexts, texts that are prefilled once and asked many times, in bytes. See
            :meth:`snapstream.engine.llm.LLM.read`.
        prefix_cache: Memory of the prefix cache, which keeps the full caches of what prompts begin with: a size such as
            ``"2GiB"``, or a number of bytes. ``None``: up to 2 GiB of what the plan leaves; 0 turns it off. See
            :mod:`snapstream.engine.prefill.prefix_cache`.
        prefix_kv_dtype: Type of its entries, as ``kv_dtype``. With codes, it holds twice or three times as many tokens,
            and prompts that begin like an earlier one are no longer answered exactly as without it.
        prefix_contexts: The same as a number of prompts of ``max_model_len`` tokens; prefer ``prefix_cache``.
        prefix_dir: Directory for cached prefixes that do not fit in memory, and for all of them when the engine is
            closed; ``None`` to drop them.
        prefix_disk: Maximum size of this model's files in this directory, in bytes.
        kept_queries: Minimum number of a prompt's last queries that are kept, for requests whose own policy needs more
            of them than the engine's; -1 for all.
        max_logprobs: Maximum ``logprobs`` of a request; fixes a shape of the sampling graph.
        memory_fraction: Share of the device's free memory that the engine may plan with.
    """

    max_model_len: int | None = None
    slots: int = 4
    prefill_chunk: int | None = None
    decode_steps: int = 4
    max_gap: float | None = None
    speculative: str = "off"
    draft_model: str | None = None
    speculative_tokens: int = 7
    dtype: str = "auto"
    weights: str = "auto"
    kv_dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    enforce_eager: bool = False
    sessions: int | str = 0
    context_bytes: int = 0
    prefix_cache: int | str | None = None
    prefix_kv_dtype: str = "auto"
    prefix_contexts: int = 0
    prefix_dir: str | None = None
    prefix_disk: int = 16 * 2**30
    kept_queries: int = KEPT_QUERIES
    max_logprobs: int = 20
    memory_fraction: float = 0.9

    @property
    def goes_on(self) -> bool:
        """Whether a prompt may continue from a stored cache."""
        return self.session_bytes(1) > 0 or self.context_bytes > 0

    def session_bytes(self, each: int) -> int:
        """Bytes of memory for sessions, if one that uses its whole budget takes ``each``."""
        if isinstance(self.sessions, str):
            return parse_bytes(self.sessions, "engine: sessions")
        return self.sessions * each

    def prefix_bytes(self, each: int) -> int | None:
        """Bytes of memory for the prefix cache, if the longest prompt takes ``each``; ``None`` for what is left."""
        if isinstance(self.prefix_cache, str):
            return parse_bytes(self.prefix_cache, "engine: prefix_cache")
        if self.prefix_cache is None and self.prefix_contexts:
            return (self.prefix_contexts + 1) * each
        return 0 if self.speculative == "mtp" else self.prefix_cache

    @property
    def guesses(self) -> int:
        """Maximum number of draft tokens per sequence and step."""
        return 0 if self.speculative == "off" else self.speculative_tokens

    def __post_init__(self) -> None:
        """Check every field that can be checked without a model.

        Raises:
            ConfigurationError: A value is not allowed.
        """
        for name in ("slots", "prefill_chunk", "decode_steps", "speculative_tokens", "max_logprobs"):
            if name == "prefill_chunk" and self.prefill_chunk is None:
                continue
            require_integer(f"engine: {name}", getattr(self, name))
            if getattr(self, name) < 1:
                raise ConfigurationError(f"engine: {name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("sessions", "context_bytes", "prefix_contexts", "prefix_cache", "prefix_disk"):
            given = getattr(self, name)
            is_size = isinstance(given, str) and name in ("sessions", "prefix_cache")
            if not is_size and not (given is None and name == "prefix_cache"):
                require_count(f"engine: {name}", given)
        self.session_bytes(1)  # sizes that are written
        wanted = self.prefix_bytes(1)
        if self.prefix_dir is not None and wanted == 0:
            raise ConfigurationError("engine: prefix_dir is given, but the prefix cache is off (prefix_cache)")
        require_integer("engine: kept_queries", self.kept_queries)
        if self.kept_queries < 0 and self.kept_queries != ALL:
            raise ConfigurationError(
                f"engine: kept_queries is {self.kept_queries}; it must be 0 or more, or -1 for all"
            )
        if self.max_model_len is not None:
            require_integer("engine: max_model_len", self.max_model_len)
            if self.max_model_len < MIN_CAPACITY:
                raise ConfigurationError(
                    f"engine: max_model_len is {self.max_model_len}; it must be {MIN_CAPACITY} or more"
                )
        self._check_gap()
        self._check_speculation()
        for name, allowed in _TYPES.items():
            if getattr(self, name) not in allowed:
                given = getattr(self, name)
                raise ConfigurationError(f"engine: {name} is {given!r}; allowed: {', '.join(allowed)}")
        if not isinstance(self.memory_fraction, int | float) or not 0 < self.memory_fraction <= 1:
            raise ConfigurationError(
                f"engine: memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1"
            )

    def _check_gap(self) -> None:
        gap = self.max_gap
        is_number = isinstance(gap, int | float) and not isinstance(gap, bool)
        if gap is not None and not (is_number and 0 < gap <= LONGEST_GAP):
            raise ConfigurationError(
                f"engine: max_gap is {gap!r}; it must be a number of seconds above 0, at most {LONGEST_GAP}"
            )

    def _check_speculation(self) -> None:
        if self.speculative not in SPECULATIVE:
            raise ConfigurationError(f"engine: speculative is {self.speculative!r}; allowed: {', '.join(SPECULATIVE)}")
        if self.speculative == "mtp" and (self.prefix_contexts or replace(self, speculative="off").prefix_bytes(1)):
            raise ConfigurationError(
                f"engine: prefix_cache is {self.prefix_cache or self.prefix_contexts!r} and speculative is 'mtp', "
                "which the prefix cache does not support; leave one of them out"
            )
        if (self.speculative == "draft-model") != (self.draft_model is not None):
            raise ConfigurationError(
                f"engine: speculative is {self.speculative!r} and draft_model is {self.draft_model!r}; give a "
                "draft_model with speculative='draft-model', and only then"
            )
        if self.speculative_tokens > MOST_GUESSES:
            raise ConfigurationError(
                f"engine: speculative_tokens is {self.speculative_tokens}; it must be {MOST_GUESSES} or less"
            )
