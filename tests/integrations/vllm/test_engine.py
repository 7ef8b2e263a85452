"""The plugin in a real vLLM: tokens against two references, blocks against what the layout says."""

from dataclasses import replace

import pytest

from snapstream import LLM, CacheBudget, SamplingParams
from tests.checkpoints import prompt
from tests.integrations.vllm.engines import (
    BUDGET,
    MIXED,
    MLA,
    free_blocks,
    generate,
    held_blocks,
    run_by_hand,
    sampling,
    scheduler,
    vllm_engine,
)
from tests.peers import peer_generate

pytest.importorskip("vllm")

LENGTHS = (700, 300, 37, 1000, 513, 90)


@pytest.fixture(scope="module")
def prompts():
    return [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def expected(llama, prompts):
    """What transformers makes of the prompts when its attention sees what the oracle keeps."""
    return [peer_generate(llama, tokens, BUDGET, 100) for tokens in prompts]


def builtin(checkpoint, prompts, budget, steps, **params):
    engine = LLM(
        str(checkpoint),
        budget=budget,
        slots=6,
        dtype="float32",
        max_model_len=2048,
        enforce_eager=True,
        report_plan=lambda _: None,
    )
    params = SamplingParams(max_tokens=steps, ignore_eos=True, **params)
    return [list(output.token_ids) for output in engine.generate(prompts, params)]


def test_a_budget_above_the_length_changes_nothing(llama, prompts):
    some = prompts[:5]
    outputs = []
    for budget in (None, CacheBudget.of(2048)):
        with vllm_engine(llama, budget) as llm:
            many = [{"prompt_token_ids": tokens} for tokens in some]
            outputs.append([o.outputs[0] for o in llm.generate(many, sampling(40, logprobs=3), use_tqdm=False)])
    for stock, ours in zip(*outputs, strict=True):
        assert list(ours.token_ids) == list(stock.token_ids)
        for theirs, mine in zip(stock.logprobs, ours.logprobs, strict=True):
            assert {t: p.logprob for t, p in theirs.items()} == {t: p.logprob for t, p in mine.items()}


def test_equals_both_references_and_holds_the_planned_blocks(llama, prompts, expected):
    seen = []
    with vllm_engine(llama, BUDGET, max_num_batched_tokens=4096) as llm:
        before = free_blocks(llm)
        got = run_by_hand(llm, prompts, sampling(100), lambda _: seen.append(held_blocks(llm)))
        assert free_blocks(llm) == before  # every block came back
    assert got == expected
    assert got == builtin(llama, prompts, BUDGET, 100)
    rows = [list(step.values()) for step in seen if len(step) == len(prompts)]
    assert rows[0] == [26, 14, 2, 36, 21, 3]  # prompt and compressed cache, for one step
    assert rows[1] == [4, 4, 2, 4, 4, 3]  # 128 entries; the short ones grow up to that
    assert rows[-1] == [4, 4, 4, 4, 4, 4]
    full = [step[name] for step in seen for name in step if name.startswith(("r2", "r5"))]
    assert max(full) == 8  # for the one step in which a full cache moves out of blocks that others may share


@pytest.mark.parametrize(
    ("budget", "block_size"),
    [
        (CacheBudget(sink=4, recent=40, top_k=57, window=16, pooling="max", kernel=5), 32),
        (CacheBudget(sink=3, recent=40, top_k=58, window=9), 128),
        (CacheBudget(sink=4, recent=40, top_k=56, window=16, ring="paper"), 32),
        (CacheBudget(sink=4, recent=40, top_k=56, window=16, normalize="candidates"), 64),
        (CacheBudget.preset("streaming", 100), 32),
        (CacheBudget.preset("sage-kv", 100), 32),
    ],
    ids=["max pooling", "block 128", "paper ring", "candidates", "streaming", "sage-kv"],
)
def test_around_the_boundary(llama, budget, block_size):
    """A budget that is no multiple of the block, prompts from C - 1 to C + 2 and at the ring's ends."""
    some = [prompt(n, n) for n in (1, 5, 39, 44, 45, 99, 100, 101, 102, 103, 250)]
    with vllm_engine(llama, budget, block_size=block_size) as llm:
        got = generate(llm, some, 110)
    for tokens, made in zip(some, got, strict=True):
        assert made == peer_generate(llama, tokens, budget, 110), len(tokens)


def test_random_selection_equals_the_builtin_engine(llama, prompts):
    budget = CacheBudget.preset("random", 128)
    with vllm_engine(llama, budget) as llm:
        assert generate(llm, prompts, 60) == builtin(llama, prompts, budget, 60)


@pytest.mark.parametrize("chunk", [48, 33, 257])
def test_chunks_do_not_matter(llama, prompts, expected, chunk):
    """Windows straddle chunks; a chunk of 33 leaves last chunks of a few tokens."""
    with vllm_engine(llama, BUDGET, max_num_batched_tokens=chunk, max_num_seqs=6) as llm:
        assert generate(llm, prompts, 100) == expected


def test_a_last_chunk_of_one_token(llama):
    some = [prompt(n, n) for n in (129, 193, 257)]
    with vllm_engine(llama, BUDGET, max_num_batched_tokens=64, max_num_seqs=2, enable_chunked_prefill=True) as llm:
        got = generate(llm, some, 50)
    assert got == [peer_generate(llama, tokens, BUDGET, 50) for tokens in some]


def test_shared_prefixes_and_their_hits(llama):
    """Prompt blocks stay reusable, ring blocks stay private: also for prompts that fit and outgrow their cache."""
    common, short = prompt(400, 1), prompt(96, 2)
    some = [common + prompt(n, n) for n in (50, 1, 200)] + [short + prompt(n, n) for n in (3, 20)] + [short, common]
    want = [peer_generate(llama, tokens, BUDGET, 100) for tokens in some]
    with vllm_engine(llama, BUDGET, enable_prefix_caching=True) as llm:
        assert generate(llm, some, 100) == want
        for _ in range(2):  # now everything is in the prefix cache, rings have turned many times
            outputs = llm.generate([{"prompt_token_ids": t} for t in some], sampling(100), use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == want
        # Whole blocks below the window of 32; of what fits, all but the last token, as in stock vLLM.
        assert [output.num_cached_tokens for output in outputs] == [416, 352, 544, 96, 96, 64, 352]


def test_a_conversation_within_the_budget_shares_as_in_stock_vllm(llama):
    """Also what was generated is published, until the cache is full; then it moves, and what was published stays."""
    first = prompt(70, 1)
    with vllm_engine(llama, BUDGET, enable_prefix_caching=True) as llm:
        (said,) = generate(llm, [first], 300)
        assert said == peer_generate(llama, first, BUDGET, 300)
        turn = first + said[:40] + prompt(9, 2)
        (answer,) = llm.generate({"prompt_token_ids": turn}, sampling(60), use_tqdm=False)
        assert answer.num_cached_tokens == 96
        assert list(answer.outputs[0].token_ids) == peer_generate(llama, turn, BUDGET, 60)


def test_a_small_pool_serves_more_at_once(llama):
    """20 prompts of 900 to 1500 tokens in 160 blocks, beside stock vLLM."""
    some = [prompt(900 + 30 * n, n) for n in range(20)]
    measured, tokens = {}, {}
    for name, budget in (("stock", None), ("snapstream", BUDGET)):
        running, steps, preempted = [], [], []
        with vllm_engine(llama, budget, num_gpu_blocks_override=160, max_num_batched_tokens=2048) as llm:
            requests = scheduler(llm).requests

            def watch(step, llm=llm, requests=requests, running=running, steps=steps, preempted=preempted):
                running.append(len(scheduler(llm).running))
                steps.append(step)
                preempted.append(max((r.num_preemptions for r in requests.values()), default=0))

            tokens[name] = run_by_hand(llm, some, sampling(100), watch)
            assert free_blocks(llm) == 159
        measured[name] = (max(running), len(steps), max(preempted))
    assert measured["snapstream"][0] >= 3.5 * measured["stock"][0], measured
    assert measured["snapstream"][1] < measured["stock"][1] / 2, measured
    assert measured["snapstream"][2] == 0, measured
    assert tokens["snapstream"] == builtin(llama, some, BUDGET, 100)


def test_a_preempted_request_is_compressed_anew_over_what_it_said(llama, prompts, expected):
    """Two requests lose their blocks in mid-decode; the resume rule says exactly which tokens follow."""
    at = {0: 30, 3: 55}
    with vllm_engine(llama, BUDGET) as llm:
        core = scheduler(llm)

        def preempt(step):
            for request in list(core.running):
                number = int(request.request_id.split("-")[0][1:])
                if at.get(number) == request.num_output_tokens and request.num_preemptions == 0:
                    core.running.remove(request)
                    core._preempt_request(request, 0.0)

        before = free_blocks(llm)
        got = run_by_hand(llm, prompts, sampling(100), preempt)
        assert free_blocks(llm) == before
    for number, tokens in enumerate(prompts):
        if number in at:
            said = expected[number][: at[number]]
            want = said + builtin(llama, [tokens + said], BUDGET, 100 - len(said))[0]
            assert want != expected[number]  # so the rule is seen at work
        else:
            want = expected[number]
        assert got[number] == want


def test_preemption_for_want_of_blocks_loses_nothing(llama):
    """Short prompts that grow until the pool is too small: all answers are as they would be alone."""
    some = [prompt(40 + n, n) for n in range(8)]
    with vllm_engine(llama, BUDGET, num_gpu_blocks_override=21, max_model_len=384) as llm:
        preempted = set()
        got = run_by_hand(
            llm,
            some,
            sampling(70),
            lambda _: preempted.update(r.request_id for r in scheduler(llm).requests.values() if r.num_preemptions),
        )
        assert preempted
        assert free_blocks(llm) == 20
    assert got == builtin(llama, some, BUDGET, 70)  # none outgrew its cache, so even these resumed ones are exact


def test_for_want_of_blocks_those_are_preempted_that_still_grow(llama):
    """Stock vLLM would take the blocks of the long prompts, which came last, and change their answers."""
    some = [prompt(40 + n, n) for n in range(8)] + [prompt(150 + n, n) for n in range(2)]
    with vllm_engine(llama, BUDGET, num_gpu_blocks_override=35, max_model_len=384) as llm:
        preempted = set()

        def watch(step):
            preempted.update(r.request_id for r in scheduler(llm).requests.values() if r.num_preemptions)

        got = run_by_hand(llm, some, sampling(70), watch)
        assert free_blocks(llm) == 34
    numbers = {int(request_id.split("-")[0][1:]) for request_id in preempted}
    assert numbers
    assert numbers <= set(range(8))
    assert got == builtin(llama, some, BUDGET, 70)


def test_aborted_requests_give_everything_back(llama, prompts, expected):
    with vllm_engine(llama, BUDGET, max_num_batched_tokens=256) as llm:
        before = free_blocks(llm)
        manager = scheduler(llm).kv_cache_manager.coordinator.single_type_managers[0]
        doomed = {0: 1, 1: 3, 3: 20, 4: 60}  # in prefill, in decode

        def abort(step):
            for number, when in doomed.items():
                if step == when:
                    ids = [r for r in scheduler(llm).requests if r.startswith(f"r{number}")]
                    llm.llm_engine.engine_core.abort_requests(ids)
                    llm.llm_engine.abort_request([f"r{number}"])

        got = run_by_hand(llm, prompts, sampling(100), abort)
        assert free_blocks(llm) == before
        assert not manager.layouts
        assert not manager.req_to_blocks
    assert [got[2], got[5]] == [expected[2], expected[5]]


def test_per_request_budgets_hold_fewer_blocks(llama, prompts):
    from vllm.exceptions import VLLMValidationError

    budgets = [None, 64, None, 96, 128, 40]
    with vllm_engine(llama, BUDGET, max_num_batched_tokens=4096) as llm:
        seen = []
        params = [sampling(50, kv_budget=entries) for entries in budgets]
        got = run_by_hand(llm, prompts, params, lambda _: seen.append(list(held_blocks(llm).values())))
        with pytest.raises(VLLMValidationError, match="a cache has 128 entries here"):
            llm.llm_engine.add_request("bad", {"prompt_token_ids": [5]}, sampling(5, kv_budget=129))
        assert not scheduler(llm).requests
    assert seen[-2] == [4, 2, 3, 3, 4, 2]
    for tokens, entries, made in zip(prompts, budgets, got, strict=True):
        assert made == builtin(llama, [tokens], BUDGET, 50, kv_budget=entries)[0]


@pytest.mark.parametrize("chunk", [4096, 48])
def test_a_number_is_the_same_cache_on_every_server(llama, prompts, chunk):
    """A server whose own policy has one voter, or none, keeps the queries of a request's, also over chunk borders."""
    budgets = [None, 64, 128, 96, 36, 40]
    host = CacheBudget.preset("streaming", 128)
    with vllm_engine(llama, host, max_num_batched_tokens=chunk, max_num_seqs=8) as llm:
        got = run_by_hand(llm, prompts, [sampling(50, kv_budget=entries) for entries in budgets])
    for tokens, entries, made in zip(prompts, budgets, got, strict=True):
        assert made == builtin(llama, [tokens], host if entries is None else CacheBudget.of(entries), 50)[0]


@pytest.mark.parametrize("chunk", [4096, 48])
def test_pins_equal_the_oracle(llama, prompts, chunk):
    """At the beginning, in the middle, where the ring would be, in a prompt that fits, and too many."""
    from vllm.exceptions import VLLMValidationError

    pins = [[[0, 20]], ["150:170", "290:300"], [[20, 37]], [[10, 500]], [], ["80:90", "5:9"]]
    with vllm_engine(llama, BUDGET, max_num_batched_tokens=chunk, max_num_seqs=8, enable_prefix_caching=True) as llm:
        before = free_blocks(llm)
        for _ in range(2):  # then also from shared blocks
            got = run_by_hand(llm, prompts, [sampling(120, pin=pin) for pin in pins])
            for tokens, pin, made in zip(prompts, pins, got, strict=True):
                assert made == peer_generate(llama, tokens, replace(BUDGET, pin=pin), 120), pin
        for pin, message in (("700:9", "ends after its start"), ([[0, 800]], "ends at 800, but the prompt has 700")):
            with pytest.raises(VLLMValidationError, match=message):
                llm.llm_engine.add_request("bad", {"prompt_token_ids": prompts[0]}, sampling(5, pin=pin))
        assert free_blocks(llm) == before
        assert not scheduler(llm).requests


def test_pins_near_the_end_of_a_prompt_that_fits(llama):
    """The prompt is copied out in an order in which the ring does not overwrite what is pinned."""
    some = [prompt(n, n) for n in (100, 127, 128, 129)]
    for shares in (True, False):
        with vllm_engine(llama, BUDGET, enable_prefix_caching=shares) as llm:
            got = generate(llm, some, 120, pin=["70:72", "95:100"])
        for tokens, made in zip(some, got, strict=True):
            assert made == peer_generate(llama, tokens, replace(BUDGET, pin=["70:72", "95:100"]), 120)


def test_seeded_sampling_repeats(llama, prompts):
    """Nothing of the plugin sits in the sampler."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=30, temperature=0.9, top_p=0.9, seed=7, ignore_eos=True, detokenize=False)
    with vllm_engine(llama, BUDGET, max_num_batched_tokens=4096) as llm:
        many = [{"prompt_token_ids": tokens} for tokens in prompts]
        one, two = ([o.outputs[0].token_ids for o in llm.generate(many, params, use_tqdm=False)] for _ in range(2))
    assert one == two


def test_latent_attention_equals_transformers(deepseek, prompts):
    """DeepSeek-V3 with one latent per token: one choice for all heads, 52 blocks become 8."""
    some = [prompt(n, n) for n in (700, 300, 37, 513, 130)]
    seen = []
    with vllm_engine(deepseek, None, **MLA) as llm:
        assert generate(llm, some[:2], 40) == [
            peer_generate(deepseek, tokens, CacheBudget.of(2048), 40, latent=True) for tokens in some[:2]
        ]
    with vllm_engine(deepseek, BUDGET, **MLA) as llm:
        got = run_by_hand(llm, some, sampling(100), lambda _: seen.append(list(held_blocks(llm).values())))
    assert got == [peer_generate(deepseek, tokens, BUDGET, 100, latent=True) for tokens in some]
    assert [row[0] for row in seen if len(row) == len(some)][:2] == [52, 8]
    assert max(max(row) for row in seen[3:-1]) == 8


def test_latent_attention_equals_the_built_in_engine(deepseek, prompts):
    """Two hosts of one method: the same checkpoint, budget and prompts give the same tokens."""
    for budget in (BUDGET, MIXED):
        with vllm_engine(deepseek, budget, **MLA) as llm:
            assert generate(llm, prompts, 60) == builtin(deepseek, prompts, budget, 60)


def test_compiled_equals_eager(llama, prompts, expected):
    with vllm_engine(llama, BUDGET, enforce_eager=False) as llm:
        assert generate(llm, prompts, 100) == expected


def test_one_prompt_too_long_for_the_pool_is_refused_at_start(llama):
    """A prompt of full length needs its own blocks and those of its compressed cache for one step."""
    with (
        pytest.raises(ValueError, match="max_model_len"),
        vllm_engine(llama, BUDGET, num_gpu_blocks_override=66, max_model_len=2048),
    ):
        pass
    with vllm_engine(llama, BUDGET, num_gpu_blocks_override=70, max_model_len=2048) as llm:
        assert len(generate(llm, [prompt(2000)], 40)[0]) == 40


def test_an_unmanaged_engine_beside_a_managed_one(llama, prompts, expected):
    """Nothing is left switched on in the process: the next engine without a budget is stock vLLM."""
    with vllm_engine(llama, None) as llm:
        stock = generate(llm, prompts[:2], 20)
        assert type(scheduler(llm)).__module__.startswith("vllm.")
    with vllm_engine(llama, replace(BUDGET, recent=512, top_k=1536)) as llm:
        assert generate(llm, prompts[:2], 20) == stock
