"""Static means static: on a CPU nothing is ever compiled, and how the work is cut changes nothing.

That nothing is compiled after warm-up on CUDA: tests/kernels/triton/test_compiler.py.
"""

import os
import random
import subprocess
import sys

import pytest

from snapstream import CacheBudget, SamplingParams
from snapstream.kernels.cpu import library
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine.test_engine import make


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3", "deepseek-v2"])
def test_the_same_from_everything_that_runs_here(tmp_path, family):
    """From stock operations and from the native loop, in other chunks, other launches and other company."""
    save_checkpoint(tmp_path, family)
    save_tokenizer(tmp_path)
    rng = random.Random(0)
    lengths = [1, 2, 28, 47, 48, 49, 64, 65, 128, 199, *(rng.randrange(1, 200) for _ in range(10))]
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, seed=1),
        SamplingParams(max_tokens=5, logprobs=3, stop="w5", prompt_logprobs=2),
        SamplingParams(max_tokens=100, repetition_penalty=1.2, kv_budget=36, ignore_eos=True),
        SamplingParams(max_tokens=30, forced=tuple(prompt(17, seed=3)), ignore_eos=True),
        SamplingParams(
            max_tokens=8, logprobs=1, forced=(5, 6), kv_budget=CacheBudget(2, 20, 9, window=4), return_kept_tokens=True
        ),
    ]
    prompts = [prompt(n, seed=i) for i, n in enumerate(lengths)]
    each = [params[i % len(params)] for i in range(len(lengths))]
    results = [
        make(tmp_path, attention=attention, max_model_len=200, **settings).generate(prompts, each)
        for attention in ("sdpa", "auto")
        for settings in (
            {"prefill_chunk": 64, "slots": 3, "decode_steps": 3},
            {"prefill_chunk": 32, "slots": 2, "decode_steps": 5},
        )
    ]
    first, *others = [[output.token_ids for output in outputs] for outputs in results]
    assert all(other == first for other in others)


_ON_A_CPU = """
import sys
import torch._dynamo.utils
from snapstream import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=256, slots=2, enforce_eager=False)
params = [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=1.0, seed=1)]
llm.generate([[5] * 100, [6] * 200], params)
assert not torch._dynamo.utils.counters["stats"], torch._dynamo.utils.counters
assert llm.engine.model_runner.decoder.program.draws or not sys.argv[2:]
"""


@pytest.mark.parametrize("family", ["qwen3", "llama2"])
def test_nothing_is_compiled_on_a_cpu(tmp_path, family):
    """Neither by the native loop nor, where heads are too small for it, without; there is no compiler in sight."""
    save_checkpoint(tmp_path, family)
    save_tokenizer(tmp_path)
    expected = ["loop"] if family == "qwen3" and library.load() else []
    command = [sys.executable, "-c", _ON_A_CPU, str(tmp_path), *expected]
    environment = os.environ | {"CXX": "no-compiler-here"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
