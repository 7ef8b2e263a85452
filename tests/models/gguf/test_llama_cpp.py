"""Files of random models in llama.cpp itself, which has to be in an environment of its own: ``make test-llamacpp``."""

import json
import random
import subprocess
from pathlib import Path

import numpy
import pytest
import torch

pytest.importorskip("gguf")
from gguf import GGMLQuantizationType as Kind

from snapstream.models.gguf.tokenizer import SPLITS, load_gguf_tokenizer
from tests.checkpoints import GROUPED
from tests.models.gguf.files import write
from tests.models.gguf.test_gguf import GRANTED, OTHERS, logits_of, wide_experts

PYTHON = Path(__file__).parents[3] / ".venv-llamacpp" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not PYTHON.exists(), reason="llama.cpp is not installed (make test-llamacpp)"),
]


def llama_cpp(file, request):
    asked, result = file.with_suffix(".json"), file.with_suffix(".npy")
    asked.write_text(json.dumps(request), encoding="utf-8")
    command = [PYTHON, Path(__file__).parent / "llama_cpp_worker.py", file, asked, result]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return torch.from_numpy(numpy.load(result))


@pytest.mark.parametrize("family", [*GROUPED, *OTHERS])
def test_logits(tmp_path, family):
    """Nearly: llama.cpp multiplies by other means, and rounds keys and values to float16."""
    sizes = wide_experts(family)
    # Of gpt-oss, llama.cpp rounds where YaRN begins and ends, which the model's configuration says it must not.
    unscaled = family in ("llama3-gqa", "gpt-oss")
    changes = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}} if unscaled else {}
    file = tmp_path / "model.gguf"
    write(file, family, Kind.F32, initializer_range=0.08, **GRANTED.get(family, {}) | sizes | changes)
    rng = random.Random(0)
    tokens = [rng.randrange(250) for _ in range(100)]
    got, want = logits_of(file, tokens).log_softmax(-1), llama_cpp(file, tokens).log_softmax(-1)
    off = (got - want).abs().mean(-1)
    assert off.median() < 0.02, off  # other experts may be chosen where two are nearly as good
    assert (got.argmax(-1) == want.argmax(-1)).float().mean() > 0.95


TEXT = (
    "The year 2024 wasn't 1999; it's we'll SEE whether THEY'VE 12345 apples... Ünïcode café naïve ÉCOLE Straße\n\n"
    "def f(x_1, y2):\n\treturn {'a': [x_1**2, \"b\"]}  # 3.14159, 0xFF\n   three   spaces\r\n"
    "日本語のテキスト 中文字符 한국어 русский Юла Ελληνικά 😀👩‍👩‍👧 🇩🇪 ½ ² ٣٤ "
    "HTTPServer camelCase snake_case /usr/bin/env\n"
)


@pytest.fixture(scope="module")
def vocabulary():
    """Tokens and merges that go across everything that a split could keep apart."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator([TEXT] * 3, trainers.BpeTrainer(vocab_size=900, initial_alphabet=alphabet))
    about = json.loads(made.to_str())["model"]
    tokens = sorted(about["vocab"], key=about["vocab"].get)
    return tokens, [" ".join(pair) for pair in about["merges"]]


@pytest.mark.parametrize("name", SPLITS)
def test_tokens(tmp_path, vocabulary, name):
    tokens, merges = vocabulary

    def describe(writer):
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(name)
        writer.add_token_list(tokens)
        writer.add_token_types([1] * len(tokens))
        writer.add_token_merges(merges)
        writer.add_eos_token_id(0)

    file = tmp_path / "model.gguf"
    write(file, "qwen2", tokens=False, change=describe, vocab_size=len(tokens))
    ours = load_gguf_tokenizer(file)
    got, want = ours.encode(TEXT, add_special_tokens=False), llama_cpp(file, TEXT).tolist()
    assert [tokens[each] for each in got] == [tokens[each] for each in want]
    assert ours.decode(got) == TEXT


def test_tokens_of_whole_lines(tmp_path):
    """Gemma 4's tokenizer: merges of letters, not of bytes, within lines."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    text = TEXT + "\n\n\n\n" + TEXT[:40] + "\n" * 7 + "end"
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+|[^\n]+"), "isolated")
    known = [text.replace("😀", "").replace("日", "").replace(" ", "▁"), "\n", "\n\n", "\n\n\n"] * 3
    made.train_from_iterator(known, trainers.BpeTrainer(vocab_size=600))
    about = json.loads(made.to_str())["model"]
    letters = sorted(about["vocab"], key=about["vocab"].get)
    tokens = ["<bos>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters]

    def describe(writer):
        writer.add_tokenizer_model("gemma4")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * len(tokens))
        writer.add_token_types([3] + [6] * 256 + [1] * len(letters))
        writer.add_token_merges([" ".join(pair) for pair in about["merges"]])
        writer.add_bos_token_id(0)
        writer.add_eos_token_id(0)

    file = tmp_path / "model.gguf"
    write(file, "qwen2", tokens=False, change=describe, vocab_size=len(tokens))
    ours = load_gguf_tokenizer(file)
    got = ours.encode(text)
    assert got[0] == 0
    assert [tokens[each] for each in got[1:]] == [tokens[each] for each in llama_cpp(file, text).tolist()]
    assert ours.decode(got[1:]) == text
