"""Tokens that end an answer.

Checkpoints name an end-of-sequence token, but often only one of several. A chat model that was trained on code ends a
turn with ``<|im_end|>`` and a completion with ``<|endoftext|>``. As in llama.cpp, the others are recognized by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

END_NAMES = frozenset(
    (
        # End of a text.
        "</s>",
        "<eos>",
        "[EOS]",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<｜end▁of▁sentence｜>",  # noqa: RUF001 (DeepSeek's own spelling)
        # End of a turn or a message.
        "<|im_end|>",
        "<|eot_id|>",
        "<|eom_id|>",
        "<|end|>",
        "<|end_of_turn|>",
        "<end_of_turn>",
        "<turn|>",
        "<end_of_utterance>",
        "<|endofturn|>",
        "<|return|>",
        "<|call|>",
        "<|calls|>",
        "<|flush|>",
        "<EOT>",
        "< EOT >",
        "_<EOT>",
        "[EOT]",
        # Fill-in-the-middle: padding, or the start of another file or repository.
        "<|fim_pad|>",
        "<fim-pad>",
        "<fim_pad>",
        "<|fim_repo|>",
        "<|repo_name|>",
        "<fim-repo>",
        "<reponame>",
        "<|file_sep|>",
    )
)
"""Names of tokens that end an answer."""

_ALSO_TEXT = frozenset(("</s>", "<eos>", "[EOS]", "[EOT]", "<turn|>", "<reponame>"))
"""Names that may be ordinary text, such as an HTML closing tag. They count only if they are marked as special."""

_ONLY_SEPARATES = {"<|end|>": ("<|return|>", "<|call|>", "<|calls|>", "<|flush|>")}
"""Tokens that only separate messages of one answer if the vocabulary has any of the listed ones."""


def control_looking(name: str) -> bool:
    """Whether a token is special by its name, whatever type a file states; some converters do not mark such tokens."""
    return name in END_NAMES - _ALSO_TEXT


def end_names(vocabulary: Iterable[str]) -> frozenset[str]:
    """The end tokens in a vocabulary of special tokens."""
    found = END_NAMES.intersection(vocabulary)
    return found - {name for name, enders in _ONLY_SEPARATES.items() if found.intersection(enders)}


def stop_tokens(stop: Iterable[str], special: Mapping[str, int]) -> frozenset[int]:
    """The stop strings that are special tokens, as tokens, because special tokens are not part of the searched text.

    Args:
        stop: A request's stop strings.
        special: Special tokens by name.
    """
    return frozenset(special[name] for name in stop if name in special)
