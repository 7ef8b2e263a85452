"""How the built-in engine runs."""

from __future__ import annotations

from dataclasses import dataclass

from snapstream.config.budget import MIN_CAPACITY
from snapstream.config.checks import require_integer
from snapstream.config.policy import ALL, WINDOW
from snapstream.errors import ConfigurationError

SPECULATIVE = ("off", "lookup", "mtp", "draft-model")
"""Who may guess tokens."""
MOST_GUESSES = 15
"""Guesses that a step may verify."""


@dataclass(frozen=True)
class EngineConfig:
    """How the built-in engine runs.

    Attributes:
        max_model_len: Longest prompt plus output of one request, in tokens; the staging cache of prefill has this
            length. ``None`` means what the model was trained for.
        slots: Sequences decoded at a time.
        prefill_chunk: Prompt tokens per prefill launch; decoding waits for one such chunk at most.
        decode_steps: Tokens decoded per launch; more means fewer host round trips and later stops.
        speculative: Who guesses tokens that the model then verifies several at a time: ``off``; ``lookup``, which finds
            them in the prompt and the output so far; ``mtp``, the checkpoint's own module for multi-token prediction
            (DeepSeek-V3 and R1); or ``draft-model``, a small model of the same tokenizer. The output is the same; see
            docs/speculation.md.
        draft_model: Checkpoint of the small model, with ``speculative="draft-model"``.
        speculative_tokens: Most guesses per sequence and step.
        dtype: ``auto`` (the checkpoint's), ``float32``, ``bfloat16`` or ``float16``.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        attention: ``auto``, or a backend by name (see :mod:`snapstream.attention`).
        enforce_eager: On CUDA, do not capture decode steps as graphs: slower, but ready sooner, and kernels are built
            when they are first needed. On a CPU there are no graphs anyway.
        sessions: Conversations whose compressed cache may be kept between turns, see
            :meth:`snapstream.engine.engine.Engine.add_request`; memory is planned for so many.
        context_bytes: Memory that is planned for texts which are read once and asked many times, see
            :meth:`snapstream.engine.llm.LLM.read`.
        prefix_contexts: Beginnings that prompts have in common which are kept in the host's memory, as full caches, so
            that they are not read again; see :mod:`snapstream.engine.prefixes`.
        kept_queries: Last queries of a prompt that are kept at least, for requests whose own policy looks at more of
            them than the engine's; -1 for all.
        max_logprobs: Most alternatives a request may ask for with ``logprobs``; a fixed shape of the sampling graph.
        memory_fraction: Share of the device's free memory the engine may plan with.
    """

    max_model_len: int | None = None
    slots: int = 4
    prefill_chunk: int = 512
    decode_steps: int = 4
    speculative: str = "off"
    draft_model: str | None = None
    speculative_tokens: int = 7
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    enforce_eager: bool = False
    sessions: int = 0
    context_bytes: int = 0
    prefix_contexts: int = 0
    kept_queries: int = WINDOW
    max_logprobs: int = 20
    memory_fraction: float = 0.9

    @property
    def goes_on(self) -> bool:
        """Whether a prompt may begin with a cache that was kept."""
        return self.sessions > 0 or self.context_bytes > 0

    @property
    def guesses(self) -> int:
        """Most guesses per sequence and step."""
        return 0 if self.speculative == "off" else self.speculative_tokens

    def __post_init__(self) -> None:
        """Check every field that needs no model.

        Raises:
            ConfigurationError: A value that is not allowed.
        """
        for name in ("slots", "prefill_chunk", "decode_steps", "speculative_tokens", "max_logprobs"):
            require_integer(f"engine: {name}", getattr(self, name))
            if getattr(self, name) < 1:
                raise ConfigurationError(f"engine: {name} is {getattr(self, name)}; it must be 1 or more")
        for name in ("sessions", "context_bytes", "prefix_contexts"):
            require_integer(f"engine: {name}", getattr(self, name))
            if getattr(self, name) < 0:
                raise ConfigurationError(f"engine: {name} is {getattr(self, name)}; it must be 0 or more")
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
        self._check_speculation()
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise ConfigurationError(f"engine: dtype is {self.dtype!r}; allowed: auto, float32, bfloat16, float16")
        if not isinstance(self.memory_fraction, int | float) or not 0 < self.memory_fraction <= 1:
            raise ConfigurationError(
                f"engine: memory_fraction is {self.memory_fraction}; it must be above 0 and at most 1"
            )

    def _check_speculation(self) -> None:
        if self.speculative not in SPECULATIVE:
            raise ConfigurationError(f"engine: speculative is {self.speculative!r}; allowed: {', '.join(SPECULATIVE)}")
        if self.speculative == "mtp" and self.prefix_contexts:
            raise ConfigurationError(
                f"engine: prefix_contexts is {self.prefix_contexts} and speculative is 'mtp', whose module looks at "
                "the token after each; leave one of them out"
            )
        if (self.speculative == "draft-model") != (self.draft_model is not None):
            raise ConfigurationError(
                f"engine: speculative is {self.speculative!r} and draft_model is {self.draft_model!r}; give a "
                "draft_model with speculative='draft-model', and nowhere else"
            )
        if self.speculative_tokens > MOST_GUESSES:
            raise ConfigurationError(
                f"engine: speculative_tokens is {self.speculative_tokens}; it must be {MOST_GUESSES} or less"
            )
