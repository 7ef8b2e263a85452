"""Models with layers of windows or states in a real vLLM, and with caps or sinks: all other layers are compressed."""

import pytest
import torch
import transformers

from snapstream import CacheBudget
from snapstream.errors import ConfigurationError
from tests.checkpoints import SMALL, prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.integrations.vllm.engines import (
    BUDGET,
    MIXED,
    counted,
    free_blocks,
    generate,
    run_by_hand,
    sampling,
    scheduler,
    vllm_engine,
)
from tests.integrations.vllm.offline import run_offline
from tests.integrations.vllm.test_speculation import NGRAM
from tests.integrations.vllm.travel import transfer
from tests.peers import peer_gaps, peer_generate

pytest.importorskip("vllm")

LENGTHS = (500, 300, 37, 120)
RECENT = CacheBudget(sink=4, recent=124, top_k=0, window=1, policy="streaming")


def save(directory, family):
    """Twice a layer with a window, and one without; in Gemma 2 the other way round."""
    types = ["sliding_attention", "full_attention"][:: -1 if family == "gemma2" else 1] * 2
    save_checkpoint(directory, family, num_hidden_layers=4, layer_types=types)
    save_tokenizer(directory)
    return directory


@pytest.fixture(scope="module")
def prompts():
    return [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module", params=["gemma3", "gpt-oss", "gemma2", "gemma4"])
def checkpoint(request, tmp_path_factory):
    return save(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory):
    return save(tmp_path_factory.mktemp("gemma3"), "gemma3")


@pytest.mark.parametrize("budget", [BUDGET, MIXED], ids=["snapstream", "default"])
def test_tokens_equal_the_reference(checkpoint, budget, prompts):
    """In chunks, beside each other, and again with what the prefix cache kept; all blocks come back."""
    expected = [peer_generate(checkpoint, tokens, budget, 60) for tokens in prompts]
    with vllm_engine(checkpoint, budget, max_num_batched_tokens=170) as llm:
        before = free_blocks(llm)
        assert generate(llm, prompts, 60) == expected
        hits = counted(llm, "prefix_cache_hits")
        assert generate(llm, prompts, 60) == expected
        assert counted(llm, "prefix_cache_hits") > hits
        assert free_blocks(llm) == before


def test_more_sequences_fit(gemma):
    """A pool for three full caches: with a budget, all run at once."""
    some = [prompt(600 + 30 * n, n) for n in range(8)]
    running = {}
    for name, budget in (("stock", None), ("snapstream", BUDGET)):
        most = []
        with vllm_engine(gemma, budget, num_gpu_blocks_override=90, max_model_len=1024) as llm:
            got = run_by_hand(
                llm, some, sampling(100), lambda _, llm=llm, most=most: most.append(len(scheduler(llm).running))
            )
            assert free_blocks(llm) == 89
        running[name] = max(most)
    assert running["snapstream"] >= 2 * running["stock"], running
    assert got == [peer_generate(gemma, tokens, BUDGET, 100) for tokens in some]


def test_preemption_for_want_of_blocks_loses_nothing(gemma):
    some = [prompt(40 + n, n) for n in range(8)]
    with vllm_engine(gemma, BUDGET, num_gpu_blocks_override=36, max_model_len=384) as llm:
        preempted = set()
        got = run_by_hand(
            llm,
            some,
            sampling(70),
            lambda _: preempted.update(r.request_id for r in scheduler(llm).requests.values() if r.num_preemptions),
        )
        assert preempted
        assert free_blocks(llm) == 35
    assert got == [peer_generate(gemma, tokens, BUDGET, 70) for tokens in some]


def test_guesses_of_n_grams(gemma, prompts):
    expected = [peer_generate(gemma, tokens, BUDGET, 60) for tokens in prompts]
    with vllm_engine(gemma, BUDGET, speculative_config=NGRAM) as llm:
        assert generate(llm, prompts, 60) == expected
        assert counted(llm, "spec_decode_num_accepted_tokens") > 0


def test_caches_do_not_travel(gemma, tmp_path):
    with (
        pytest.raises(ConfigurationError, match="a KV connector with a model whose layers have sliding windows"),
        vllm_engine(gemma, BUDGET, kv_transfer_config=transfer(tmp_path)),
    ):
        pass


@pytest.mark.parametrize(
    ("types", "said"),
    [
        (["full_attention", "full_attention", "sliding_attention"], r"has made: .*SnapStreamSpec .*SnapStreamSpec"),
        (None, "--disable-hybrid-kv-cache-manager"),
    ],
)
def test_groups_that_cannot_be_served(tmp_path, types, said):
    save_checkpoint(tmp_path, "gemma3", **({} if types is None else {"num_hidden_layers": 3, "layer_types": types}))
    save_tokenizer(tmp_path)
    with (
        pytest.raises(ConfigurationError, match=said),
        vllm_engine(tmp_path, BUDGET, **({"disable_hybrid_kv_cache_manager": True} if types is None else {})),
    ):
        pass


def test_windows_in_all_layers_leave_nothing_to_compress(tmp_path):
    save_checkpoint(tmp_path, "mistral", sliding_window=64)
    save_tokenizer(tmp_path)
    with (
        pytest.raises(ConfigurationError, match="nothing to compress"),
        vllm_engine(tmp_path, BUDGET),
    ):
        pass


def test_a_hybrid(tmp_path, prompts):
    """Gated DeltaNet, which runs in bfloat16 alone on a CPU: tokens are the reference's, or nearly as likely.

    All experts are chosen, and tokens are kept by their place; otherwise rounding would choose others.
    """
    settings = SMALL | {
        "head_dim": 32,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "num_experts": 4,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    }
    torch.manual_seed(0)
    transformers.Qwen3NextForCausalLM(transformers.Qwen3NextConfig(**settings)).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    made, prompts = {}, [prompt(620, 9), *prompts]  # the first one is longer than a block, of 544 tokens
    for budget in (None, CacheBudget.of(2048), RECENT):
        with vllm_engine(tmp_path, budget, dtype="bfloat16") as llm:
            before = free_blocks(llm)
            made[budget] = generate(llm, prompts, 60)
            assert generate(llm, prompts, 60) == made[budget]
            assert free_blocks(llm) == before
    stock, whole, compressed = made.values()
    assert whole == stock
    long = [(tokens, said) for tokens, said in zip(prompts, compressed, strict=True) if len(tokens) > RECENT.capacity]
    right, wrong = (
        sum(sum(peer_gaps(tmp_path, tokens, budget, said)) for tokens, said in long)
        for budget in (RECENT, CacheBudget.of(2048))
    )
    assert 5 * right < wrong, (right, wrong)


@pytest.mark.slow
def test_two_ranks(gemma, prompts):
    got = run_offline(gemma, prompts, 60, BUDGET, tensor_parallel_size=2, max_num_batched_tokens=333)
    assert got == [peer_generate(gemma, tokens, BUDGET, 60) for tokens in prompts]


@pytest.mark.slow
def test_a_budget_above_the_length_changes_nothing(checkpoint, prompts):
    outputs = []
    for budget in (None, CacheBudget.of(2048)):
        with vllm_engine(checkpoint, budget) as llm:
            outputs.append(generate(llm, prompts, 40))
    assert outputs[0] == outputs[1]
