"""Models whose layers are not all alike: full attention with a budget beside windows, two windows, two rotations."""

import json
import random
from dataclasses import replace

import pytest
import torch

from snapstream import CacheBudget, SamplingParams
from snapstream.cache import LayerGroup
from snapstream.errors import CacheFileError
from snapstream.kernels import triton as kernels
from snapstream.models import families
from snapstream.models.families import llama
from snapstream.models.families.family import Family
from snapstream.models.weights import load_spec
from tests.checkpoints import EXPERTS, HYBRIDS, NEAR, WINDOWED, prompt, save_checkpoint
from tests.conftest import save_tokenizer, skip_wide_experts
from tests.conversation import NaiveConversation
from tests.engine.test_conversation import NO_SPECIAL, STEPS, run
from tests.engine.test_engine import greedy, make
from tests.integrity import check_integrity

BUDGET = CacheBudget(sink=4, recent=24, top_k=20, window=8, kernel=5)
WINDOWS = (11, 30)


def fields_of_two_windows(config, architecture):
    """Layers 0 and 2 look back 11 tokens and rotate by angles of their own, layer 1 looks back 30."""
    read = llama.LLAMA.fields(config, "Qwen3ForCausalLM")
    entry = read["groups"][0].entry
    short = LayerGroup((0, 2), entry, WINDOWS[0], "sliding_attention")
    return read | {"groups": (short, LayerGroup((1,), entry, WINDOWS[1], "full_attention"))}


def fields_of_two_rotations(config, architecture):
    """All layers have full attention and a budget; layer 1 rotates by other angles."""
    read = llama.LLAMA.fields(config, "Qwen3ForCausalLM")
    entry = read["groups"][0].entry
    kinds = ((0, 2), "sliding_attention"), ((1,), "full_attention")
    return read | {"groups": tuple(LayerGroup(layers, entry, None, rotation) for layers, rotation in kinds)}


OWN = {
    name: Family((architecture,), fields, llama.LLAMA.block, llama.LLAMA.places)
    for name, architecture, fields in (
        ("two-windows", "TwoWindowsForCausalLM", fields_of_two_windows),
        ("two-rotations", "TwoRotationsForCausalLM", fields_of_two_rotations),
    )
}


@pytest.fixture(params=[*WINDOWED, *OWN, "gemma4-shared"])
def windowed(request, tmp_path, monkeypatch):
    """Checkpoints without states."""
    return save_mixed(tmp_path, request.param, monkeypatch)


@pytest.fixture(params=[*WINDOWED, *OWN, "gemma4-shared", *HYBRIDS])
def mixed(request, tmp_path, monkeypatch):
    """Checkpoints of all such kinds."""
    return save_mixed(tmp_path, request.param, monkeypatch)


def save_mixed(tmp_path, family, monkeypatch):
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, *OWN.values()))
    save_checkpoint(tmp_path, "qwen3-windows" if family in OWN else family)
    save_tokenizer(tmp_path)
    if family in OWN:
        config = json.loads((tmp_path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": list(OWN[family].architectures)}))
    return tmp_path


def check_turns(checkpoint, sizes, *, ring="elastic", seed=0, **settings):
    """Through chunks, compression, sessions and files; windows are exact, whatever a launch has stored past an end."""
    budget = replace(BUDGET, ring=ring, policy=random.Random(seed).choice(["snapstream", "spans"]))
    llm = make(checkpoint, budget=budget, sessions=1, decode_steps=STEPS, **settings)
    naive, saved, pending = NaiveConversation(checkpoint, budget, overrun=STEPS), None, []
    for turn, (length, steps) in enumerate(sizes):
        tokens = pending + prompt(length, seed=seed * 10 + turn)
        expected = naive.turn(tokens, steps)
        output = run(llm, tokens, greedy(steps, return_kept_tokens=True, logit_bias=NO_SPECIAL), past=saved, keep=True)
        check_integrity(llm.engine)
        assert list(output.token_ids) == expected
        output.saved.check_integrity()
        llm.engine.files.save(output.saved, checkpoint / "saved")
        saved, pending = llm.engine.files.load(checkpoint / "saved"), expected[-1:]
        assert [[head.tolist() for head in layer] for layer in saved.positions] == naive.positions()
        assert saved.nbytes <= llm.engine.plan.sessions


@pytest.mark.parametrize("attention", ["sdpa", "auto"])
@pytest.mark.parametrize("ring", ["elastic", "resnap"])
def test_turns_equal_naive_turns(mixed, attention, ring):
    """In plain torch and in the native loop, with speculation and without."""
    for seed in range(3):
        rng = random.Random(seed)
        sizes = [(rng.choice([1, 5, 33, 60]), rng.choice([2, 10, 25])) for _ in range(3)]
        settings = {"speculative": "lookup"} if seed == 1 else {}
        check_turns(mixed, sizes, ring=ring, seed=seed, attention=attention, **settings)


@pytest.mark.parametrize("family", [*NEAR, *EXPERTS, *HYBRIDS])
def test_turns_of_every_family_equal_naive_turns(tmp_path, family):
    skip_wide_experts(family)
    save_checkpoint(tmp_path, family)
    save_tokenizer(tmp_path)
    check_turns(tmp_path, [(70, 30), (5, 10)])


def test_the_last_cache_may_be_that_of_a_window(tmp_path):
    """Then layers after it also read a cache with a budget, of an earlier layer; in Gemma 4's models it is the last."""
    types = ["sliding_attention", "full_attention"] * 3
    save_checkpoint(tmp_path, "gemma4-shared", num_kv_shared_layers=3, layer_types=types)
    save_tokenizer(tmp_path)
    check_turns(tmp_path, [(70, 30), (5, 10)])


@pytest.mark.parametrize("family", [*NEAR, *EXPERTS, *HYBRIDS])
def test_every_family_in_bfloat16(tmp_path, family):
    """About the logarithms of float32; rounding may choose other experts."""
    skip_wide_experts(family)
    save_checkpoint(tmp_path, family)
    save_tokenizer(tmp_path)
    settings = {"budget": 64, "max_model_len": 200, "slots": 1}
    (want,) = make(tmp_path, dtype="float32", **settings).generate([prompt(100)], greedy(6, logprobs=2))
    params = greedy(6, logprobs=2, forced=tuple(want.token_ids))
    (got,) = make(tmp_path, dtype="bfloat16", **settings).generate([prompt(100)], params)
    mine, theirs = ([each.logprob for each in one.logprobs] for one in (got, want))
    assert sum(abs(a - b) for a, b in zip(mine, theirs, strict=True)) / 6 < 1.0, (mine, theirs)


@pytest.mark.parametrize("speculative", ["off", "lookup"])
@pytest.mark.parametrize("family", ["qwen3.5", "qwen3-windows", "two-windows", "gemma4-shared"])
def test_turns_by_tritons_kernels_equal_naive_turns(family, speculative, tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "interpreting", False)  # other tests on the CPU are not for the interpreter
    checkpoint = save_mixed(tmp_path, family, monkeypatch)
    check_turns(checkpoint, [(50, 6), (12, 5)], attention="triton", speculative=speculative)


def test_a_conversation_is_one_prompt_if_nothing_is_dropped(mixed):
    """Also if a turn ends in the middle of a launch, or at a string that began in an earlier one."""
    endings = [{"stop_token_ids": (9, 30, 31, 32, 33, 50, 60)}, {"stop": ("w9", "w5", "w20w", "1w")}, {}]
    for seed, ending in enumerate(endings):
        settings = {"decode_steps": 8, "max_model_len": 300}
        llm, alone = (make(mixed, budget=None, sessions=sessions, **settings) for sessions in (1, 0))
        text, saved = [], None
        for turn in range(3):
            new = prompt(40, seed=seed * 10 + turn)
            others = [llm.engine.add_request(prompt(9, seed=3), greedy(40))]
            first = [*text[len(saved.tokens) :], *new] if saved else new
            output = run(llm, first, greedy(30, logit_bias=NO_SPECIAL, **ending), past=saved, keep=True)
            text += new
            (want,) = alone.generate([text], greedy(30, logit_bias=NO_SPECIAL, **ending))
            assert output.token_ids == want.token_ids
            saved = output.saved
            assert saved is not None
            text = [*text, *output.token_ids]
            assert list(saved.tokens) == text[: len(saved.tokens)]
            for name in others:
                llm.engine.abort(name)


def test_an_answer_of_one_token_leaves_windows_whole(mixed):
    """Even if others decode in the same step, whose sequences nobody keeps."""
    llm = make(mixed, budget=None, sessions=1)
    company = llm.engine.add_request(prompt(20, seed=1), greedy(150))
    for _ in range(5):
        llm.engine.step()
    for tokens in (1, 2, 3):
        saved = run(llm, prompt(60), greedy(tokens), keep=True).saved
        (want,) = make(mixed, budget=None).generate([[*saved.tokens, *prompt(5)]], greedy(20))
        assert run(llm, prompt(5), greedy(20), past=saved).token_ids == want.token_ids
    llm.engine.abort(company)


@pytest.mark.parametrize("settings", [{}, {"speculative": "lookup", "speculative_tokens": 12}])
def test_launches_may_be_longer_than_windows(tmp_path, settings):
    save_checkpoint(tmp_path, "qwen2-windows", sliding_window=6)
    save_tokenizer(tmp_path)
    stop = SamplingParams(max_tokens=60, stop_token_ids=(9, 30, 31, 32, 33, 50, 60), logit_bias=NO_SPECIAL)
    llm = make(tmp_path, budget=None, sessions=1, decode_steps=16, **settings)
    for seed in range(6):
        saved = run(llm, prompt(30, seed=seed), stop, keep=True).saved
        (want,) = make(tmp_path, budget=None).generate([[*saved.tokens, *prompt(5)]], greedy(20))
        assert run(llm, prompt(5), greedy(20), past=saved).token_ids == want.token_ids


def test_a_long_stop_string_costs_the_cache_only_if_a_window_has_lost_something(mixed):
    llm = make(mixed, budget=None, sessions=1, decode_steps=1)
    shortest = min([group.window for group in llm.engine.spec.groups if group.window is not None] or [1000])
    for length in (2, 60):
        (answer,) = llm.generate([prompt(length)], greedy(40, logit_bias=NO_SPECIAL))
        for tokens in (min(shortest - 3 - length, 20), 25):
            if tokens < 2:
                continue
            words = "".join(f"w{token}" for token in answer.token_ids[:tokens])
            params = SamplingParams(max_tokens=40, stop=words, logit_bias=NO_SPECIAL, ignore_eos=True)
            saved = run(llm, prompt(length), params, keep=True).saved
            assert (saved is not None) == (tokens <= 17 or length + tokens < shortest)


@pytest.mark.parametrize("attention", ["sdpa", "auto"])
def test_full_caches_equal_transformers(tmp_path, attention):
    for family in WINDOWED:
        peer = save_checkpoint(tmp_path / family, family)
        save_tokenizer(tmp_path / family)
        tokens = prompt(90, 3)
        with torch.no_grad():
            want = peer.generate(
                torch.tensor([tokens]), max_new_tokens=40, do_sample=False, eos_token_id=None, use_cache=False
            )
        for settings in ({}, {"speculative": "lookup"}):
            llm = make(tmp_path / family, budget=None, attention=attention, **settings)
            assert llm.generate(tokens, greedy(40))[0].token_ids == tuple(want[0, 90:].tolist())


def test_output_depends_on_nothing_else(mixed):
    """Not on company, chunks, launches, slots, guesses, shared beginnings, or a file in between."""
    prompts = [prompt(60) + prompt(length, seed=length) for length in (5, 60, 100, 33, 5, 80)]
    alone = [make(mixed).generate(each, greedy(50))[0].token_ids for each in prompts]
    for settings in (
        {"slots": 1, "prefill_chunk": 256, "decode_steps": 1},
        {"slots": 7, "prefill_chunk": 7, "decode_steps": 8},
        {"speculative": "lookup", "speculative_tokens": 5},
        {"speculative": "draft-model", "draft_model": str(mixed), "speculative_tokens": 3},
        {"prefix_cache": 2**22, "slots": 1},
    ):
        together = make(mixed, **settings).generate(prompts, greedy(50))
        assert [each.token_ids for each in together] == alone
        if settings.get("speculative") == "draft-model":
            assert all(each.accepted == each.drafted > 0 for each in together)
        if "prefix_cache" in settings:
            assert max(each.reused for each in together) >= 32


def test_reports_and_plan(windowed):
    """Bytes and entries are those of each group."""
    llm = make(windowed, sessions=2, decode_steps=3)
    spec, decode = llm.engine.spec, llm.engine.model_runner.decoder
    windows = [spec.layer_group(layer).window for layer in range(spec.cached_layers)]
    each = [spec.entry_of(layer).nbytes(torch.float32) for layer in range(spec.cached_layers)]

    def nbytes(entries):
        """Of so many entries in each layer."""
        return sum(count * size for count, size in zip(entries, each, strict=True))

    assert [cache.entries for cache in decode.layers] == [window or 48 for window in windows]
    lost = [0 if window is None else 16 + 3 for window in windows]  # kept for the sake of sessions
    held = [window or 48 for window in windows]
    assert llm.engine.plan.slots == 3 * (nbytes(held) + nbytes(lost))
    output = run(llm, prompt(100), greedy(30, return_kept_tokens=True), keep=True)
    assert output.cache.bytes_held == nbytes(held)
    assert output.cache.bytes_full == nbytes([min(130, window or 130) for window in windows])
    full, first = None in windows, spec.groups[0].window
    kept = [len(layer[0]) for layer in output.cache.kept.positions]
    assert kept == [first or 48] * windows.count(first)
    assert len(output.cache.kept.mass) == len(kept)
    assert (max(output.cache.kept.mass) < 1) == full
    assert (output.cache.sink, output.cache.pinned, output.cache.recent, output.cache.limit) == (
        (4, 20, 24, 48) if full else (0, 0, first, first)
    )
    slots = [use for use in llm.engine.slots() if use is not None]
    assert [use.bytes_held for use in slots] == [output.cache.bytes_held]
    saved = run(llm, prompt(100), SamplingParams(max_tokens=0), keep=True).saved
    assert sum(layer.nbytes for layer in saved.layers) == output.cache.bytes_held
    assert llm.engine.kept_bytes(100) == saved.nbytes - saved.logits.nbytes
    told = [layer for layer, window in enumerate(windows) if window == first]
    kept = [[sorted(head) for head in saved.positions[layer].tolist()] for layer in told]
    assert [[[*head] for head in layer] for layer in output.cache.kept.positions] == kept


@pytest.mark.parametrize("family", HYBRIDS)
def test_reports_and_plan_of_states(family, tmp_path, monkeypatch):
    """However long a sequence is, its states have one size; slots keep inputs to take them back, and older states."""
    llm = make(save_mixed(tmp_path, family, monkeypatch), sessions=2, decode_steps=3)
    plan, (full, states) = llm.engine.plan, llm.engine.spec.groups
    shape, window, many = states.entry, states.window, len(states.layers)
    matrices, item = shape.heads * shape.key * shape.value * 4, shape.size * 4
    of_states = many * (matrices + window * item)
    entry = full.entry.nbytes(torch.float32) * len(full.layers)
    assert plan.slots == plan.slot_count * (48 * entry + many * (2 * matrices + (window + 16 + 3) * item))
    assert plan.bytes_per_token == entry
    output = run(llm, prompt(100), greedy(30, return_kept_tokens=True), keep=True)
    assert output.cache.bytes_held == 48 * entry + of_states
    assert output.cache.bytes_full == 130 * entry + of_states
    assert [len(layer[0]) for layer in output.cache.kept.positions] == [48] * len(full.layers)
    saved = run(llm, prompt(100), SamplingParams(max_tokens=0), keep=True).saved
    assert sum(layer.nbytes for layer in saved.layers) == output.cache.bytes_held
    assert llm.engine.kept_bytes(100) == saved.nbytes - saved.logits.nbytes
    held = [*llm.engine.model_runner.decoder.layers, *llm.engine.model_runner.decoder.lagging._states]
    tensors = {each.data_ptr(): each for cache in held for each in cache.tensors}  # lagging states share inputs
    assert plan.slots == sum(each.nbytes for each in tensors.values())


def test_a_budget_that_has_no_effect_is_noticed(mixed, caplog):
    make(mixed)
    said = [record.message for record in caplog.records if "the budget has no effect" in record.message]
    assert bool(said) == all(group.window is not None for group in load_spec(mixed).groups)


def test_windows_are_no_longer_than_a_sequence(mixed, tmp_path):
    """A cache that was saved where sequences are short goes on where its windows are longer."""
    short = make(mixed, budget=None, sessions=1, max_model_len=20)
    assert {group.window for group in short.engine.spec.groups} <= {None, *range(21)}
    saved = run(short, prompt(12), SamplingParams(max_tokens=0), keep=True).saved
    short.engine.files.save(saved, tmp_path / "saved")
    long = make(mixed, budget=None, sessions=1, max_model_len=200)
    past = long.engine.files.load(tmp_path / "saved")
    # Layers with a budget keep the budget of the file.
    params = greedy(60 if all(group.window is not None for group in long.engine.spec.groups) else 8)
    assert run(long, [], params, past=past).token_ids == long.generate([prompt(12)], params)[0].token_ids


def test_files_of_other_groups_are_refused(mixed, tmp_path):
    llm = make(mixed, sessions=1)
    saved = run(llm, prompt(60), SamplingParams(max_tokens=0), keep=True).saved
    three = replace(saved, groups=saved.groups[:1] * 3, layouts=saved.layouts[:1] * 3)
    llm.engine.files.save(three, tmp_path / "more")
    with pytest.raises(CacheFileError, match=f"holds 3 groups of layers, but this model has {len(saved.groups)} here"):
        llm.engine.files.load(tmp_path / "more")
