"""Tokenizers that do without transformers: the same results as its own, which is made when it is asked for."""

import copy
import pickle
import subprocess
import sys
import threading
import time

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


def is_full(tokenizer):
    return vars(tokenizer)["_full"] is not None


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
    assert not is_full(lazy)


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
    assert not is_full(lazy)


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
    assert is_full(lazy)


@pytest.mark.parametrize("kind", ["llama2", "qwen2"])
@pytest.mark.parametrize("named", [{}, {"unk": 0}, {"pad": 60}, {"unk": 0, "pad": 0}])
def test_nothing_changes_when_the_full_tokenizer_is_created(kind, named, tmp_path):
    """A file may name tokens that it does not call special ones."""
    path = tmp_path / "model.gguf"
    write(path, kind, change=lambda writer: [getattr(writer, f"add_{name}_token_id")(n) for name, n in named.items()])
    lazy = load_tokenizer(str(path))
    texts = [*TEXTS, "<unk>", *lazy.convert_ids_to_tokens([0, 60])]

    def seen():
        tokens = [lazy.encode(text) for text in texts]
        decoded = [lazy.decode(each, skip_special_tokens=skip) for each in [*tokens, [0, 60]] for skip in (True, False)]
        return tokens, decoded, [*map(str, lazy.added_tokens_decoder.items())], len(lazy)

    before = seen()
    assert not is_full(lazy)
    lazy.full_tokenizer()
    assert seen() == before


def test_settings_of_a_call_end_with_it(lazy):
    tokens = lazy.encode("the the the")
    assert len(lazy.encode("the the the", truncation=True, max_length=2)) == 2
    assert lazy.encode("the the the") == tokens
    lazy.pad_token = lazy.eos_token
    assert len(lazy("the", padding="max_length", max_length=9)["input_ids"]) == 9
    assert lazy.encode("the the the") == tokens
    lazy("<|turn|>", split_special_tokens=True)
    assert lazy.encode("<|turn|>") == load_peer(lazy).encode("<|turn|>")


def test_named_tokens_can_be_changed(lazy):
    lazy.pad_token = lazy.eos_token
    assert lazy.pad_token == lazy.eos_token
    assert lazy.pad_token_id == lazy.eos_token_id


@pytest.mark.parametrize("full", [False, True])
def test_it_can_be_copied(lazy, full):
    if full:
        lazy.chat_template = "other"
    for other in (copy.deepcopy(lazy), pickle.loads(pickle.dumps(lazy))):
        assert other.encode("the the\n12") == lazy.encode("the the\n12")
        assert other.chat_template == lazy.chat_template
        assert other.eos_token_id == lazy.eos_token_id
    assert is_full(lazy) == full


def test_texts_are_tokenized_while_the_full_tokenizer_is_created(lazy):
    text = "the 12 naïve " * 20000
    want = lazy.encode(text)
    thread = threading.Thread(target=lazy.full_tokenizer)
    thread.start()
    found = [lazy.encode(text) for _ in range(3)]
    thread.join()
    assert found == [want] * 3


def test_the_backend_is_used_while_the_full_tokenizer_is_created(lazy):
    """The server counts the tokens of a prompt with the backend itself, in another thread."""
    text, end = "the 12 naïve " * 50000, threading.Event()
    found, failed = [], []

    def count():
        while not end.is_set():
            try:
                found.append(len(lazy.backend_tokenizer.encode_batch_fast([text])[0].ids))
            except Exception as error:
                failed.append(error)

    thread = threading.Thread(target=count)
    thread.start()
    try:
        while not found:
            time.sleep(0.001)
        assert lazy.full_tokenizer().eos_token == lazy.eos_token
    finally:
        end.set()
        thread.join()
    assert not failed
    assert len(set(found)) == 1


def test_it_is_made_once_and_can_be_changed(lazy):
    made = []
    threads = [threading.Thread(target=lambda: made.append(lazy.full_tokenizer())) for _ in range(4)]
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
