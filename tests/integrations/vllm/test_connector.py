"""Caches that travel: an engine hands them out and fetches them, through a directory; no token is another for it."""

import time

import pytest

from snapstream import CacheBudget
from snapstream.errors import ConfigurationError
from tests.checkpoints import prompt
from tests.integrations.vllm.engines import (
    BUDGET,
    MLA,
    free_blocks,
    generate,
    held_blocks,
    run_by_hand,
    scheduler,
    vllm_engine,
)
from tests.integrations.vllm.travel import LEAVES, decode, payloads, read, transfer, travelling
from tests.peers import peer_generate

pytest.importorskip("vllm")

LENGTHS = (700, 300, 37, 127, 128, 129, 513, 90)


@pytest.fixture(scope="module")
def prompts():
    return [prompt(length, seed) for seed, length in enumerate(LENGTHS)]


@pytest.mark.parametrize("chunk", [2048, 48])
def test_tokens_are_those_of_one_instance(llama, prompts, tmp_path, chunk):
    seen = []
    with vllm_engine(llama, BUDGET, kv_transfer_config=transfer(tmp_path), max_num_batched_tokens=chunk) as llm:
        before = free_blocks(llm)
        departures = read(llm, prompts)
        assert free_blocks(llm) == before
        assert len(payloads(tmp_path)) == len(prompts)
        got = decode(llm, prompts, departures, 100, lambda _: seen.append(held_blocks(llm)))
        assert free_blocks(llm) == before
        assert not list(tmp_path.iterdir())
    assert got == [peer_generate(llama, tokens, BUDGET, 100) for tokens in prompts]
    assert max(max(step.values()) for step in seen if step) == 4  # never a block more than it decodes in


def test_latents_travel(deepseek, tmp_path):
    some = [prompt(n, n) for n in (300, 37, 130)]
    with vllm_engine(deepseek, BUDGET, kv_transfer_config=transfer(tmp_path), **MLA) as llm:
        departures = read(llm, some)
        got = decode(llm, some, departures, 60)
    assert got == [peer_generate(deepseek, tokens, BUDGET, 60, latent=True) for tokens in some]


def test_other_budgets_block_sizes_and_prefix_hits(llama, prompts, tmp_path):
    """A request's own budget holds on both sides; what the prefix cache has is not read again."""
    some = [prompts[0], prompts[0], prompts[0] + [5, 6, 7]]
    with vllm_engine(llama, BUDGET, kv_transfer_config=transfer(tmp_path), enable_prefix_caching=True) as llm:
        departures = read(llm, some, kv_budget=64)
        got = decode(llm, some, departures, 60, kv_budget=64)
        mixed = decode(llm, some[:1], read(llm, some[:1]), 6, kv_budget=64)
        assert mixed == [None]  # the server's budget on one side, 64 on the other: no token may leave
        assert free_blocks(llm) == llm.llm_engine.vllm_config.cache_config.num_gpu_blocks - 1
    assert got == [peer_generate(llama, tokens, CacheBudget.of(64), 60) for tokens in some]


@pytest.mark.parametrize("policy", ["fail", "recompute"])
@pytest.mark.parametrize("damage", ["missing", "cut", "changed", "numbers", "other", "text"])
def test_a_payload_that_does_not_come(llama, prompts, tmp_path, policy, damage):
    """That request fails, or its prompt is read here; the others do not notice, and no block is lost."""
    some = prompts[:3]
    with vllm_engine(llama, BUDGET, kv_transfer_config=transfer(tmp_path, policy=policy)) as llm:
        before = free_blocks(llm)
        departures = read(llm, some)
        victim = next(path for path in payloads(tmp_path) if path.name.startswith(departures[1][1]["key"]))
        if damage == "missing":
            victim.unlink()
        elif damage == "cut":
            victim.write_bytes(victim.read_bytes()[:-1000])
        elif damage == "changed":
            victim.write_bytes(victim.read_bytes().replace(b"first_head", b"worst_head"))
        elif damage == "numbers":
            payload = bytearray(victim.read_bytes())
            payload[-5000] ^= 1
            victim.write_bytes(payload)
        elif damage == "other":
            other = next(path for path in payloads(tmp_path) if path.name.startswith(departures[0][1]["key"]))
            victim.write_bytes(other.read_bytes())
        else:
            victim.write_text("nothing of the kind")
        got = decode(llm, some, departures, 60)
        assert free_blocks(llm) == before
        assert not scheduler(llm).requests
    want = [peer_generate(llama, tokens, BUDGET, 60) for tokens in some]
    assert (got[0], got[2]) == (want[0], want[2])
    if policy == "fail":
        assert got[1] is None
    else:  # compressed where the decode instance reads it: with the first token
        first = departures[1][0]
        assert got[1] == first + peer_generate(llama, some[1] + first, BUDGET, 59)


def test_aborts_on_either_side(llama, prompts, tmp_path):
    some = prompts[:2]
    with vllm_engine(llama, BUDGET, kv_transfer_config=transfer(tmp_path), max_num_batched_tokens=128) as llm:
        before = free_blocks(llm)

        def abort(at, number):
            def each(step):
                if step == at:
                    ids = [r for r in scheduler(llm).requests if r.startswith(f"r{number}")]
                    llm.llm_engine.engine_core.abort_requests(ids)
                    llm.llm_engine.abort_request([f"r{number}"])

            return each

        got = run_by_hand(llm, some, travelling(1, LEAVES), abort(2, 0))  # while its prompt is read
        assert got[0] is None
        assert len(payloads(tmp_path)) == 1  # of the other
        departures = read(llm, some)
        for at in (0, 1, 5):  # while its cache is fetched, when it has come, in mid-decode
            made = decode(llm, some, read(llm, some), 60, abort(at, 0))
            assert made[1] == peer_generate(llama, some[1], BUDGET, 60)
            for _ in range(3):  # a cache that came too late gives its blocks back when it has come
                llm.llm_engine.step()
            assert free_blocks(llm) == before
        assert decode(llm, some, departures, 30) == [peer_generate(llama, tokens, BUDGET, 30) for tokens in some]
        assert free_blocks(llm) == before


def test_a_preempted_request_reads_its_prompt_here(llama, prompts, tmp_path):
    some = prompts[:2]
    with vllm_engine(llama, BUDGET, kv_transfer_config=transfer(tmp_path)) as llm:
        before, core = free_blocks(llm), scheduler(llm)

        def preempt(step):
            for request in list(core.running):
                is_first = request.request_id.startswith("r0")
                if is_first and request.num_output_tokens == 20 and not request.num_preemptions:
                    core.running.remove(request)
                    core._preempt_request(request, 0.0)

        departures = read(llm, some)
        got = decode(llm, some, departures, 60, preempt)
        assert free_blocks(llm) == before
    want = [peer_generate(llama, tokens, BUDGET, 60) for tokens in some]
    said = want[0][:21]
    assert got == [said + peer_generate(llama, some[0] + said, BUDGET, 39), want[1]]


def test_what_nobody_fetches_is_forgotten(llama, prompts, tmp_path):
    with vllm_engine(llama, BUDGET, kv_transfer_config=transfer(tmp_path, keep=1)) as llm:
        read(llm, prompts[:2])
        assert len(payloads(tmp_path)) == 2
        time.sleep(1.5)
        generate(llm, prompts[2:3], 5)
        assert not list(tmp_path.iterdir())


def test_what_cannot_travel_is_the_clients_error(llama, tmp_path):
    from vllm.exceptions import VLLMValidationError

    arrives = {"do_remote_prefill": True, "length": 9, "key": "0" * 32, "source": "directory"}
    arrives |= {"ranks": 1, "for_ranks": 1}
    several = travelling(1, LEAVES)
    several.n, several.temperature = 2, 1.0
    cases = [
        (travelling(2, LEAVES), "max_tokens must be 1"),
        (several, "n must be 1"),
        (travelling(1, LEAVES | arrives), "sets both"),
        (travelling(5, arrives | {"length": 10}), "length is 10, but the prompt has 10 tokens"),
        (travelling(5, arrives | {"length": True}), "length is True"),
        (travelling(5, arrives | {"key": "../../etc/passwd"}), "key is not one"),
        (travelling(5, arrives | {"source": "10.0.0.1:80"}), "fetches from: directory"),
        (travelling(5, arrives | {"ranks": 0}), "ranks is 0"),
        (travelling(5, arrives | {"for_ranks": 2}), "split for 2 tensor-parallel ranks, but this instance has 1"),
        (travelling(5, arrives, prompt_logprobs=1), "prompt_logprobs"),
    ]
    with vllm_engine(llama, BUDGET, kv_transfer_config=transfer(tmp_path)) as llm:
        for params, message in cases:
            with pytest.raises(VLLMValidationError, match=message):
                llm.llm_engine.add_request("bad", {"prompt_token_ids": [5] * 10}, params)
        assert not scheduler(llm).requests
    for role, params, message in (
        ("kv_consumer", travelling(1, LEAVES), "does not send caches"),
        ("kv_producer", travelling(5, arrives), "does not fetch caches"),
    ):
        with (
            vllm_engine(llama, BUDGET, kv_transfer_config=transfer(tmp_path, role)) as llm,
            pytest.raises(VLLMValidationError, match=message),
        ):
            llm.llm_engine.add_request("bad", {"prompt_token_ids": [5] * 10}, params)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "must say how caches are transferred"),
        ({"directory": "/tmp", "address": "localhost:7000"}, "must say how caches are transferred"),
        ({"directory": "/tmp", "keep": 0}, "keep in kv_connector_extra_config is 0"),
        (
            {"kepp": 5},
            "unknown in kv_connector_extra_config: kepp; allowed: address, directory, keep, limit, peers, ranks",
        ),
        ({"address": "localhost", "peers": ["localhost:7000"]}, "'localhost' is not an address of the form host:port"),
        ({"address": "localhost:7000"}, "a decode instance needs peers"),
        ({"peers": ["localhost:7000"]}, "a prefill instance needs an address"),
        ({"address": "localhost:7000", "peers": "localhost:7000"}, "peers .* must be a list"),
        ({"address": "localhost:7000", "peers": ["localhost:7000"]}, "SNAPSTREAM_TRANSFER_KEY must hold the same key"),
    ],
)
def test_bad_settings_stop_the_server(llama, monkeypatch, settings, message):
    monkeypatch.delenv("SNAPSTREAM_TRANSFER_KEY", raising=False)
    config = transfer(settings.pop("directory", None), **settings)
    with pytest.raises(ConfigurationError, match=message), vllm_engine(llama, BUDGET, kv_transfer_config=config):
        pass
