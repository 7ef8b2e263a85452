"""Which tokens end an answer.

Checkpoints name an end-of-sequence token, often only one of several: a chat model that was trained on code ends a turn
with ``<|im_end|>`` and a completion with ``<|endoftext|>``. As in llama.cpp, the others are recognized by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

END_NAMES = frozenset(
    (
        # The end of a text.
        "</s>",
        "<eos>",
        "[EOS]",
        "<|endoftext|>",
        "<|end_of_text|>",
        "<｜end▁of▁sentence｜>",  # noqa: RUF001 (DeepSeek's own spelling)
        # The end of a turn or of a message.
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
        # After fill-in-the-middle: padding, or the beginning of another file or repository.
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
"""Names of tokens after which there is nothing left to say."""

_ALSO_TEXT = frozenset(("</s>", "<eos>", "[EOS]", "[EOT]", "<turn|>", "<reponame>"))
"""Names that may be ordinary text, such as a closing tag of HTML: they count only if they are marked as special."""

_ONLY_SEPARATES = {"<|end|>": ("<|return|>", "<|call|>", "<|calls|>", "<|flush|>")}
"""Tokens that merely separate messages of one answer in a vocabulary that has any of these."""


def control_looking(name: str) -> bool:
    """Whether a token ends an answer whatever a file says its kind is: some converters leave the mark out."""
    return name in END_NAMES - _ALSO_TEXT


def end_names(vocabulary: Iterable[str]) -> frozenset[str]:
    """The end tokens among the special tokens of a vocabulary."""
    found = END_NAMES.intersection(vocabulary)
    return found - {name for name, enders in _ONLY_SEPARATES.items() if found.intersection(enders)}


def stop_tokens(stop: Iterable[str], special: Mapping[str, int]) -> frozenset[int]:
    """Stop strings that are special tokens, as tokens: these are not part of the text that is searched.

    Args:
        stop: A request's stop strings.
        special: Special tokens by name.
    """
    return frozenset(special[name] for name in stop if name in special)
