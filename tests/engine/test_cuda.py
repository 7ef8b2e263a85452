"""The engine on a GPU: captured graphs give what the eager engine on the CPU gives."""

import pytest
import torch

from tests.checkpoints import prompt
from tests.engine.test_engine import greedy, make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_captured_graphs_equal_the_cpu(checkpoint):
    lengths = [5, 60, 131, 48, 33, 200, 97]
    prompts = [prompt(n, seed=n) for n in lengths]
    params = [greedy(40), greedy(30, temperature=0.7, seed=4), greedy(20, logprobs=2), greedy(50, kv_budget=36)]
    each = [params[i % 4] for i in range(len(prompts))]
    want = make(checkpoint, device="cpu").generate(prompts, each)
    for eager in (True, False):
        llm = make(checkpoint, device="cuda", enforce_eager=eager)
        for _ in range(2):
            assert [o.token_ids for o in llm.generate(prompts, each)] == [o.token_ids for o in want]
