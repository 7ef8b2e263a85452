"""Tiny models whose tokenizer takes any text: bytes, and some pairs of them."""

from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from tests.checkpoints import save_checkpoint

MERGES = ["a b", "ab c", "c a", '{ "', '" :', '" ,', "t r", "tr u", "tru e", "1 2", "n ame", "n a", "na m", "nam e"]


def byte_tokenizer(merges=()):
    """A tokenizer of bytes, with some of their pairs; the last token ends texts."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: at for at, word in enumerate(alphabet)}
    pairs = [tuple(pair.split()) for pair in merges]
    pairs = [pair for pair in pairs if all(part in words or "".join(part) in words for part in pair)]
    known = []
    for left, right in pairs:
        if left in words and right in words:
            words[left + right] = len(words)
            known.append((left, right))
    made = Tokenizer(BPE(words, known))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", bos_token="<s>")


def save_model(directory, merges, family="qwen3", **changes):
    tokenizer = byte_tokenizer(merges)
    settings = {"head_dim": 32} if family == "qwen3" else {}
    ends = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    save_checkpoint(directory, family, **(settings | {"vocab_size": len(tokenizer) + 3} | ends | changes))
    tokenizer.save_pretrained(directory)
    return directory
