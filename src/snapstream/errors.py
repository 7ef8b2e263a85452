"""The errors a user can meet. Each message says what was given, what is allowed and what to do."""


class SnapStreamError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigurationError(SnapStreamError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class CheckpointError(SnapStreamError):
    """A model directory that is missing, incomplete, corrupt or of an unsupported kind."""


class RequestError(SnapStreamError, ValueError):
    """One request that cannot be served; others are not affected."""


class ContextLengthError(RequestError):
    """A prompt that leaves no room for an answer within the longest sequence.

    Clients recognize it by its words, to shorten the prompt and to try again: LiteLLM by the beginning, which is
    OpenAI's, LangChain by "prompt is too long".

    Args:
        max_model_len: Longest sequence.
        prompt: How long the prompt is, in words.
        before: Tokens of earlier turns.
    """

    def __init__(self, max_model_len: int, prompt: str, before: int = 0) -> None:
        turns = f" after {before} of earlier turns" if before else ""
        fit = max(max_model_len - 1 - before, 0)
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, the prompt has {prompt}{turns}; "
            f"at most {fit} fit, which leaves one for the answer, so the prompt is too long. Shorten it, or raise "
            "max_model_len if the model allows it."
        )


class CacheFileError(SnapStreamError):
    """A saved cache that cannot be read, is damaged, or belongs to another model."""


class MemoryPlanError(SnapStreamError):
    """The engine as configured does not fit the memory of the device."""


def missing_extra(what: str, extra: str) -> ConfigurationError:
    """The error for something that comes with an extra which is not installed.

    Args:
        what: What needs what.
        extra: Its name.
    """
    return ConfigurationError(f'{what}: in the directory of the source, pip install ".[{extra}]"')


def first_line(error: Exception) -> str:
    """What an error says, in one line."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
