import os
import sysconfig
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

from snapstream.kernels.cpu.library import compiler
from tests.checkpoints import FAMILIES, LATENT, SMALL, save_checkpoint

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# What torch's compiler needs on a CPU.
needs_compiler = pytest.mark.skipif(
    compiler() is None or not Path(sysconfig.get_path("include"), "Python.h").exists(),
    reason="no C++ compiler, or no headers of Python",
)


def skip_wide_experts(family):
    """Skip a test that runs a model of this family in float32 where that is not possible."""
    if torch.cuda.is_available() and "num_experts_per_tok" in FAMILIES[family][1]:
        pytest.skip("torch multiplies experts on CUDA in bfloat16 only")


CODED = ("qwen3", "deepseek-v3", "gemma3", "gpt-oss", "qwen3.5")
"""Families with each kind of entries: grouped heads, latents, windows, sinks of attention, and states."""


def save_coded(tmp_path_factory, family):
    """A checkpoint whose entries can be codes of 8 and 4 bits, with its tokenizer; returns its path."""
    skip_wide_experts(family)
    path = tmp_path_factory.mktemp(family)
    save_checkpoint(path, family, **({} if family in LATENT else {"head_dim": 32}))
    save_tokenizer(path)
    return str(path)


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
