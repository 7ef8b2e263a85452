"""Builds the tokenizer that a GGUF file describes: its tokens, merges, special tokens, and pre-tokenizer by name.

The model ``gpt2`` is byte-level BPE; ``llama`` is SentencePiece's BPE, which has scores instead of merges; ``gemma4``
has merges, too, but no bytes for letters: lines are merged whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from snapstream.errors import CheckpointError
from snapstream.models.ends import control_looking
from snapstream.models.gguf.architectures import architecture
from snapstream.models.gguf.container import Container, open_container
from snapstream.models.tokenizer import LazyTokenizer

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA_3, _QWEN_2 = _LETTERS + r"\p{N}{1,3}" + _REST, _LETTERS + r"\p{N}" + _REST
# Marks, such as accents, belong to the letters before them.
_QWEN_3_5 = _QWEN_2.replace(r"\p{L}+|", r"[\p{L}\p{M}]+|").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDING}[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDING}"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Without contractions, and digit by digit.
_TEKKEN = _GPT_4O.replace(_ENDING, "|").replace(r"\p{N}{1,3}", r"\p{N}")
# Splits digits, then splits like GPT-2.
_DIGITS = None
SPLITS: dict[str, str | None] = {
    **dict.fromkeys(("llama-bpe", "llama3", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _LLAMA_3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _QWEN_2),
    **dict.fromkeys(("smollm", "refact", "command-r", "starcoder", "codeshell"), _DIGITS),
    **dict.fromkeys(("gpt-2", "olmo", "granite-docling", "mpt"), ""),
    "qwen35": _QWEN_3_5,
    **dict.fromkeys(("gpt-4o", "llama4"), _GPT_4O),
    "tekken": _TEKKEN,
}
"""Patterns that split text before merging, by pre-tokenizer; the empty string means GPT-2's."""
_MODELS = ("gpt2", "llama", "gemma4")
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6
_NOT_STRIPPING = ("<unk>", "<s>", "<|endoftext|>")


def load_gguf_tokenizer(path: Path) -> LazyTokenizer:
    """Load the tokenizer of a file, with its chat template.

    Raises:
        CheckpointError: The file has no tokenizer, is damaged, or its tokenizer is not supported.
    """
    from tokenizers import AddedToken

    file = open_container(path)
    tokens = file.strings("tokenizer.ggml.tokens")
    stated: Sequence[int] = file.metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    model = file.require("tokenizer.ggml.model")
    if model not in _MODELS:
        raise CheckpointError(f"{path}: tokenizer {model!r} is not supported in GGUF; supported: {', '.join(_MODELS)}")
    if len(set(tokens)) != len(tokens) or len(stated) != len(tokens):
        raise CheckpointError(f"{path} is damaged: tokens occur twice, or have no type")
    kinds = [_CONTROL if control_looking(token) else kind for token, kind in zip(tokens, stated, strict=True)]
    if model == "gpt2":
        made = _byte_level(file, tokens)
    else:
        made = _sentence_piece(file, tokens, kinds, merges=_stated_merges(file) if model == "gemma4" else None)
    # A file cannot say that a token takes the whitespace after it, as most of Phi-3's do; llama.cpp knows them, too.
    strips = model == "llama" and architecture(file)[0] == "phi3"
    made.add_special_tokens(
        [
            AddedToken(token, normalized=False, special=True, rstrip=strips and token not in _NOT_STRIPPING)
            for token in _of_kind(tokens, kinds, _CONTROL)
        ]
    )
    made.add_tokens([AddedToken(token, normalized=False) for token in _of_kind(tokens, kinds, _USER_DEFINED)])
    named = {
        f"{name}_token": _token(file, tokens, key)
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    # An ordinary token that texts are padded with stays ordinary. All other named tokens are special ones.
    if named["pad_token"] is not None and kinds[tokens.index(named["pad_token"])] == _NORMAL:
        named["pad_token"] = None
    added = {token.content for token in made.get_added_tokens_decoder().values()}
    missing = [token for token in named.values() if token is not None and token not in added]
    made.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in missing])
    begins = file.metadata.get("tokenizer.ggml.add_bos_token", model != "gpt2" or _split_name(file) in _BEGIN)
    if begins and named["bos_token"] is not None:
        _begin_with(made, named["bos_token"])
    stated_tokens = {name: token for name, token in named.items() if token is not None}
    return LazyTokenizer(made, stated_tokens, file.metadata.get("tokenizer.chat_template"))


_BEGIN = ("llama-bpe", "llama3", "tekken")
"""Pre-tokenizers whose texts begin with a BOS token if the file does not say, and whose words may be tokens."""


def _split_name(file: Container) -> str:
    return str(file.metadata.get("tokenizer.ggml.pre", "gpt-2"))


def _byte_level(file: Container, tokens: Sequence[str]) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    name = _split_name(file)
    if name not in SPLITS:
        raise CheckpointError(
            f"{file.path}: the pre-tokenizer {name!r} is not supported; supported: {', '.join(SPLITS)}"
        )
    merges = _stated_merges(file)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    try:
        # With ignore_merges, a word in the vocabulary is a token even if merges cannot produce it.
        made = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=name in _BEGIN))
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise CheckpointError(f"{file.path} is damaged: {error}") from error
    split = SPLITS[name]
    steps: list[Any] = [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not split)]
    if split is None:
        steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
    elif split:
        steps.insert(0, pre_tokenizers.Split(Regex(split), "isolated"))
    made.pre_tokenizer = pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    return made


def _stated_merges(file: Container) -> list[tuple[str, str]]:
    pairs = (merge.partition(" ") for merge in file.strings("tokenizer.ggml.merges"))
    return [(first, second) for first, _, second in pairs]


def _sentence_piece(
    file: Container, tokens: Sequence[str], kinds: Sequence[int], merges: list[tuple[str, str]] | None = None
) -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    vocabulary = {token: number for number, token in enumerate(tokens)}
    has_scores = merges is None
    if merges is None:
        scores: Sequence[float] = file.require("tokenizer.ggml.scores")
        if len(scores) != len(tokens):
            raise CheckpointError(f"{file.path} is damaged: {len(tokens)} tokens have {len(scores)} scores")
        merges = list(_merges(tokens, scores, vocabulary))
    unknown = _token(file, tokens, "unknown") or "<unk>"
    try:
        made = Tokenizer(models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=_BYTE in kinds))
    except Exception as error:  # the tokenizers library raises bare exceptions
        raise CheckpointError(f"{file.path} is damaged: {error}") from error
    if not has_scores:
        made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|[^\n]+"), "isolated")
    prefix = has_scores and file.metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] if prefix else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    stripped = [decoders.Strip(" ", 1, 0)] if prefix else []
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *stripped])
    return made


def _merges(tokens: Sequence[str], scores: Sequence[float], vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yield the pairs that form a token, best token first: SentencePiece merges the pair that forms the best token."""
    for number in sorted(range(len(tokens)), key=lambda number: (-scores[number], number)):
        token = tokens[number]
        pairs = [(token[:at], token[at:]) for at in range(1, len(token))]
        known = [pair for pair in pairs if pair[0] in vocabulary and pair[1] in vocabulary]
        yield from sorted(known, key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))


def _token(file: Container, tokens: Sequence[str], key: str) -> str | None:
    number = file.metadata.get(f"tokenizer.ggml.{key}_token_id")
    return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None


def _of_kind(tokens: Sequence[str], kinds: Sequence[int], wanted: int) -> list[str]:
    return [token for token, kind in zip(tokens, kinds, strict=True) if kind == wanted]


def _begin_with(tokenizer: Any, token: str) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, tokenizer.token_to_id(token))]
    )
