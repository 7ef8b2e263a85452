"""Sixteen tensor-parallel ranks, as in the paper's deployment of DeepSeek-R1: `make test-vllm-tp16`."""

import pytest

from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.integrations.vllm.engines import BUDGET, MLA
from tests.integrations.vllm.offline import run_offline

pytest.importorskip("vllm")


@pytest.mark.slow
@pytest.mark.parametrize("number", [16])
def test_sixteen_ranks_say_what_one_says(tmp_path, number):
    save_checkpoint(tmp_path, "deepseek-v3", num_attention_heads=16, num_key_value_heads=16)
    save_tokenizer(tmp_path)
    prompts = [prompt(length, length) for length in (300, 37, 513)]
    alone = run_offline(tmp_path, prompts, 40, BUDGET, **MLA)
    script = "tests.integrations.vllm.many_ranks"
    environment = {"VLLM_CPU_KVCACHE_SPACE": None}  # whole GiB for each rank would be too much
    settings = {"script": script, "timeout": 1500, "tensor_parallel_size": number, "kv_cache_memory_bytes": 2**27}
    together = run_offline(tmp_path, prompts, 40, BUDGET, environment, **settings, **MLA)
    assert together == alone
