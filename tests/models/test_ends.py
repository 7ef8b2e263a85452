"""Answers end at every token that means an end, whatever a file says of its end-of-sequence token."""

import copy

import pytest
from tokenizers import AddedToken

pytest.importorskip("gguf")

from snapstream import LLM, SamplingParams
from snapstream.engine.requests.admission import Admission
from snapstream.models.ends import END_NAMES, end_names
from tests.models.gguf.files import SIZES, write

VOCABULARY = SIZES["vocab_size"]


def answer(llm, token, **settings):
    """What comes of a model that cannot help drawing this token fourth."""
    forced = [ord("a") - ord("!")] * 3
    params = SamplingParams(max_tokens=8, forced=forced, logit_bias={token: 100.0}, **settings)
    return llm.generate("the", params)[0]


@pytest.mark.parametrize("mark", ["named", "unmarked"])
@pytest.mark.parametrize(
    "name", ["<|endoftext|>", "<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|fim_pad|>", "<|file_sep|>"]
)
def test_by_name(tmp_path, name, mark):
    """Also where a converter forgot to mark it as special."""
    write(tmp_path / "model.gguf", "qwen2", **{mark: [name]})
    llm = LLM(str(tmp_path / "model.gguf"), max_model_len=64, slots=1)
    token = VOCABULARY - 3
    assert llm.tokenizer.convert_ids_to_tokens(token) == name
    output = answer(llm, token)
    assert (output.text, output.finish_reason, len(output.token_ids)) == ("aaa", "stop", 4)
    assert len(answer(llm, token, ignore_eos=True).token_ids) == 8


@pytest.mark.parametrize("key", ["fim_pad", "fim_rep", "fim_sep", "eom"])
def test_by_id(tmp_path, key):
    def change(writer):
        writer.add_uint32(f"tokenizer.ggml.{key}_token_id", 270)

    write(tmp_path / "model.gguf", "qwen2", change=change)
    llm = LLM(str(tmp_path / "model.gguf"), max_model_len=64, slots=1)
    assert 270 in llm.engine.spec.eos_token_ids
    assert answer(llm, 270).finish_reason == "stop"


def test_ordinary_text_ends_nothing(tmp_path):
    """A closing tag that no file marks as special, and a special token that is no end."""
    write(tmp_path / "model.gguf", "qwen2", unmarked=["</s>"], named=["<|im_start|>"])
    llm = LLM(str(tmp_path / "model.gguf"), max_model_len=64, slots=1)
    for token in (VOCABULARY - 3, VOCABULARY - 4):
        assert answer(llm, token).finish_reason == "length"


def test_a_separator_of_messages_is_no_end():
    assert end_names(["<|end|>", "<|return|>", "<|call|>", "x"]) == {"<|return|>", "<|call|>"}
    assert end_names(["<|end|>", "<|im_end|>", "x"]) == {"<|end|>", "<|im_end|>"}
    assert end_names(END_NAMES) == END_NAMES - {"<|end|>"}


def test_a_stop_string_that_is_a_special_token(tmp_path):
    """It is not part of the text, which stop strings are looked for in."""
    write(tmp_path / "model.gguf", "qwen2", named=["<|stop here|>"])
    llm = LLM(str(tmp_path / "model.gguf"), max_model_len=64, slots=1)
    token = VOCABULARY - 3
    assert answer(llm, token).finish_reason == "length"
    for settings in ({}, {"skip_special_tokens": False}, {"ignore_eos": True}):
        output = answer(llm, token, stop=("never", "<|stop here|>"), **settings)
        assert (output.text, output.finish_reason, len(output.token_ids)) == ("aaa", "stop", 4)
    kept = answer(llm, token, stop=("<|stop here|>",), min_tokens=5)
    assert (kept.finish_reason, len(kept.token_ids)) == ("stop", 6)


def test_by_name_in_a_hugging_face_checkpoint():
    """Of which only special tokens count, as its tokenizer says which are."""
    engine = LLM("task-model", slots=1, budget=64, max_model_len=128).engine
    tokenizer = copy.deepcopy(engine.tokenizer)
    tokenizer.add_special_tokens({"additional_special_tokens": [AddedToken("<|im_end|>", special=True)]})
    tokenizer.add_tokens([AddedToken("<|eot_id|>", special=False)])
    before, after = (
        Admission(each, engine.spec, engine.budget, engine.config, max_model_len=128).end_tokens
        for each in (engine.tokenizer, tokenizer)
    )
    assert after - before == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
