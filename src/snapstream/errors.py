"""Errors that users can see. Each message says what was given, what is allowed, and what to do."""

from collections.abc import Iterable


class SnapStreamError(Exception):
    """Base class of all errors that this package raises deliberately."""


class ConfigurationError(SnapStreamError, ValueError):
    """A setting, or a combination of settings, is invalid."""


class CheckpointError(SnapStreamError):
    """A checkpoint is missing, incomplete, corrupt or unsupported."""


class RequestError(SnapStreamError, ValueError):
    """One request cannot be served; others are not affected."""


class ContextLengthError(RequestError):
    """A prompt leaves no room for an answer within the maximum sequence length.

    Clients recognize the wording, so that they can shorten the prompt and retry: LiteLLM by the beginning, which is
    OpenAI's, LangChain by "prompt is too long".

    Args:
        max_model_len: Maximum sequence length in tokens.
        prompt: Length of the prompt as text, for example "5000 tokens".
        before: Tokens of earlier turns.
    """

    def __init__(self, max_model_len: int, prompt: str, before: int = 0) -> None:
        turns = f" after {before} of earlier turns" if before else ""
        fit = max(max_model_len - 1 - before, 0)
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, the prompt has {prompt}{turns}; "
            f"at most {fit} fit, as the answer needs at least one, so the prompt is too long. Shorten it, or raise "
            "max_model_len if the model allows it."
        )


class CacheFileError(SnapStreamError):
    """A saved cache cannot be read, is corrupt, or belongs to another model."""


class MemoryPlanError(SnapStreamError):
    """The configured engine does not fit into the memory of the device."""


def missing_extra(what: str, extra: str) -> ConfigurationError:
    """Build the error for a feature whose optional dependencies are not installed.

    Args:
        what: The feature and what it needs, for example "the server needs uvicorn".
        extra: Name of the extra.
    """
    return ConfigurationError(f'{what}: in the source directory, pip install ".[{extra}]"')


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def listing(names: Iterable[str], most: int = 5) -> str:
    """Join the first names, and say how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more
