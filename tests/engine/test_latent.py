"""DeepSeek in the engine: latents are compressed and decoded as transformers' model says, with the oracle's choice."""

import random

import pytest
import torch

from snapstream import CacheBudget
from tests.checkpoints import LATENT, load_peer, prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine.test_conversation import check_full_cache, check_turns, run
from tests.engine.test_engine import BUDGET, greedy, make
from tests.peers import peer_generate


@pytest.fixture(scope="module", params=LATENT)
def deepseek(request, tmp_path_factory):
    directory = tmp_path_factory.mktemp("deepseek")
    save_checkpoint(directory, request.param)
    save_tokenizer(directory)
    return directory


def test_equals_the_oracle(deepseek):
    rng = random.Random(0)
    for length, ring in ((1, "elastic"), (48, "paper"), (49, "elastic"), (130, "paper"), (200, "elastic")):
        budget = CacheBudget(
            sink=rng.randrange(6),
            recent=rng.randrange(16, 30),
            top_k=rng.randrange(8, 24),
            window=rng.choice([1, 8, 16]),
            kernel=rng.choice([1, 5]),
            ring=ring,
            normalize=rng.choice(["all", "candidates"]),
            policy="snapstream",  # the oracle sees keys of heads, not latents
        )
        got = make(deepseek, budget).generate(prompt(length, length), greedy(50))[0]
        assert list(got.token_ids) == peer_generate(deepseek, prompt(length, length), budget, 50, latent=True)


def test_a_full_cache_equals_transformers(deepseek):
    peer = load_peer(deepseek, dtype=torch.float32)
    tokens = prompt(90, 3)
    want = peer.generate(torch.tensor([tokens]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0)
    got = make(deepseek, budget=None).generate(tokens, greedy(40))[0]
    assert list(got.token_ids) == want[0, 90:].tolist()


@pytest.mark.parametrize("attention", ["sdpa", "auto"])
def test_output_depends_on_nothing_else(deepseek, attention):
    """Not on company, though rows of the batch share experts; not on chunk size, decode steps or slots."""
    prompts = [prompt(n, seed=n + 1) for n in (5, 60, 131, 48, 200)]  # without scores that differ by rounding alone
    alone = [make(deepseek, attention=attention).generate(p, greedy(40))[0].token_ids for p in prompts]
    for settings in (
        {"slots": 1, "prefill_chunk": 256, "decode_steps": 1},
        {"slots": 7, "prefill_chunk": 7, "decode_steps": 8},
    ):
        together = make(deepseek, attention=attention, **settings).generate(prompts, greedy(40))
        assert [o.token_ids for o in together] == alone


def test_one_latent_is_stored_per_token(deepseek):
    llm = make(deepseek, sessions=1)
    held = sum(layer.nbytes for layer in llm.engine.model_runner.decoder.layers)
    assert held == llm.engine.plan.slots == 3 * BUDGET.capacity * llm.engine.plan.bytes_per_token
    output = run(llm, prompt(130), greedy(10, return_kept_tokens=True), keep=True)
    assert all(len(layer.tensors) == 1 for layer in output.saved.layers)
    assert output.saved.nbytes <= llm.engine.plan.sessions
    assert [len(layer) for layer in output.cache.kept.positions] == [1, 1]  # one choice for all heads


def test_a_conversation_over_a_full_cache_is_one_prompt(deepseek):
    check_full_cache(deepseek)


@pytest.mark.parametrize("seed", range(3))
def test_turns_equal_naive_turns(deepseek, seed):
    check_turns(deepseek, seed)
