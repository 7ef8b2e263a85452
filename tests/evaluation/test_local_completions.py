"""lm-eval's own client for completions endpoints, on our server: the same scores as the adapter and as transformers."""

import pytest
import torch

pytest.importorskip("lm_eval")
pytest.importorskip("tenacity")

from lm_eval.api.registry import get_model
from transformers import AutoModelForCausalLM

from snapstream import LLM
from tests.checkpoints import prompt
from tests.evaluation.test_harness import SETTINGS, instances, make, peer_greedy, peer_score, text
from tests.serving.servers import running


@pytest.fixture(scope="module")
def peer(checkpoint):
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float64)


def client_of(server, checkpoint):
    url = f"{server.url}/v1/completions"
    made = get_model("local-completions")
    return made(base_url=url, model="tiny", tokenizer=str(checkpoint), tokenizer_backend="huggingface", max_length=250)


def test_loglikelihood_through_the_api(checkpoint, peer):
    """With a full cache; the greedy continuations are found out to be greedy."""
    contexts = [prompt(length, seed=length) for length in (3, 30, 31, 150)]
    pairs = [(context, prompt(steps, seed=9)) for context in contexts for steps in (1, 2, 17)]
    pairs += [(context, peer_greedy(peer, context, 5)) for context in contexts]
    asked = instances("loglikelihood", *((text(context), " " + text(then)) for context, then in pairs))
    want = [peer_score(peer, *pair) for pair in pairs]
    adapter = make(checkpoint).loglikelihood(asked, disable_tqdm=True)
    settings = {"max_model_len": SETTINGS["max_length"], "slots": 3, "prefill_chunk": 32, "enforce_eager": True}
    with running(LLM(str(checkpoint), **settings)) as server:
        got = client_of(server, checkpoint).loglikelihood(asked, disable_tqdm=True)
    assert [value for value, _ in got] == pytest.approx([value for value, _ in want], abs=1e-3)
    assert [value for value, _ in got] == pytest.approx([value for value, _ in adapter], abs=1e-3)
    assert [greedy for _, greedy in got] == [greedy for _, greedy in want] == [greedy for _, greedy in adapter]
    assert sum(greedy for _, greedy in got) >= len(contexts)


def test_generation_and_a_small_cache_through_the_api(checkpoint, peer):
    """Scores come from prefill, so a small cache does not change them; what is generated comes out of the cache."""
    pairs = [(prompt(150, seed=2), prompt(17, seed=9)), (prompt(99, seed=3), prompt(3, seed=9))]
    asked = instances("loglikelihood", *((text(context), " " + text(then)) for context, then in pairs))
    until = instances("generate_until", (text(pairs[0][0]), {"until": ["w5"], "max_gen_toks": 12}))
    small = LLM(str(checkpoint), budget=48, max_model_len=256, slots=2, prefill_chunk=32, enforce_eager=True)
    with running(small) as server:
        client = client_of(server, checkpoint)
        got = client.loglikelihood(asked, disable_tqdm=True)
        made = client.generate_until(until, disable_tqdm=True)
    want = [peer_score(peer, *pair) for pair in pairs]
    assert [value for value, _ in got] == pytest.approx([value for value, _ in want], abs=1e-3)
    budget = {"budget": 48}
    assert made == make(checkpoint, **budget).generate_until(until, disable_tqdm=True)
