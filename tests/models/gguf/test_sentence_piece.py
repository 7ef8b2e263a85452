"""Tokenizers with scores instead of merges, beside SentencePiece itself."""

import random

import pytest

from snapstream.engine.settings import load_tokenizer
from tests.models.gguf.files import write

sentencepiece = pytest.importorskip("sentencepiece")

TEXT = """The quick brown fox jumps over the lazy dog, and the dog does not mind: it has seen 1,234 foxes before.
When the fox came back in 2021, the dog was asleep. "Wake up," said the fox; "there is news from the mountains!"
Der schnelle braune Fuchs springt über den faulen Hund. Le renard brun saute par-dessus le chien paresseux."""


@pytest.fixture(scope="module", params=[True, False], ids=["prefix", "plain"])
def prefix(request):
    """Whether a text begins with a space that is not in it."""
    return request.param


@pytest.fixture(scope="module")
def trained(tmp_path_factory, prefix):
    directory = tmp_path_factory.mktemp("sentencepiece")
    (directory / "text").write_text("\n".join([TEXT] * 5))
    sentencepiece.SentencePieceTrainer.train(
        input=str(directory / "text"), model_prefix=str(directory / "m"), vocab_size=420, model_type="bpe",
        byte_fallback=True, character_coverage=1.0, normalization_rule_name="identity",
        remove_extra_whitespaces=False, add_dummy_prefix=prefix, minloglevel=2,
    )  # fmt: skip
    return sentencepiece.SentencePieceProcessor(model_file=str(directory / "m.model"))


def test_tokens_of_sentencepiece(tmp_path, trained, prefix):
    def add(writer):
        ids = range(trained.vocab_size())
        special = {trained.unk_id(): 2, trained.bos_id(): 3, trained.eos_id(): 3}
        kinds = [special.get(n, 6 if trained.is_byte(n) else 1) for n in ids]
        writer.add_tokenizer_model("llama")
        writer.add_token_list([trained.id_to_piece(n) for n in ids])
        writer.add_token_scores([trained.get_score(n) for n in ids])
        writer.add_token_types(kinds)
        writer.add_bos_token_id(trained.bos_id())
        writer.add_eos_token_id(trained.eos_id())
        writer.add_unk_token_id(trained.unk_id())
        writer.add_add_space_prefix(prefix)

    path = tmp_path / "model.gguf"
    write(path, "llama2", change=add, tokens=False, vocab_size=trained.vocab_size())
    tokenizer = load_tokenizer(str(path))
    rng = random.Random(0)
    words = TEXT.split()
    texts = [TEXT, "", "x", "two  spaces", "naïve 🙂 café", *(" ".join(rng.choices(words, k=12)) for _ in range(30))]
    for text in texts:
        mine = tokenizer.encode(text)
        assert mine[0] == trained.bos_id()
        assert mine[1:] == trained.encode(text)
        assert tokenizer.decode(mine, skip_special_tokens=True) == text
