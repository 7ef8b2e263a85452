"""Structured outputs: masks against brute force, outputs against schemas, and in any company."""

import json
import random
import re
import sys

import jsonschema
import pytest
import torch

from benchmarks.schemas import random_schema
from snapstream import RequestError, SamplingParams
from snapstream.config import StructuredOutputs
from snapstream.engine.requests import grammar
from snapstream.engine.requests.grammar import GrammarCompiler
from tests.bytelevel import MERGES, byte_tokenizer, save_model
from tests.engine.test_engine import BUDGET, make


@pytest.fixture(scope="module")
def of_bytes(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("bytes"), ())


@pytest.fixture(scope="module", params=["qwen3", "llama3-gqa"])
def of_pairs(request, tmp_path_factory):
    """Through the native loop, and in plain torch, as the head has a size that the loop does not take."""
    return save_model(tmp_path_factory.mktemp("pairs"), MERGES, request.param)


@pytest.fixture(scope="module")
def pairs():
    return byte_tokenizer(MERGES)


def shaped(tokens=200, temperature=0.0, seed=0, params=None, **shape):
    return SamplingParams(
        max_tokens=tokens,
        temperature=temperature,
        seed=seed,
        structured_outputs=StructuredOutputs(**shape),
        **(params or {}),
    )


def text_of(tokenizer, token):
    return tokenizer.decode([token], clean_up_tokenization_spaces=False)


def bits(row, size):
    return [token for token in range(size) if int(row[token // 32]) >> (token % 32) & 1]


def random_choices(choose):
    return ["".join(choose.choice("abc1") for _ in range(choose.randint(1, 7))) for _ in range(choose.randint(1, 6))]


def allowed_by(choices, prefix, tokenizer, size):
    """Brute force: what continues one of the choices, or ends it."""
    fitting = [one for one in choices if one.startswith(prefix)]
    texts = {token: text_of(tokenizer, token) for token in range(len(tokenizer))}
    special = set(tokenizer.all_special_ids)
    going_on = {
        token
        for token, text in texts.items()
        if token not in special and text and any(one[len(prefix) :].startswith(text) for one in fitting)
    }
    return going_on | ({tokenizer.eos_token_id} if prefix in choices else set())


def test_masks_are_those_of_brute_force(pairs):
    size = len(pairs) + 5  # a model may have more logits than the tokenizer has tokens
    compiler, choose = GrammarCompiler(pairs, size, [pairs.eos_token_id]), random.Random(0)
    for _ in range(60):
        choices = random_choices(choose)
        mine, prefix = compiler.start(StructuredOutputs(choice=choices)), ""
        while not mine.finished:
            want = allowed_by(choices, prefix, pairs, size)
            got = set(bits(mine.masks((), 1, early=0)[0], size))
            if mine.forced:  # of the ways to write the only text, the tokenizer's
                assert got == {mine.forced[0]} <= want, (choices, prefix)
            else:
                assert got == want, (choices, prefix)
            token = choose.choice(sorted(want))
            mine.accept(token)
            if token == pairs.eos_token_id:
                break
            prefix += text_of(pairs, token)
        assert prefix in choices


def test_masks_after_guesses_are_those_of_single_steps(pairs):
    size = len(pairs)
    compiler, choose = GrammarCompiler(pairs, size, [pairs.eos_token_id]), random.Random(1)
    for _ in range(30):
        wanted = StructuredOutputs(choice=random_choices(choose))
        walker, start = compiler.start(wanted), compiler.start(wanted)
        following, singles = [], [walker.masks((), 1, early=0)[0]]
        while not walker.finished and len(following) < 6:
            token = choose.choice(bits(singles[-1], size))
            if token == pairs.eos_token_id:
                break
            walker.accept(token)
            following.append(token)
            if not walker.finished:
                singles.append(walker.masks((), 1, early=0)[0])
        assert start.valid(following) == len(following)
        rows = start.masks(following, len(following) + 1, early=0)
        for row, single in zip(rows, singles, strict=False):
            assert torch.equal(row, single)
        assert torch.equal(start.masks((), 1, early=0)[0], singles[0]), "it has stayed where it was"
        wrong = next(token for token in range(size) if token not in bits(singles[0], size))
        assert start.valid([wrong]) == 0


def test_the_likeliest_allowed_token_is_taken(of_bytes):
    """Every token is one byte, so where one is forced, it is the only one that is allowed."""
    llm = make(of_bytes, None)
    choose, tokenizer = random.Random(2), llm.tokenizer
    for at in range(8):
        choices = random_choices(choose)
        prompt = tokenizer.encode(f"prompt {at} " * 5)
        output = llm.generate(prompt, shaped(choice=choices, params={"logprobs": 0}))[0]
        assert output.text in choices
        assert output.finish_reason == "stop"
        # The reference: logits of an engine without grammars, which is told what to take.
        prefix = ""
        for step, token in enumerate(output.token_ids):
            allowed = sorted(allowed_by(choices, prefix, tokenizer, len(tokenizer)))
            scores = {}
            for one in allowed:
                forced = llm.generate(
                    prompt + list(output.token_ids[:step]), SamplingParams(max_tokens=1, forced=(one,), logprobs=0)
                )
                scores[one] = forced[0].logprobs[0].logprob
            best = max(scores.values())
            assert scores[token] >= best - 1e-4, (choices, prefix)
            prefix += "" if token == tokenizer.eos_token_id else text_of(tokenizer, token)
        assert prefix == output.text


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("speculative", ["off", "lookup"])
def test_outputs_fit_their_schemas(of_pairs, temperature, speculative):
    """From a compressed cache, several at a time."""
    llm = make(of_pairs, BUDGET, speculative=speculative, max_model_len=2000)
    schemas = [random_schema(random.Random(seed)) for seed in range(20)]
    prompts = [llm.tokenizer.encode(f"say something {seed} " * 12) for seed in range(len(schemas))]
    params = [shaped(1500, temperature, seed, json=schema) for seed, schema in enumerate(schemas)]
    for schema, output in zip(schemas, llm.generate(prompts, params), strict=True):
        assert output.finish_reason == "stop", (schema, output.text, output.error)
        jsonschema.validate(json.loads(output.text), schema)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_same_alone_in_company_and_with_guesses(of_pairs, temperature):
    shapes = [
        {"regex": r"(ab|ca)*12"},
        {"choice": ["abcabcabc", "abcabcab", "true"]},
        {"json": {"type": "object", "properties": {"name": {"type": "string", "maxLength": 9}}, "required": ["name"]}},
        {"grammar": 'start: "x" (A | B)\nA: /[a-c]+/\nB: "true"'},
    ]
    plain, guessing = make(of_pairs, BUDGET), make(of_pairs, BUDGET, speculative="lookup", speculative_tokens=3)
    prompts = [plain.tokenizer.encode(f"abcabc {seed} " * (6 + seed)) for seed in range(6)]
    params = [shaped(40, temperature, seed, **shapes[seed % 4]) for seed in range(4)]
    params += [SamplingParams(max_tokens=40, temperature=temperature, seed=seed, ignore_eos=True) for seed in range(2)]
    alone = [plain.generate(one, each)[0] for one, each in zip(prompts, params, strict=True)]
    for llm in (plain, guessing):
        for output, want in zip(llm.generate(prompts, params), alone, strict=True):
            assert output.token_ids == want.token_ids
            assert output.finish_reason == want.finish_reason


def test_where_one_text_is_possible_its_tokens_are_forced_several_at_once(of_pairs):
    text = "abcabcabcabcabcabcabcabc"
    llm = make(of_pairs, BUDGET, decode_steps=3)
    launches = []
    decode = llm.engine.runner.decode
    llm.engine.runner.decode = lambda batch, most: launches.append(len(batch)) or decode(batch, most)
    output = llm.generate("text ", shaped(choice=[text]))[0]
    assert output.text == text
    assert len(launches) == -(-(output.token_count - 1) // 3)
    guessing = make(of_pairs, BUDGET, speculative="lookup", speculative_tokens=5)
    verified = []
    verify = guessing.engine.model_runner.verify
    guessing.engine.model_runner.verify = lambda batch, guesses: verified.append(guesses) or verify(batch, guesses)
    again = guessing.generate("text ", shaped(choice=[text]))[0]
    assert again.token_ids == output.token_ids
    assert len(verified) <= -(-(output.token_count - 1) // 6) + 1
    assert again.drafted == 0, "forced tokens are no guesses"


def test_an_output_may_not_end_too_early_but_must_fit(of_pairs):
    llm = make(of_pairs, BUDGET)
    for seed in range(5):
        early = {"params": {"min_tokens": 12}, "temperature": 1.0, "seed": seed}
        assert llm.generate("a", shaped(60, regex="[abc]+", **early))[0].token_count >= 12
        assert llm.generate("a", shaped(60, choice=["ab"], **early))[0].text == "ab"
    never = llm.generate("a", shaped(30, choice=["abc"], params={"ignore_eos": True}))[0]
    assert (never.text, never.finish_reason) == ("abc", "stop")


def test_a_stop_string_ends_a_structured_output(of_pairs):
    output = make(of_pairs, BUDGET).generate("a", shaped(choice=["abc12abc"], params={"stop": ("12",)}))[0]
    assert (output.text, output.finish_reason) == ("abc", "stop")


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"json": {"type": "string", "format": "nonsense"}}, "JSON schema cannot be used: Unknown format: nonsense"),
        ({"json": "{"}, "JSON schema is invalid"),
        ({"json": {"type": "object", "unevaluatedProperties": False, "not": {}}}, "JSON schema cannot be used"),
        ({"regex": "("}, "regular expression cannot be used"),
        ({"grammar": "start: missing"}, "grammar cannot be used"),
        ({"choice": ["x" * 200_000]}, "at most 131072"),
        ({"json": {"enum": [f"value {at}" for at in range(20_000)]}}, "at most 131072"),
        ({"json": {"type": "object", "properties": {f"p{at}": {} for at in range(9000)}}}, "cannot be used"),
    ],
)
def test_what_cannot_be_followed_is_refused(of_pairs, shape, message):
    llm = make(of_pairs, BUDGET)
    with pytest.raises(RequestError, match=message):
        llm.generate("a", shaped(**shape))
    assert not llm.engine.busy


def test_deep_nesting_is_refused_or_followed(of_pairs):
    llm = make(of_pairs, BUDGET)
    for depth in (50, 500, 20_000):
        text = '{"type":"array","items":' * depth + "{}" + "}" * depth
        try:
            llm.generate("a", shaped(3, json=text))
        except RequestError:
            continue
    with pytest.raises(RequestError):
        llm.generate("a", shaped(3, regex="(" * 9000 + "a" + ")" * 9000))
    with pytest.raises(RequestError):
        llm.generate("a", shaped(3, grammar="start: " + "(" * 9000 + '"a"' + ")" * 9000))


def test_a_grammar_that_becomes_too_complex_ends_its_own_request(of_pairs, monkeypatch):
    llm = make(of_pairs, BUDGET)
    good = shaped(30, choice=["abcabcabcabc"])
    alone = llm.generate("x", good)[0]
    monkeypatch.setattr(grammar, "MOST_STATES", 60)
    bad = shaped(200, 1.0, regex="(([a-c]{0,30}[0-9]{0,30}){0,30}x){0,30}")
    outputs = llm.generate(["a", "x"], [bad, good])
    assert outputs[0].finish_reason == "error"
    assert "the grammar cannot be followed further" in outputs[0].error
    assert outputs[1].token_ids == alone.token_ids
    assert llm.generate("x", good)[0].token_ids == alone.token_ids


def test_a_grammar_that_has_become_too_complex_can_be_asked_for_again(of_pairs, monkeypatch):
    """Outputs share a lexer, whose states are limited; at the limit, it is compiled anew."""
    llm = make(of_pairs, BUDGET)
    monkeypatch.setattr(grammar, "MOST_STATES", 60)
    bad = shaped(200, 1.0, regex="(([a-c]{0,30}[0-9]{0,30}){0,30}x){0,30}")
    counts = []
    for _ in range(3):
        output = llm.generate("a", bad)[0]
        counts.append((output.finish_reason, output.token_count))
    assert counts == counts[:1] * 3
    assert counts[0][1] > 1


def test_who_finds_a_grammar_does_not_wait_for_the_compilation_of_another(pairs):
    compiler = GrammarCompiler(pairs, len(pairs), [pairs.eos_token_id])
    compiler.compile(StructuredOutputs(choice=["ready"]))
    with compiler._compiling:  # as if another thread were compiling
        assert compiler.start(StructuredOutputs(choice=["ready"])).forced


def test_tokens_that_would_end_the_output_too_early_belong_to_the_grammar(of_pairs):
    llm = make(of_pairs, BUDGET)
    seven = llm.tokenizer.encode("7", add_special_tokens=False)[0]
    for seed in range(6):
        more = {"min_tokens": 20, "stop_token_ids": (seven,)}
        output = llm.generate("a", shaped(60, 1.0, seed, regex="[0-9]{50}", params=more))[0]
        assert output.token_count >= 20
        assert output.text.isdigit()
        assert output.finish_reason == "stop"


def test_objects_have_no_other_properties_unless_their_schema_says_so():
    one = {"properties": {"a": {"properties": {"b": {}}}}}
    assert grammar.closed(one) == {
        "properties": {"a": {"properties": {"b": {}}, "additionalProperties": False}},
        "additionalProperties": False,
    }
    for left in (
        {},
        {"type": "object"},
        {"properties": {"a": {}}, "additionalProperties": True},
        {"properties": {"a": {}}, "patternProperties": {"^x": {}}},
        {"properties": {"a": {}}, "oneOf": [{"properties": {"b": {}}}, {"properties": {"c": {}}}]},
        {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
        {"properties": {"a": {}}, "oneOf": [{"$ref": "#/$defs/x"}], "$defs": {"x": {"properties": {"b": {}}}}},
        {"enum": [{"properties": {"a": 1}}]},
    ):
        assert grammar.closed(left) == left
    several = {
        "anyOf": [{"properties": {"a": {}}}, {"items": {"properties": {"b": {}}}}],
        "$defs": {"x": {"properties": {}}},
    }
    made = grammar.closed(several)
    assert made["anyOf"][0]["additionalProperties"] is False
    assert made["anyOf"][1]["items"]["additionalProperties"] is False
    assert made["$defs"]["x"]["additionalProperties"] is False


@pytest.mark.parametrize("pattern", ['^[^"]{1,3}$', r"^[^\\]{1,3}$", r"^[^\s\"]{1,3}$", "^[^a]{1,3}$", r"^\\S{1,3}$"])
def test_escaped_characters_obey_patterns(pairs, pattern):
    compiler = GrammarCompiler(pairs, len(pairs), [pairs.eos_token_id])
    for text in ('"', "\\", "\n", " ", "a", "b", "é", "{"):
        mine = compiler.start(StructuredOutputs(json={"type": "string", "pattern": pattern}))
        written = pairs.encode(json.dumps(text, ensure_ascii=False), add_special_tokens=False)
        if mine.valid(written) == len(written):
            jsonschema.validate(text, {"pattern": pattern})
        else:
            assert re.search(pattern, text) is None or text in '"\\\n'


def test_without_the_library_the_error_names_the_extra(of_pairs, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="structured"):
        make(of_pairs, BUDGET).generate("a", shaped(choice=["a"]))


@pytest.mark.parametrize(
    "shape",
    [{}, {"json": {}, "regex": "a"}, {"choice": []}, {"choice": "text"}, {"choice": [1]}, {"regex": ""}, {"json": 1}],
)
def test_exactly_one_valid_shape(shape):
    with pytest.raises(RequestError, match="structured_outputs"):
        StructuredOutputs(**shape)


def test_forced_tokens_and_a_shape_exclude_each_other():
    with pytest.raises(RequestError, match="forced"):
        SamplingParams(forced=(1,), structured_outputs=StructuredOutputs(choice=["a"]))
    with pytest.raises(RequestError, match="structured_outputs"):
        SamplingParams(structured_outputs={"choice": ["a"]})


def test_compiled_grammars_are_kept_within_bounds(pairs):
    compiler = GrammarCompiler(pairs, len(pairs), [pairs.eos_token_id])
    first = compiler.compile(StructuredOutputs(choice=["first"]))
    assert compiler.compile(StructuredOutputs(choice=["first"])) is first
    for at in range(grammar.KEPT):
        compiler.compile(StructuredOutputs(choice=[f"number {at}"]))
    assert len(compiler._compiled) == grammar.KEPT
    assert compiler.compile(StructuredOutputs(choice=["first"])) is not first


def test_quotes_in_choices_stay_beside_patterns_without_them(pairs):
    compiler = GrammarCompiler(pairs, len(pairs), [pairs.eos_token_id])
    schema = {"properties": {"a": {"enum": ['quo"te', "back\\slash"]}, "b": {"type": "string", "pattern": '^[^"]+$'}}}
    for value in schema["properties"]["a"]["enum"]:
        mine = compiler.start(StructuredOutputs(json=schema))
        tokens = pairs.encode(json.dumps({"a": value, "b": "x"}), add_special_tokens=False)
        assert mine.valid(tokens) == len(tokens)
    quote = pairs.encode('{"a": "quote"', add_special_tokens=False)
    assert compiler.start(StructuredOutputs(json=schema)).valid(quote) < len(quote)
