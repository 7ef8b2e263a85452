"""Every format of calls: whole, a character at a time, and where it only looks like a call."""

import json
import random

import jsonschema
import pytest

from snapstream.config import StructuredOutputs
from snapstream.engine.requests.grammar import GrammarCompiler
from snapstream.errors import ConfigurationError, RequestError
from snapstream.serving.tools.base import CallReader
from snapstream.serving.tools.events import Arguments, CallBegin, Said
from snapstream.serving.tools.formats import FORMATS, AnswerFormat, find_format, find_tags
from snapstream.serving.tools.reasoning import KNOWN, ReasoningReader, Tags
from tests.bytelevel import byte_tokenizer

TOOLS = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "unit": {"type": "string", "enum": ["c", "f"]},
            "days": {"type": "integer"},
            "where": {"type": "object", "properties": {"x": {"type": "number"}}, "additionalProperties": False},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2},
        },
        "required": ["city"],
        "additionalProperties": False,
    },
    "stop": {"type": "object", "properties": {}, "additionalProperties": False},
}
PARIS = {"city": "Paris"}
BOTH = [("get_weather", PARIS), ("stop", {})]
NAMES = {each.name: each for each in FORMATS}
B, E = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
ONE, SEP, END = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001
PARIS_JSON = '{"city": "Paris"}'
NESTED = {"city": 'a "b" {c} \\ ü\n', "where": {"x": -1.5}, "tags": ["]", "}"], "days": 3}
NESTED_JSON = json.dumps(NESTED)
WRITTEN = [
    ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {PARIS_JSON}}}\n</tool_call>', "", BOTH[:1]),
    (
        "hermes",
        f'Well.\n<tool_call>\n{{"name": "get_weather", "arguments": {PARIS_JSON}}}\n</tool_call>\n'
        '<tool_call>{"name":"stop","arguments":{}}</tool_call>\n',
        "Well.",
        BOTH,
    ),
    ("hermes", f'```json\n{{\n  "name": "get_weather",\n  "arguments": {PARIS_JSON}\n}}\n```', "", BOTH[:1]),
    ("hermes", f'{{"name": "get_weather", "arguments": {PARIS_JSON}}}', "", BOTH[:1]),
    ("hermes", f'<tool_call>{{"arguments": {PARIS_JSON}, "name": "get_weather"}}</tool_call> Done.', "Done.", BOTH[:1]),
    ("hermes", '<tool_call>{"name": "stop"}</tool_call>', "", BOTH[1:]),
    ("hermes", f'{{{{"name": "get_weather", "arguments":{PARIS_JSON}}}}}', "", BOTH[:1]),
    ("hermes", f'```json\n{{{{"name": "get_weather", "arguments":{PARIS_JSON}}}}}\n```', "", BOTH[:1]),
    ("hermes", f'{{"name": "get_weather", "arguments": {json.dumps(NESTED_JSON)}}}', "", [("get_weather", NESTED)]),
    (
        "hermes",
        f'{{"id": [1, {{}}], "name": "get_weather", "parameters": {NESTED_JSON}}}',
        "",
        [("get_weather", NESTED)],
    ),
    ("llama3_json", f'{{"name": "get_weather", "parameters": {PARIS_JSON}}}', "", BOTH[:1]),
    (
        "llama3_json",
        f'<|python_tag|>{{"name": "get_weather", "parameters": {NESTED_JSON}}}',
        "",
        [("get_weather", NESTED)],
    ),
    (
        "llama3_json",
        f'{{"name": "get_weather", "parameters": {PARIS_JSON}}}; {{"name": "stop", "parameters": {{}}}}',
        "",
        BOTH,
    ),
    ("pythonic", "[get_weather(city='Paris'), stop()]", "", BOTH),
    (
        "pythonic",
        "<|python_start|>[get_weather(city='a \"b\" {c} \\\\ ü\\n', where={'x': -1.5}, "
        "tags=[']', \"}\"], days=3)]<|python_end|>",
        "",
        [("get_weather", NESTED)],
    ),
    (
        "pythonic",
        '[get_weather(city="x", days=null), stop()]',
        "",
        [("get_weather", {"city": "x", "days": None}), BOTH[1]],
    ),
    (
        "mistral",
        f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {PARIS_JSON}}}, {{"name": "stop", "arguments": {{}}}}]',
        "",
        BOTH,
    ),
    ("mistral", f"Hm.[TOOL_CALLS]get_weather[ARGS]{PARIS_JSON}[TOOL_CALLS]stop[CALL_ID]123[ARGS]{{}}", "Hm.", BOTH),
    ("mistral_args", f"[TOOL_CALLS]get_weather{NESTED_JSON}", "", [("get_weather", NESTED)]),
    (
        "deepseek",
        f"Yes.\n{B}{ONE}function{SEP}get_weather\n```json\n{PARIS_JSON}\n```{END}\n{ONE}function{SEP}stop\n```json\n{{}}\n```{END}{E}",
        "Yes.",
        BOTH,
    ),
    ("deepseek_v31", f"{B}{ONE}get_weather{SEP}{PARIS_JSON}{END}{ONE}stop{SEP}{{}}{END}{E}", "", BOTH),
    (
        "qwen3_coder",
        "I look.\n\n<tool_call>\n<function=get_weather>\n<parameter=city>\nPa\nris\n</parameter>\n<parameter=days>\n3\n"
        '</parameter>\n<parameter=tags>\n["a"]\n</parameter>\n</function>\n</tool_call>',
        "I look.",
        [("get_weather", {"city": "Pa\nris", "days": 3, "tags": ["a"]})],
    ),
    ("qwen3_coder", "<tool_call>\n<function=stop>\n</function>\n</tool_call>", "", BOTH[1:]),
    (
        "gemma4",
        '<|tool_call>call:get_weather{city:<|"|>a "b" {c} \\ ü\n<|"|>,where:{x:-1.5},'
        'tags:[<|"|>]<|"|>,<|"|>}<|"|>],days:3}<tool_call|>'
        "<|tool_call>call:stop{}<tool_call|>",
        "",
        [("get_weather", NESTED), BOTH[1]],
    ),
    (
        "functiongemma",
        "<start_function_call>call:get_weather{city:<escape>Paris<escape>}<end_function_call>",
        "",
        BOTH[:1],
    ),
    (
        "gpt_oss",
        "<|channel|>analysis<|message|>Let me see.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.get_weather "
        f"<|constrain|>json<|message|>{PARIS_JSON}<|call|>",
        "",
        BOTH[:1],
    ),
    (
        "gpt_oss",
        "<|channel|>commentary<|message|>First.<|end|><|start|>assistant to=functions.stop<|channel|>commentary json"
        "<|message|>{}",
        "First.",
        BOTH[1:],
    ),
]
TEXTS = [
    "Hello.\n\nHow are you?  ",
    " \n x",
    '<tool_call>{"name": "missing", "arguments": {}}</tool_call>',
    "Use <tool_call> to call a tool, as in <tool_call>{...}</tool_call>.",
    '{"name": "Paul", "age": 3}',
    '{"name": 3}',
    '{"name": {"first": "John"}, "age": 3}',
    '{"name": []}',
    '{"name": "stop", "age": 5}',
    '{"a": 1',
    '```json\n{"cities": ["Rome"]}\n```',
    "```python\nprint(1)\n```",
    '{"name": "stop", "arguments": [1]}',
    '{"name": "stop", "arguments": "no json"}',
    '<tool_call>{"name": "get_weather", ',
    "[1, 2, 3]",
    "[see below](http://x)",
    "[TOOL_CALLS] are written so",
    "[TOOL_CALLS]missing[ARGS]{}",
    "<function=missing></function>",
    "call:stop{}",
    "<|tool_call>call:missing{}",
    "<",
    "{",
    "",
    "{" * 3000,
    '{"name":' * 500,
    "[stop(x=" + "(" * 5000,
]


def read(form, text, size=None, tools=TOOLS):
    reader, said, events = CallReader(form, tools), Said(), []
    pieces = [text] if size is None else [text[at : at + size] for at in range(0, len(text), size)]
    for piece in pieces:
        events += reader.feed(piece)
    events += reader.feed("", last=True)
    for event in events:
        said.add(event)
    return said, events


@pytest.mark.parametrize("size", [None, 1, 3])
@pytest.mark.parametrize(("name", "text", "left", "calls"), WRITTEN)
def test_calls_are_read(name, text, left, calls, size):
    said, events = read(NAMES[name], text, size)
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == calls
    assert said.text == left
    begun = -1
    for event in events:
        if isinstance(event, CallBegin):
            begun += 1
            assert event.number == begun
        if isinstance(event, Arguments):
            assert event.number == begun
    assert len({call.call_id for call in said.calls}) == len(calls)


@pytest.mark.parametrize("size", [None, 1])
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("name", [name for name in NAMES if name != "gpt_oss"])
def test_what_only_looks_like_a_call_stays_text(name, text, size):
    said, _ = read(NAMES[name], text, size)
    assert not said.calls
    assert said.text == text


@pytest.mark.parametrize(("name", "text", "left", "calls"), WRITTEN)
def test_arguments_come_in_pieces_as_they_are_written(name, text, left, calls):
    """A call that is cut off has its arguments so far."""
    long = "x" * 300
    text = text.replace("Paris", long)
    reader, seen = CallReader(NAMES[name], TOOLS), []
    for at, char in enumerate(text):
        seen += [(at, each) for each in reader.feed(char)]
    if long not in text or name in ("pythonic", "qwen3_coder"):  # there, a value is converted when it is complete
        return
    pieces = [at for at, each in seen if isinstance(each, Arguments)]
    if '"arguments": {"city"' in text and text.index('"arguments"') < text.index('"name"'):
        return  # the name comes last
    assert len(pieces) > 250


@pytest.mark.parametrize(("name", "text", "left", "calls"), WRITTEN)
def test_cut_anywhere_nothing_is_lost(name, text, left, calls):
    for at in range(len(text)):
        said, _ = read(NAMES[name], text[:at])
        whole, _ = read(NAMES[name], text[:at], 1)
        assert [(call.name, call.arguments) for call in said.calls] == [(c.name, c.arguments) for c in whole.calls]
        assert said.text == whole.text
        assert len(said.calls) <= len(calls)
        if not said.calls and name != "gpt_oss":
            assert said.text == text[:at]


def test_long_arguments_take_time_in_proportion():
    """Nothing is read twice, however small the pieces are."""
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "' + 'x\\"{' * 20_000 + '"}}</tool_call>'
    said, _ = read(NAMES["hermes"], text, 2)
    assert json.loads(said.calls[0].arguments)["city"] == 'x"{' * 20_000


def test_only_one_call_if_they_may_not_be_parallel():
    reader, said = CallReader(NAMES["hermes"], TOOLS, parallel=False), Said()
    for event in [*reader.feed(WRITTEN[1][1]), *reader.feed("", last=True)]:
        said.add(event)
    assert [call.name for call in said.calls] == ["get_weather"]
    assert said.text == "Well."


def test_ids_of_mistral_have_nine_characters():
    said, _ = read(NAMES["mistral"], next(text for name, text, _, _ in WRITTEN if name == "mistral"))
    assert all(len(call.call_id) == 9 and call.call_id.isalnum() for call in said.calls)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("{{ '<tool_call>\\n<function=example>' }}", "qwen3_coder"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral_args"),
        (B + "function" + SEP + "```json", "deepseek"),
        (B + SEP, "deepseek_v31"),
        ("<|channel|>analysis", "gpt_oss"),
        ("<|tool_call>call:", "gemma4"),
        ("<start_function_call>", "functiongemma"),
        ("<|python_tag|>", "llama3_json"),
        ("[func_name1(params_name1=params_value1", "pythonic"),
        ("{{ messages }}", "hermes"),
        ("", "hermes"),
    ],
)
def test_the_template_tells_the_format(template, name):
    assert find_format("auto", template).name == name
    assert find_format(name, "").name == name


def test_unknown_formats_are_refused():
    with pytest.raises(ConfigurationError, match="allowed: auto, gpt_oss"):
        find_format("nonsense", "")


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>{"arguments": {"city": 3}, "name": "get_weather"}</tool_call>',
        '<tool_call>{"name": "get_weather", "more": 1, "arguments": {"city": 3}}</tool_call>',
        '{"name": "get_weather", "arguments": "{}"}',
    ],
)
def test_strictly_read_only_what_a_grammar_knows_is_a_call(text):
    for strict in (False, True):
        reader, said = CallReader(NAMES["hermes"], TOOLS, strict=strict), Said()
        for event in [*reader.feed(text), *reader.feed("", last=True)]:
            said.add(event)
        assert bool(said.calls) is not strict
        assert said.text == (text if strict else "")


def test_a_missing_brace_leaves_no_mark_behind():
    text = '<tool_call>{"name": "get_weather", "arguments": {"city": "x"}</tool_call>\nDone.'
    said, _ = read(NAMES["hermes"], text, 1)
    assert [call.name for call in said.calls] == ["get_weather"]
    assert said.text == "Done."


def test_special_tokens_without_a_meaning_are_left_out():
    answers = AnswerFormat(NAMES["mistral"], None, ["[TOOL_CALLS]", "[INST]", "</s>"], None)
    reader, said = answers.reader("", TOOLS), Said()
    for event in [
        *reader.feed("a[INST]b"),
        *reader.feed('[TOOL_CALLS][{"name": "stop"}]</s>'),
        *reader.feed("", last=True),
    ]:
        said.add(event)
    assert said.text == "ab"
    assert [call.name for call in said.calls] == ["stop"]


# -- grammars ---------------------------------------------------------------------------------------------------------

SPECIAL = (
    '<|python_tag|> <|python_start|> <|python_end|> [TOOL_CALLS] [ARGS] <|tool_call> <tool_call|> <|"|> <escape> '
    "<start_function_call> <end_function_call> <|channel|> <|message|> <|start|> <|constrain|> <|end|> <|return|> "
    f"<|call|> <tool_call> </tool_call> <think> </think> {B} {E} {ONE} {SEP} {END}"
).split()


@pytest.fixture(scope="module", params=[True, False], ids=["special", "text"])
def tokenizer(request):
    """With the marks of all formats as special tokens, and without any."""
    made = byte_tokenizer()
    if request.param:
        made.add_special_tokens({"additional_special_tokens": SPECIAL})
    return made


@pytest.fixture(scope="module")
def compiler(tokenizer):
    return GrammarCompiler(tokenizer, len(tokenizer), [tokenizer.eos_token_id])


def walk(compiler, tokenizer, shape, choose, most=600):
    """A random text that a grammar allows; short strings are likely."""
    grammar, taken = compiler.start(shape), []
    while not grammar.finished and len(taken) < most:
        row = grammar.masks((), 1, early=0)[0]
        allowed = [token for token in range(len(tokenizer)) if int(row[token // 32]) >> token % 32 & 1]
        if tokenizer.eos_token_id in allowed and (len(allowed) == 1 or choose.random() < 0.5):
            return tokenizer.decode(taken), True
        allowed = [token for token in allowed if token != tokenizer.eos_token_id]
        marks = [token for token in allowed if token >= 256]
        ending = [token for token in allowed if tokenizer.decode([token])[:1] in '"}]<)']
        plain = [token for token in allowed if tokenizer.decode([token]).isalnum()]
        for likely, few in ((0.5, marks), (0.4, ending), (0.9, plain)):
            if few and choose.random() < likely:
                allowed = few
                break
        taken.append(choose.choice(allowed))
        grammar.accept(taken[-1])
    return tokenizer.decode(taken), grammar.finished


@pytest.mark.parametrize("name", NAMES)
def test_what_a_grammar_allows_is_read_as_a_call_that_fits(compiler, tokenizer, name):
    answers = AnswerFormat(NAMES[name], None, tokenizer.all_special_tokens, compiler)
    choose, complete = random.Random(name), 0
    for trial in range(12):
        chosen = TOOLS if trial % 3 else {"get_weather": TOOLS["get_weather"]}
        shape = answers.must_call("", chosen, parallel=trial % 2 == 0)
        text, finished = walk(compiler, tokenizer, shape, choose)
        said, _ = read(NAMES[name], text)
        assert said.calls or not finished, text
        assert len(said.calls) <= 1 or trial % 2 == 0
        if finished:
            complete += 1
            assert not said.text, text
            for call in said.calls:
                assert call.name in chosen
                jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])
    assert complete > 1


PLACES = {
    "type": "object",
    "properties": {
        "from": {"$ref": "#/$defs/Place"},
        "$to": {"anyOf": [{"$ref": "#/$defs/Place"}, {"type": "null"}]},
        "größe": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["from", "$to", "größe"],
    "additionalProperties": False,
    "$defs": {
        "Place": {
            "type": "object",
            "properties": {
                "x": {"type": "integer", "minimum": 0, "maximum": 9},
                "name": {"type": "string", "maxLength": 5},
            },
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_definitions_and_odd_names(compiler, tokenizer, name):
    answers = AnswerFormat(NAMES[name], None, tokenizer.all_special_tokens, compiler)
    schema = PLACES
    if name == "pythonic":
        with pytest.raises(RequestError, match="argument named"):
            answers.must_call("", {"go": schema}, parallel=False)
        renamed = {"to" if key == "$to" else key: value for key, value in PLACES["properties"].items()}
        renamed = {{"from": "start", "größe": "size"}.get(key, key): value for key, value in renamed.items()}
        schema = PLACES | {"properties": renamed, "required": ["start", "to", "size"]}
    shape, choose, complete = answers.must_call("", {"go": schema}, parallel=False), random.Random(name), 0
    for _ in range(8):
        text, finished = walk(compiler, tokenizer, shape, choose)
        said, _ = read(NAMES[name], text, tools={"go": schema})
        if finished:
            complete += 1
            (call,) = said.calls
            arguments = json.loads(call.arguments)
            if name in ("gemma4", "functiongemma", "qwen3_coder"):  # lengths of strings are not enforced
                for each in (value for value in arguments.values() if isinstance(value, dict)):
                    each.pop("name", None)
            jsonschema.validate(arguments, schema)
    assert complete > 1


def test_a_shape_of_gpt_oss_is_in_its_final_channel(compiler, tokenizer):
    answers = AnswerFormat(NAMES["gpt_oss"], None, tokenizer.all_special_tokens, compiler)
    for shape in (
        answers.after_reasoning("", StructuredOutputs(choice=["yes"])),
        answers.may_call("", TOOLS, StructuredOutputs(choice=["yes"]), parallel=True),
    ):
        for text in (
            "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>yes",
            "<|channel|>final<|message|>yes",
        ):
            grammar = compiler.start(shape)
            for token in tokenizer.encode(text, add_special_tokens=False):
                grammar.accept(token)
            said, _ = read(NAMES["gpt_oss"], text)
            assert said.text == "yes"


@pytest.mark.parametrize("shape", [{"json": "no json"}, {"grammar": "root ::= ("}, {"grammar": '{"grammars": []}'}])
def test_bad_shapes_after_the_reasoning_are_refused(compiler, tokenizer, shape):
    answers = AnswerFormat(NAMES["hermes"], Tags("<think>", "</think>"), tokenizer.all_special_tokens, compiler)
    with pytest.raises(RequestError):
        compiler.compile(answers.after_reasoning("", StructuredOutputs(**shape)))
    with pytest.raises(RequestError):
        compiler.compile(answers.may_call("", TOOLS, StructuredOutputs(**shape), parallel=True))


@pytest.mark.parametrize("name", NAMES)
def test_an_answer_may_be_text_or_calls_that_fit(compiler, tokenizer, name):
    answers = AnswerFormat(NAMES[name], None, tokenizer.all_special_tokens, compiler)
    channel = "<|channel|>final<|message|>" if name == "gpt_oss" else ""
    for text in (f"{channel}Hello, how are you?", f"{channel}1 + 1 = 2\n\nYes."):
        shape = answers.may_call("", TOOLS, parallel=True)
        grammar = compiler.start(shape)
        for token in tokenizer.encode(text, add_special_tokens=False):
            assert int(grammar.masks((), 1, early=0)[0][token // 32]) >> token % 32 & 1, text
            grammar.accept(token)
        assert int(grammar.masks((), 1, early=0)[0][tokenizer.eos_token_id // 32]) >> tokenizer.eos_token_id % 32 & 1
    written = next(text for form, text, _, _ in WRITTEN if (form == name and PARIS_JSON in text) or form == name)
    grammar, at = compiler.start(answers.may_call("", TOOLS, parallel=True)), 0
    tokens = tokenizer.encode(written.replace('"Paris"', "3").replace("Paris", "3"), add_special_tokens=False)
    for token in tokens:
        if not int(grammar.masks((), 1, early=0)[0][token // 32]) >> token % 32 & 1:
            break
        grammar.accept(token)
        at += 1
    if PARIS_JSON in written and name != "gpt_oss":  # without special tokens, its channels may contain each other
        assert at < len(tokens), "a city that is no text has been allowed"


@pytest.mark.parametrize(
    "shape", [{"json": {"type": "integer"}}, {"choice": ["ab"]}, {"regex": "a/b+"}, {"grammar": 'start: "x"'}]
)
def test_shapes_begin_after_the_reasoning(compiler, tokenizer, shape):
    answers = AnswerFormat(NAMES["hermes"], Tags("<think>", "</think>"), tokenizer.all_special_tokens, compiler)
    fits = {"json": "12", "choice": "ab", "regex": "a/bb", "grammar": "x"}[next(iter(shape))]
    for prompt, text in (
        ("<think>\n", f"so {{ it is</think>\n\n{fits}"),
        ("", f"<think>\nx</think>{fits}"),
        ("", fits),
    ):
        grammar = compiler.start(answers.after_reasoning(prompt, StructuredOutputs(**shape)))
        for token in tokenizer.encode(text, add_special_tokens=False):
            grammar.accept(token)
        row = grammar.masks((), 1, early=0)[0]
        is_end = int(row[tokenizer.eos_token_id // 32]) >> tokenizer.eos_token_id % 32 & 1
        assert grammar.finished or is_end
    wrong = compiler.start(answers.after_reasoning("", StructuredOutputs(**shape)))
    assert not wrong.valid(tokenizer.encode("?", add_special_tokens=False))
    both = answers.may_call("", TOOLS, StructuredOutputs(**shape), parallel=True)
    for text in (fits, WRITTEN[0][1]):
        grammar = compiler.start(both)
        for token in tokenizer.encode(text, add_special_tokens=False):
            grammar.accept(token)


# -- reasoning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [None, 1, 4])
@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "rest"),
    [
        ("<think>\nLet me <see>.\n</think>\n\nYes.", False, "Let me <see>.", "Yes."),
        ("Let me see.\n</think>\n\nYes.", True, "Let me see.", "Yes."),
        ("\n<think></think>Yes.", False, "", "Yes."),
        ("Yes <think>x</think>", False, "", "Yes <think>x</think>"),
        ("Only reasoning", True, "Only reasoning", ""),
        ("<think>cut </thi", False, "cut </thi", ""),
        (" plain", False, "", " plain"),
        ("", False, "", ""),
    ],
)
def test_reasoning_is_split_off(text, is_open, reasoning, rest, size):
    for tags in KNOWN:
        written = text.replace("<think>", tags.begin).replace("</think>", tags.end)
        if "</thi" in written and tags.end != "</think>":
            continue
        reader = ReasoningReader(tags, is_open=is_open)
        pieces = [written] if size is None else [written[at : at + size] for at in range(0, len(written), size)]
        events, left = [], ""
        for piece in pieces:
            new, after = reader.feed(piece)
            events, left = events + new, left + after
        new, after = reader.feed("", last=True)
        events, left = events + new, left + after
        assert "".join(event.text for event in events) == reasoning
        assert left == rest.replace("<think>", tags.begin).replace("</think>", tags.end)


def test_tags_are_found_in_templates_and_vocabularies():
    assert find_tags("{{ x.split('</think>') }}", {}) == KNOWN[0]
    assert find_tags("", {"[/THINK]": 3}) == KNOWN[1]
    assert find_tags("plain", {"</s>": 2}) is None
