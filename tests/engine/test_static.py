"""Static means static: after warm-up nothing is compiled again, whatever the workload; on a CPU nothing ever is."""

import os
import random
import subprocess
import sys

import pytest
import torch

from snapstream import LLM, CacheBudget, SamplingParams
from snapstream.kernels.cpu import library
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import needs_compiler, save_tokenizer
from tests.engine.graphs import compiled, graphs_compiled
from tests.engine.test_engine import BUDGET, make


@needs_compiler
@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3", "deepseek-v2"])
def test_no_compilation_after_warm_up(tmp_path, family):
    """Nor, of experts, whichever are chosen by however many rows."""
    save_checkpoint(tmp_path, family)
    save_tokenizer(tmp_path)
    before = graphs_compiled()
    settings = {"max_model_len": 200, "slots": 3, "prefill_chunk": 64, "decode_steps": 3, "sessions": 1}
    with compiled():
        llm = LLM(str(tmp_path), budget=BUDGET, **settings)
    warm = graphs_compiled()
    assert warm > before  # so the counter counts; engines of one process share what is compiled where they can
    rng = random.Random(0)
    lengths = [1, 2, 28, 47, 48, 49, 64, 65, 128, 199, *(rng.randrange(1, 200) for _ in range(10))]
    params = [
        SamplingParams(max_tokens=30, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, seed=1),
        SamplingParams(max_tokens=5, logprobs=3, stop="w5", prompt_logprobs=2),
        SamplingParams(max_tokens=100, repetition_penalty=1.2, kv_budget=36, ignore_eos=True),
        SamplingParams(max_tokens=30, forced=tuple(prompt(17, seed=3)), ignore_eos=True),
        SamplingParams(
            max_tokens=8, logprobs=1, forced=(5, 6), kv_budget=CacheBudget(2, 20, 9, window=4), telemetry=True
        ),
    ]
    prompts = [prompt(n, seed=i) for i, n in enumerate(lengths)]
    each = [params[i % len(params)] for i in range(len(lengths))]
    with torch.compiler.set_stance("fail_on_recompile"):
        got = llm.generate(prompts, each)
        saved = None
        for turn, length in enumerate((60, 3, 33)):
            name = llm.engine.add_request(prompt(length, seed=turn), params[0], past=saved, keep=True)
            saved = next(
                o for o in iter(lambda: llm.engine.step()[-1], None) if o.finished and o.request_id == name
            ).saved
        llm.engine.add_request(prompt(150), params[0], request_id="gone")
        for _ in range(4):
            llm.engine.step()
        llm.engine.abort("gone")
    assert graphs_compiled() == warm
    # The same without graphs, from torch's attention and the native loop, in other chunks and in other company.
    for attention in ("sdpa", "auto"):
        eager = make(tmp_path, attention=attention, max_model_len=200, prefill_chunk=32, slots=2, decode_steps=5)
        assert [o.token_ids for o in got] == [o.token_ids for o in eager.generate(prompts, each)]


@needs_compiler
def test_several_compiled_engines_in_one_process(tmp_path):
    """They share traced code; each must still run its own graphs on its own tensors."""
    for family in ("qwen3", "mistral"):
        save_checkpoint(tmp_path / family, family)
        save_tokenizer(tmp_path / family)
    kinds = [("qwen3", BUDGET, 3), ("qwen3", None, 3), ("qwen3", BUDGET, 2), ("mistral", BUDGET, 3)]
    settings = {"max_model_len": 160, "prefill_chunk": 64, "decode_steps": 2}
    with compiled():
        engines = [make(tmp_path / f, b, slots=s, **settings) for f, b, s in kinds]
    warm = graphs_compiled()
    prompts = [prompt(n, seed=n) for n in (20, 70, 130)]
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.9, seed=7),
    ]
    for one in params:
        got = [[o.token_ids for o in engine.generate(prompts, one)] for engine in engines]
        for (family, budget, slots), tokens in zip(kinds, got, strict=True):
            eager = make(tmp_path / family, budget, slots=slots, **settings)
            assert [o.token_ids for o in eager.generate(prompts, one)] == tokens
    assert graphs_compiled() == warm


_ON_A_CPU = """
import sys
import torch._dynamo.utils
from snapstream import LLM, SamplingParams
llm = LLM(sys.argv[1], max_model_len=256, slots=2, enforce_eager=False)
params = [SamplingParams(max_tokens=20), SamplingParams(max_tokens=20, temperature=1.0, seed=1)]
llm.generate([[5] * 100, [6] * 200], params)
assert not torch._dynamo.utils.counters["stats"], torch._dynamo.utils.counters
assert llm.engine.executor.decode.loop is not None or not sys.argv[2:]
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


def test_what_the_counter_counts():
    """The counter above moves when something is compiled again; otherwise the test could not fail."""
    double = torch.compile(lambda x: x * 2, backend="eager", fullgraph=True, dynamic=False)
    double(torch.zeros(3))
    before = graphs_compiled()
    double(torch.zeros(3))
    assert graphs_compiled() == before
    double(torch.zeros(4))
    assert graphs_compiled() == before + 1
