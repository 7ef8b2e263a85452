"""Caches that travel: one engine hands them out and fetches them, through a directory; tokens are those of one alone."""

import pytest

from tests.checkpoints import prompt
from tests.integrations.vllm.engines import (
    BUDGET,
    free_blocks,
    held_blocks,
    run_by_hand,
    sampling,
    vllm_engine,
)
from tests.peers import peer_generate

pytest.importorskip("vllm")

LENGTHS = (700, 300, 37, 127, 128, 129, 513, 90)
LEAVES = {"do_remote_decode": True}


@pytest.fixture(scope="module")
def prompts():
    return [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


def transfer(directory, role="kv_both", policy="fail", **settings):
    from vllm.config import KVTransferConfig

    return KVTransferConfig(
        kv_connector="SnapStreamConnector",
        kv_role=role,
        kv_load_failure_policy=policy,
        kv_connector_extra_config={"directory": str(directory)} | settings,
    )


def travelling(steps, params, **kwargs):
    made = sampling(steps, **kwargs)
    made.extra_args = (made.extra_args or {}) | {"kv_transfer_params": dict(params)}
    return made


def read(llm, prompts, **kwargs):
    """First tokens, and what a decode instance needs."""
    many = [{"prompt_token_ids": tokens} for tokens in prompts]
    outputs = llm.generate(many, travelling(1, LEAVES, **kwargs), use_tqdm=False)
    return [(list(output.outputs[0].token_ids), output.kv_transfer_params) for output in outputs]


def decode(llm, prompts, departures, steps, each_step=lambda step: None):
    params = [travelling(steps - 1, place) for _, place in departures]
    whole = [tokens + first for tokens, (first, _) in zip(prompts, departures, strict=True)]
    made = run_by_hand(llm, whole, params, each_step)
    return [first + rest for (first, _), rest in zip(departures, made, strict=True)]


@pytest.mark.parametrize("chunk", [2048, 48])
def test_tokens_are_those_of_one_instance(llama, prompts, tmp_path, chunk):
    seen = []
    with vllm_engine(llama, BUDGET, kv_transfer_config=transfer(tmp_path), max_num_batched_tokens=chunk) as llm:
        before = free_blocks(llm)
        departures = read(llm, prompts)
        assert free_blocks(llm) == before
        assert len(list(tmp_path.iterdir())) == len(prompts)
        got = decode(llm, prompts, departures, 100, lambda _: seen.append(held_blocks(llm)))
        assert free_blocks(llm) == before
        assert not list(tmp_path.iterdir())
    assert got == [peer_generate(llama, tokens, BUDGET, 100) for tokens in prompts]
    assert max(max(step.values()) for step in seen if step) == 4  # never a block more than it decodes in
