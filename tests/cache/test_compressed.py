"""Sequences in files: what was saved decodes like the original, and nothing else is loaded."""

import json
import os
from dataclasses import replace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from snapstream import CacheBudget, RequestError, SamplingParams
from snapstream.cache import CompressedSequence, compressed
from snapstream.errors import CacheFileError
from tests.checkpoints import prompt, save_checkpoint
from tests.conftest import save_tokenizer
from tests.engine.test_conversation import NO_SPECIAL, run
from tests.engine.test_engine import greedy, make
from tests.policies import LargeValues

BUDGET = CacheBudget.of(48)


def same(a, b):
    assert a.layouts == b.layouts
    assert (a.tokens, a.answer, a.budget) == (b.tokens, b.answer, b.budget)
    for mine, theirs in zip(a.layers, b.layers, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine.tensors, theirs.tensors, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(a.positions, b.positions, strict=True))
    assert (a.logits is None) == (b.logits is None)
    assert a.logits is None or torch.equal(a.logits, b.logits)


@pytest.fixture(params=["grouped", "latent"])
def model(request, checkpoint, deepseek):
    return checkpoint if request.param == "grouped" else deepseek


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    path = tmp_path_factory.mktemp("deepseek")
    save_checkpoint(path, "deepseek-v3")
    save_tokenizer(path)
    return path


@pytest.mark.parametrize("length", [20, 140])
def test_a_prompt_that_was_read_is_decoded_from_a_file(model, tmp_path, length):
    """Bit for bit as if it had been read here, sampled or not, by this engine and by another one."""
    llm = make(model, budget=BUDGET, sessions=1)
    params = [greedy(30, logprobs=2), SamplingParams(max_tokens=30, ignore_eos=True, temperature=1.0, seed=3)]
    want = [llm.generate(prompt(length), one)[0] for one in params]
    read = run(llm, prompt(length), SamplingParams(max_tokens=0), keep=True).saved
    read.check_integrity()
    path = tmp_path / "read.safetensors"
    llm.engine.files.save(read, path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    other = make(model, budget=CacheBudget.preset("streaming", 64), sessions=1, slots=1)
    for engine in (llm, other):
        loaded = engine.engine.files.load(path)
        same(loaded, read)
        for one, expected in zip(params, want, strict=True):
            for past in (read, loaded):
                got = run(engine, [], one, past=past)
                assert got.token_ids == expected.token_ids
                if not llm.engine.spec.experts:  # products of experts are grouped with those of other slots
                    assert got.logprobs == expected.logprobs
                assert got.cache.prompt_tokens == length


@pytest.mark.parametrize("steps", [1, 10, 70])
def test_a_turn_goes_on_from_a_file(model, tmp_path, steps):
    llm = make(model, budget=BUDGET, sessions=1)
    first = run(llm, prompt(100), greedy(steps, logit_bias=NO_SPECIAL), keep=True).saved
    path = tmp_path / "turn.safetensors"
    llm.engine.files.save(first, path, note="hello")
    loaded = make(model, budget=BUDGET, sessions=1).engine.files.load(path)
    assert loaded.note == "hello"
    same(loaded, first)
    params = greedy(40, logprobs=1, return_kept_tokens=True)
    want, got = (run(llm, prompt(33, seed=2), params, past=past) for past in (first, loaded))
    assert (got.token_ids, got.logprobs, got.cache) == (want.token_ids, want.logprobs, want.cache)


def test_what_is_decoded_after_an_answer_needs_a_token(checkpoint):
    llm = make(checkpoint, budget=BUDGET, sessions=1)
    turn = run(llm, prompt(100), greedy(10, logit_bias=NO_SPECIAL), keep=True).saved
    assert turn.logits is None
    with pytest.raises(RequestError, match="give at least one token"):
        llm.engine.add_request([], greedy(3), past=turn)
    read = run(llm, prompt(100), SamplingParams(max_tokens=0), keep=True).saved
    for params in (greedy(3, kv_budget=32), greedy(3, return_kept_tokens=True)):
        with pytest.raises(RequestError, match="keeps its budget"):
            llm.engine.add_request([], params, past=read)
    with pytest.raises(RequestError, match="up to 48 entries, but this engine's slots hold 32"):
        make(checkpoint, budget=32, sessions=1).engine.add_request([], greedy(3), past=read)
    with pytest.raises(RequestError, match="keep=True"):
        llm.engine.add_request([5], greedy(3), past=replace(read, positions=()))


def test_what_does_not_belong_here_is_refused(checkpoint, tmp_path):
    llm = make(checkpoint, budget=BUDGET, sessions=1)
    read = run(llm, prompt(140), SamplingParams(max_tokens=0), keep=True).saved
    path = tmp_path / "read.safetensors"
    llm.engine.files.save(read, path)
    other = tmp_path / "other"
    save_checkpoint(other, "llama3-gqa", initializer_range=0.03)
    save_tokenizer(other)
    for engine, message in [
        (make(other, budget=BUDGET, sessions=1), "another model or tokenizer"),
        (make(checkpoint, budget=32, sessions=1), "up to 48 entries, but a slot of this engine has 32"),
        (make(checkpoint, budget=48, sessions=1, max_model_len=100), "max_model_len is 100"),
        (make(checkpoint, budget=BUDGET, sessions=1, dtype="bfloat16"), "float32, but caches are bfloat16"),
    ]:
        with pytest.raises(CacheFileError, match=message):
            engine.engine.files.load(path)
    with pytest.raises(CacheFileError, match="could not be read"):
        llm.engine.files.load(tmp_path / "nothing.safetensors")
    with pytest.raises(CacheFileError, match="could not be written"):
        llm.engine.files.save(read, tmp_path / "no" / "such" / "place")
    save_file({"x": torch.zeros(3)}, path)
    with pytest.raises(CacheFileError, match="not a compressed sequence"):
        llm.engine.files.load(path)


def test_damage_is_found_wherever_it_is(checkpoint, tmp_path):
    """A bit flipped in the data, in the header, or a file that was cut."""
    llm = make(checkpoint, budget=BUDGET, sessions=1)
    read = run(llm, prompt(140), SamplingParams(max_tokens=0), keep=True).saved
    path = tmp_path / "read.safetensors"
    llm.engine.files.save(read, path)
    whole = path.read_bytes()
    generator = torch.Generator().manual_seed(0)
    places = torch.randint(8, len(whole), (60,), generator=generator).tolist()
    for place in places:
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        with pytest.raises(CacheFileError):
            llm.engine.files.load(path)
    for place in torch.randint(0, len(whole), (30,), generator=generator).tolist():
        path.write_bytes(whole[:place])
        with pytest.raises(CacheFileError):
            llm.engine.files.load(path)
    with _opened(path, whole) as file:
        described = json.loads(file.metadata()["snapstream"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert described["tokens"] == 140
    assert CacheBudget.parse(described["budget"]) == BUDGET
    for field, value in [
        ("layouts", [{"length": 3}]),
        ("layouts", [described["layouts"][0] | {"limit": 0}]),
        ("layouts", [described["layouts"][0] | {"count": 47}]),
        ("layouts", described["layouts"] * 2),
        ("tokens", 139),
        ("budget", None),
        ("format", "snapstream-sequence-0"),
        ("digest", None),
        ("answer", None),
    ]:
        changed = {key: val for key, val in (described | {field: value}).items() if val is not None}
        save_file(tensors, path, {"snapstream": json.dumps(changed)})
        with pytest.raises(CacheFileError):
            llm.engine.files.load(path)
    path.write_bytes(whole)
    same(llm.engine.files.load(path), read)


def test_files_of_the_format_before_can_be_read(checkpoint, tmp_path):
    """It had one layout for all layers."""
    llm = make(checkpoint, budget=BUDGET, sessions=1)
    read, path = run(llm, prompt(140), SamplingParams(max_tokens=0), keep=True).saved, tmp_path / "file"
    llm.engine.files.save(read, path)
    with safe_open(path, framework="pt") as file:
        described = json.loads(file.metadata()["snapstream"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    (layout,) = described.pop("layouts")
    described |= {"format": "snapstream-sequence-1", "layout": layout}
    for changed in (described, described | {"layout": layout | {"limit": 0}}):
        undigested = {name: value for name, value in changed.items() if name != "digest"}
        digest = compressed._digest(tensors, undigested)
        save_file(tensors, path, {"snapstream": json.dumps(undigested | {"digest": digest})})
        if changed is described:
            same(llm.engine.files.load(path), read)
            assert CompressedSequence.describe(path)["layouts"] == [layout]
        else:
            with pytest.raises(CacheFileError):
                llm.engine.files.load(path)


def test_a_budget_by_a_policy_that_is_not_here_is_left_out(checkpoint, tmp_path):
    llm = make(checkpoint, budget=CacheBudget(4, 24, 20, policy=LargeValues()), sessions=1)
    read = run(llm, prompt(140), SamplingParams(max_tokens=0), keep=True).saved
    llm.engine.files.save(read, tmp_path / "read.safetensors")
    loaded = llm.engine.files.load(tmp_path / "read.safetensors")
    assert (read.budget.policy, loaded.budget) == (LargeValues(), None)
    want = llm.generate(prompt(140), greedy(20))[0]
    assert run(llm, [], greedy(20), past=loaded).token_ids == want.token_ids


def test_what_was_only_read_is_not_decoded_with_others(checkpoint):
    """A launch of others between reading and saving must not write into its ring."""
    llm = make(checkpoint, budget=BUDGET, sessions=1)
    want = llm.generate(prompt(140), greedy(20))[0]
    others = [llm.engine.add_request(prompt(30, seed=i), greedy(100)) for i in range(2)]
    llm.engine.step()
    llm.engine.step()
    read = run(llm, prompt(140), SamplingParams(max_tokens=0), keep=True).saved
    llm.engine.discard(others)
    again = run(llm, [], greedy(20), past=read)
    assert again.token_ids == want.token_ids
    assert again.cache == want.cache


def _opened(path, contents):
    path.write_bytes(contents)
    return safe_open(path, "pt")


def test_a_save_that_breaks_off_leaves_what_was_there(checkpoint, tmp_path, monkeypatch):
    llm = make(checkpoint, budget=BUDGET, sessions=1)
    read = run(llm, prompt(140), SamplingParams(max_tokens=0), keep=True).saved
    path = tmp_path / "read.safetensors"
    llm.engine.files.save(read, path)

    def broken(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", broken)
    with pytest.raises(KeyboardInterrupt):
        llm.engine.files.save(replace(read, answer="new"), path)
    assert os.listdir(tmp_path) == ["read.safetensors"]
    assert llm.engine.files.load(path).answer == ""
