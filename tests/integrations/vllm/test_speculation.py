"""N-gram speculation in a real vLLM: guesses that are right or wrong as the test wants, and guesses of vLLM's own."""

import random
from dataclasses import replace

import pytest

from snapstream.config import CacheBudget
from tests.checkpoints import prompt
from tests.integrations.vllm.engines import (
    BUDGET,
    MLA,
    counted,
    free_blocks,
    generate,
    held_blocks,
    run_by_hand,
    sampling,
    vllm_engine,
)
from tests.integrations.vllm.offline import run_offline
from tests.integrations.vllm.travel import decode, read, transfer
from tests.peers import peer_generate, speculate

pytest.importorskip("vllm")

K = 4
NGRAM = {"method": "ngram", "num_speculative_tokens": K, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
LENGTHS = (300, 37, 700, 127, 128, 129, 90)


class Guesser:
    """Stands in for vLLM's search: some drafts that a slow reference says are right, and then wrong ones."""

    def __init__(self, checkpoint, prompts, budget, latent=False):
        self.rng = random.Random(1)
        self.peers = [(tokens, speculate(checkpoint, tokens, budget, latent)) for tokens in prompts]
        self.made = [next(peer) for _, peer in self.peers]
        self.right = 0

    def propose(self, proposer, most, sampled, lengths, tokens, *args, **kwargs):
        return [self._guess(tokens[row, : lengths[row]].tolist()) if new else [] for row, new in enumerate(sampled)]

    def _guess(self, known):
        number = next(n for n, (tokens, _) in enumerate(self.peers) if known[: len(tokens)] == tokens)
        answer, peer = self.made[number], self.peers[number][1]
        if len(known) - len(self.peers[number][0]) == len(answer) + 1:  # a step that nobody guessed for
            answer += peer.send(0)
        assert known[len(self.peers[number][0]) :] == answer  # all of what was right, and nothing else, was accepted
        drafts = self.rng.randrange(K + 1)
        right = self.rng.randrange(drafts + 1)
        self.right += right
        made = peer.send(right)
        answer += made
        return made[:right] + [(made[right] + 1) % 100] * (drafts - right)


class Knower:
    """Guesses what it was told, and something wrong behind it."""

    def __init__(self, prompts, answers):
        self.whole = [tokens + answer for tokens, answer in zip(prompts, answers, strict=True)]

    def propose(self, proposer, most, sampled, lengths, tokens, *args, **kwargs):
        return [self._guess(tokens[row, : lengths[row]].tolist()) for row in range(len(sampled))]

    def _guess(self, known):
        whole = next(whole for whole in self.whole if known == whole[: len(known)])
        return [*whole[len(known) : len(known) + K - 1], 0]


@pytest.fixture
def guess(monkeypatch):
    """Lets a guesser stand in for vLLM's search, once there is an engine."""

    def replace_search(guesser):
        def propose(*args, **kwargs):
            return guesser.propose(*args, **kwargs)

        monkeypatch.setattr("vllm.v1.spec_decode.ngram_proposer.NgramProposer.propose", propose)

    return replace_search


def guessed(guess, checkpoint, prompts, budget, steps, latent=False, **settings):
    """Tokens with such guesses, the reference's, and blocks held in each step."""
    guesser, seen = Guesser(checkpoint, prompts, budget, latent), []
    with vllm_engine(checkpoint, budget, speculative_config=NGRAM, **settings) as llm:
        guess(guesser)
        before = free_blocks(llm)
        got = run_by_hand(llm, prompts, sampling(steps), lambda _: seen.append(held_blocks(llm)))
        assert free_blocks(llm) == before
    assert guesser.right > steps / 2
    return got, [answer[:steps] for answer in guesser.made], seen


def accepted(llm):
    """Guesses that were right so far."""
    return counted(llm, "spec_decode_num_accepted_tokens")


@pytest.mark.parametrize("shares", [True, False], ids=["shared blocks", "own blocks"])
@pytest.mark.parametrize(
    "budget",
    [BUDGET, replace(BUDGET, ring="paper"), CacheBudget(sink=3, recent=40, top_k=58, window=9)],
    ids=["elastic", "paper", "no multiple of the block"],
)
def test_equals_a_reference_that_sees_what_drafts_see(guess, llama, budget, shares):
    """Whether prompts were compressed or grow into their rings, and whether their blocks are others' too."""
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    got, want, seen = guessed(guess, llama, prompts, budget, 150, enable_prefix_caching=shares)
    assert got == want
    held = [blocks for step in seen[-20:] for blocks in step.values()]
    assert max(held) == -(-(budget.capacity + K) // 32)  # one block more than without speculation, at most


def test_latent_attention(guess, deepseek):
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    got, want, _ = guessed(guess, deepseek, prompts, BUDGET, 150, latent=True, **MLA)
    assert got == want


def test_with_room_in_the_cache_nothing_differs(guess, llama):
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    budget = CacheBudget.of(1000)
    got, want, _ = guessed(guess, llama, prompts, budget, 100)
    assert got == want == [peer_generate(llama, tokens, budget, 100) for tokens in prompts]


def test_a_small_pool_preempts_and_loses_nothing(llama):
    """Guesses of vLLM's own: blocks come back, and requests that wait their turn are read again."""
    some, budget = [prompt(20, n) * 4 for n in range(8)], CacheBudget.of(350)
    with vllm_engine(llama, budget, speculative_config=NGRAM, num_gpu_blocks_override=30, max_model_len=384) as llm:
        before = free_blocks(llm)
        got = run_by_hand(llm, some, sampling(200))
        assert free_blocks(llm) == before
        assert accepted(llm) > 0
        assert counted(llm, "num_preemptions") > 0
    assert got == [peer_generate(llama, tokens, budget, 200) for tokens in some]


def test_prompts_as_long_as_the_model_allows(llama):
    """Their rows of blocks have room for drafts, too."""
    some = [prompt(n, n) for n in (382, 383)]
    with vllm_engine(llama, BUDGET, speculative_config=NGRAM, max_model_len=384) as llm:
        got = generate(llm, some, 2)
    assert got == [peer_generate(llama, tokens, BUDGET, 384 - len(tokens)) for tokens in some]


def test_guesses_beyond_the_longest_sequence(guess, llama):
    """vLLM cuts them off. No ring turns: what a guess sees is exactly what it would see alone."""
    some, budget = [prompt(n, n) for n in range(370, 382)], CacheBudget.of(384)
    want = [peer_generate(llama, tokens, budget, 384 - len(tokens)) for tokens in some]
    with vllm_engine(llama, budget, speculative_config=NGRAM, max_model_len=384) as llm:
        guess(Knower(some, want))
        assert generate(llm, some, 20) == want
        assert accepted(llm) > 20


def test_an_answer_with_wrong_guesses_is_shared(guess, llama):
    """What was published of it was certain: the next turn finds it in the prefix cache, and is right."""
    first = prompt(40, 1)
    guesser = Guesser(llama, [first], BUDGET)
    with vllm_engine(llama, BUDGET, speculative_config=NGRAM, enable_prefix_caching=True) as llm:
        guess(guesser)
        (said,) = run_by_hand(llm, [first], sampling(70))
        turn = first + said + prompt(5, 2)
        guess(Guesser(llama, [turn], BUDGET))
        (answer,) = llm.generate({"prompt_token_ids": turn}, sampling(40), use_tqdm=False)
        assert answer.num_cached_tokens == 96
    assert said == guesser.made[0][:70]
    assert list(answer.outputs[0].token_ids)[:1] == peer_generate(llama, turn, BUDGET, 1)


def test_the_prefix_cache_and_a_prompt_that_is_all_in_it(llama):
    """vLLM fills the only token that is left of such a prompt up with drafts that nobody guessed."""
    some = [prompt(n, n) for n in (65, 97, 126, 127, 400)]
    with vllm_engine(llama, BUDGET, speculative_config=NGRAM, enable_prefix_caching=True) as llm:
        first = generate(llm, some, 1)
        for _ in range(2):
            outputs = llm.generate([{"prompt_token_ids": tokens} for tokens in some], sampling(1), use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == first
        assert [output.num_cached_tokens for output in outputs][:2] == [64, 96]
        wanted = [peer_generate(llama, tokens, BUDGET, 2) for tokens in some]
        assert generate(llm, some, 2) == wanted


def test_caches_that_travel(guess, llama, tmp_path):
    """A decode instance that speculates over caches that arrive compressed."""
    prompts = [prompt(length, seed) for seed, length in enumerate(LENGTHS)]
    guesser = Guesser(llama, prompts, BUDGET)
    settings = {"kv_transfer_config": transfer(tmp_path), "enable_prefix_caching": False}
    with vllm_engine(llama, BUDGET, speculative_config=NGRAM, **settings) as llm:
        departures = read(llm, prompts)
        guess(guesser)
        before = free_blocks(llm)
        assert decode(llm, prompts, departures, 90) == [answer[:90] for answer in guesser.made]
        assert free_blocks(llm) == before
        assert accepted(llm) > 90


@pytest.mark.slow
def test_two_ranks(llama):
    prompts = [prompt(20, seed) * 10 for seed in range(4)]
    alone = run_offline(llama, prompts, 120, BUDGET, speculative_config=NGRAM)
    both = run_offline(llama, prompts, 120, BUDGET, speculative_config=NGRAM, tensor_parallel_size=2)
    assert both == alone
