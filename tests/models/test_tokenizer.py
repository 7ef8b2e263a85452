"""Tokenizers that do without transformers: the same results as its own, which is made when it is asked for."""

import subprocess
import sys
import threading

import pytest

pytest.importorskip("gguf")
import transformers

from snapstream.engine.settings import load_tokenizer
from snapstream.models.tokenizer import LazyTokenizer
from tests.models.gguf.files import write

TEXTS = ["the the\n1212 naïve 🙂<|turn|>", "", " leading", "<|end|>", "e\u0301 \u202e", "a" * 300]
SETTINGS = {"return_attention_mask": False, "return_token_type_ids": False}


@pytest.fixture
def lazy(tmp_path):
    write(tmp_path / "model.gguf", "llama2")
    made = load_tokenizer(str(tmp_path / "model.gguf"))
    assert isinstance(made, LazyTokenizer)
    return made


def is_whole(tokenizer):
    return vars(tokenizer)["_whole"] is not None


def test_texts_and_tokens_are_those_of_transformers(lazy):
    peer = load_peer(lazy)
    for text in TEXTS:
        for special in (True, False):
            tokens = lazy.encode(text, add_special_tokens=special)
            assert tokens == peer.encode(text, add_special_tokens=special)
            ours = lazy(text, add_special_tokens=special, return_offsets_mapping=True, **SETTINGS)
            theirs = peer(text, add_special_tokens=special, return_offsets_mapping=True, **SETTINGS)
            assert ours["input_ids"] == theirs["input_ids"]
            assert list(map(tuple, ours["offset_mapping"])) == list(map(tuple, theirs["offset_mapping"]))
            assert "offset_mapping" not in lazy(text, **SETTINGS)
            for skip in (True, False):
                got = lazy.decode(tokens, skip_special_tokens=skip)
                assert got == peer.decode(tokens, skip_special_tokens=skip)
    assert not is_whole(lazy)


def load_peer(lazy):
    """The tokenizer of transformers, made in its own way."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=lazy.backend_tokenizer,
        chat_template=lazy.chat_template,
        clean_up_tokenization_spaces=False,
        **vars(lazy)["_named"],
    )


def test_the_vocabulary_is_that_of_transformers(lazy):
    peer = load_peer(lazy)
    assert len(lazy) == len(peer)
    assert lazy.get_vocab() == peer.get_vocab()
    assert lazy.get_added_vocab() == peer.get_added_vocab()
    assert lazy.added_tokens_decoder.keys() == peer.added_tokens_decoder.keys()
    assert [*map(str, lazy.added_tokens_decoder.values())] == [*map(str, peer.added_tokens_decoder.values())]
    tokens = [5, 270, 287]
    assert lazy.convert_ids_to_tokens(tokens) == peer.convert_ids_to_tokens(tokens)
    assert lazy.convert_ids_to_tokens(5) == peer.convert_ids_to_tokens(5)
    assert lazy.chat_template == peer.chat_template
    names = vars(lazy)["_named"]
    assert "eos_token" in names
    for name in names:
        assert getattr(lazy, name) == getattr(peer, name)
        assert getattr(lazy, f"{name}_id") == getattr(peer, f"{name}_id")
    assert not is_whole(lazy)


@pytest.mark.parametrize(
    "ask",
    [
        lambda one: one.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False),
        lambda one: one(["the", "1 2"])["input_ids"],
        lambda one: one("the", "1 2")["input_ids"],
        lambda one: one.encode("the the", return_tensors="pt").tolist(),
        lambda one: one.encode("the the the", truncation=True, max_length=2),
        lambda one: one.decode(7),
        lambda one: one.decode([[7, 8], [9]]),
        lambda one: one.convert_ids_to_tokens([7, 287], skip_special_tokens=True),
        lambda one: one.convert_tokens_to_ids("the"),
        lambda one: one.batch_decode([[7, 8], [9]]),
        lambda one: one.all_special_tokens,
        lambda one: one.mask_token,
    ],
)
def test_everything_else_goes_to_transformers(lazy, ask):
    assert ask(lazy) == ask(load_peer(lazy))
    assert is_whole(lazy)


def test_it_is_made_once_and_can_be_changed(lazy):
    made = []
    threads = [threading.Thread(target=lambda: made.append(lazy.whole())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({id(each) for each in made}) == 1
    assert made[0].model_max_length == lazy.model_max_length > 2**60
    lazy.chat_template = "{{ messages[0].content }}!"
    assert lazy.chat_template == "{{ messages[0].content }}!"
    assert lazy.apply_chat_template([{"role": "user", "content": "the"}], tokenize=False) == "the!"
    with pytest.raises(AttributeError):
        lazy.no_such_member  # noqa: B018


def test_an_engine_starts_without_transformers(tmp_path):
    """Loading a file and generating text; in a process of its own, as this one has imported it."""
    write(tmp_path / "model.gguf", "qwen2")
    code = f"""
import sys
from snapstream import LLM, SamplingParams
llm = LLM({str(tmp_path / "model.gguf")!r}, budget=64, slots=1, max_model_len=200)
print(llm.generate(["the " * 90], SamplingParams(max_tokens=20))[0].finish_reason)
print(*sorted({{"transformers", "torch._dynamo", "sympy", "torch._inductor"}} & sys.modules.keys()))
print(llm.chat_text([dict(role="user", content="the")]))
print("transformers" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[1:] == ["", "the<|turn|>", "True"]
