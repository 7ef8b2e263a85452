import os
import sysconfig
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from snapstream.kernels.cpu.library import compiler
from tests.checkpoints import SMALL, save_checkpoint

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# What torch's compiler needs on a CPU.
needs_compiler = pytest.mark.skipif(
    compiler() is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="no C++ compiler, or no headers of Python",
)


def save_tokenizer(directory):
    """Words w0 .. w95; decoded without spaces, so that stop strings can straddle tokens."""
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"w{i}": i for i in range(3, SMALL["vocab_size"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(directory)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A tiny random Llama with its tokenizer, as a directory."""
    directory = tmp_path_factory.mktemp("llama")
    save_checkpoint(directory, "llama3-gqa")
    save_tokenizer(directory)
    return directory
