"""Texts that are too long are refused without being tokenized to their end, and all others are tokenized as ever."""

import random
import tracemalloc

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from snapstream.engine.requests.tokenizing import PIECE, PromptTokenizer
from snapstream.errors import ContextLengthError, RequestError

PIECES = ("ab", "abab", "a", " ", "        ", "é", "e\u0301", "🙂", "<s>", "\n", "zz")


def byte_level(**added):
    vocabulary = {token: number for number, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for merge in ("a b", "ab ab", "Ġ a", "Ã ©"):
        vocabulary["".join(merge.split())] = len(vocabulary)
    made = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "ab"), ("Ġ", "a"), ("Ã", "©")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken("<s>", special=True, **added)])
    return made


def words():
    made = Tokenizer(models.WordLevel({"<unk>": 0, "a": 1, "ab": 2}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return made


def composed():
    made = byte_level()
    made.normalizer = normalizers.NFC()
    return made


def fast(made):
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize("make", [byte_level, composed, words])
def test_every_text_that_fits_is_tokenized_as_ever(make):
    """And every other one is refused, whatever the tokenizer does with what it reads."""
    rng, tokenizer = random.Random(0), fast(make())
    refused = 0
    for _ in range(300):
        pieces = rng.choices(
            ["ab", "abab", "a", " ", "        ", "é", "e\u0301", "🙂", "<s>", "\n", "zz"], k=rng.randint(0, 90)
        )
        text, longest = "".join(pieces), rng.randint(1, 60)
        want = tokenizer(text, return_offsets_mapping=True)
        texts = PromptTokenizer(tokenizer, longest)
        try:
            got = texts.encode(text, offsets=True)
        except ContextLengthError:
            got = None
        if got is None:
            refused += 1
            assert len(want["input_ids"]) >= longest  # never one that fits
            continue
        assert got.tokens == want["input_ids"]
        assert list(got.offsets) == [start for start, _ in want["offset_mapping"]]
        assert texts.encode(text).offsets == ()
    assert 3 < refused < 250


class Counting:
    """A backend that says how much it was given."""

    def __init__(self, backend):
        self.backend, self.given = backend, 0

    def __getattr__(self, name):
        return getattr(self.backend, name)

    def encode_batch_fast(self, texts, **settings):
        self.given += sum(map(len, texts))
        return self.backend.encode_batch_fast(texts, **settings)


class Watched:
    """A tokenizer that counts what it tokenizes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.backend_tokenizer = tokenizer, Counting(tokenizer.backend_tokenizer)

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def __call__(self, text, **settings):
        self.backend_tokenizer.given += len(text)
        return self.tokenizer(text, **settings)


@pytest.mark.parametrize(
    ("make", "text", "most", "message"),
    [
        # Its longest token has four bytes, so the number of bytes is enough.
        (byte_level, "ab" * 10**6, 0, "2000000 bytes of text, at least 500000 tokens"),
        (byte_level, " " * 10**6, 0, "at least 250000 tokens"),
        # Characters that are composed may have been four times as many bytes.
        (composed, "ab" * 10**6, 0, "at least 125000 tokens"),
        # Nothing is known of these, but that there are too many tokens soon.
        (words, "ab " * 10**6, 4000, "tokens in its first 4000 of 3000000 characters"),
        (lambda: byte_level(lstrip=True), "cd" * 10**6, 4000, "tokens in its first 2000 of 2000000 characters"),
    ],
)
def test_how_much_is_tokenized(make, text, most, message):
    tokenizer = Watched(fast(make()))
    with pytest.raises(ContextLengthError, match=message):
        PromptTokenizer(tokenizer, 1000 // PIECE * 2).encode(text)
    assert tokenizer.backend_tokenizer.given <= most


def test_a_long_text_of_few_tokens_is_read():
    """Such as blanks, of which a tokenizer of words makes nothing."""
    assert PromptTokenizer(fast(words()), 10).encode(" " * 10**5 + "ab").tokens == [2]
    assert len(PromptTokenizer(fast(words()), 10).encode("z" * 10**5).tokens) == 1


def test_memory():
    """What Python holds of a refused text is a piece of it."""
    texts = PromptTokenizer(fast(words()), 1000)
    text = "ab " * 10**6
    tracemalloc.start()
    with pytest.raises(ContextLengthError):
        texts.encode(text)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**5


def test_half_a_character():
    with pytest.raises(RequestError, match="the prompt is not valid text"):
        PromptTokenizer(fast(byte_level()), 100).encode("\ud800")
    with pytest.raises(RequestError, match="the prompt is not valid text"):
        PromptTokenizer(fast(byte_level()), 10).encode("\ud800" * 1000)
