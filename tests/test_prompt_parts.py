"""Where system messages and tools stand in the text of chat templates of different kinds."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from snapstream.prompt_parts import find_parts, token_spans

# Tools behind the system message, as Qwen and Hermes have them; with a system message of its own.
HERMES = (
    "{% if tools %}<|system|>\n{{ messages[0].content if messages[0].role == 'system' else 'You are helpful.' }}\n\n"
    "# Tools\n<tools>{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n</tools>\nWrite calls as JSON.<|end|>\n"
    "{% elif messages[0].role == 'system' %}<|system|>\n{{ messages[0].content }}<|end|>\n"
    "{% else %}<|system|>\nYou are helpful.<|end|>\n{% endif %}"
    "{% for m in messages if m.role != 'system' %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "<|assistant|>\n"
)
# Before the last message of the user, as Mistral has them; content is stripped.
MISTRAL = (
    "{% for m in messages %}{% if loop.last and tools %}[TOOLS][{% for t in tools %}{{ t | tojson }}, {% endfor %}]"
    "[/TOOLS]{% endif %}[{{ m.role }}] {{ m.content | trim }}{% endfor %}[assistant]"
)
# In the first message of the user, and a word more in the system message, as Llama has them.
LLAMA = (
    "<system>{% if tools %}Environment: ipython\n{% endif %}Date: today\n"
    "{% if messages[0].role == 'system' %}{{ messages[0].content | trim }}{% endif %}<eot>"
    "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{% if loop.first and tools %}Given functions:\n"
    "{% for t in tools %}{{ t | tojson(indent=4) }}\n\n{% endfor %}{% endif %}{{ m.content | trim }}<eot>{% endfor %}"
)
# Names only, in capitals: the place of tools cannot be found by marks in their names.
CHANGED = (
    "{% for t in tools or [] %}* {{ t.function.name | length }}\n{% endfor %}"
    "{% for m in messages %}{{ m.content | length }}: {{ m.content }}\n{% endfor %}"
)

LONG = [
    {"role": "system", "content": " Rules: be brief.\n"},
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2 + 2?"},
]


def tool(name):
    properties = {"x": {"type": "string", "description": "an {x}"}}
    schema = {"type": "object", "properties": properties, "required": ["x"]}
    return {"type": "function", "function": {"name": name, "description": f"Does {name}.", "parameters": schema}}


TOOLS = [tool("first"), tool("second"), tool("third")]


def render_with(template):
    def render(messages, tools):
        texts, _ = render_jinja_template([list(messages)], tools=list(tools) or None, chat_template=template)
        return texts[0]

    return render


def found(template, messages, tools):
    render = render_with(template)
    text = render(messages, tools)
    parts = find_parts(messages, tools, render, text)
    return (
        [text[start:end] for start, end in parts.system],
        None if parts.tools is None else text[slice(*parts.tools)],
        {index: text[start:end] for index, (start, end) in parts.messages.items()},
    )


@pytest.mark.parametrize("template", [HERMES, MISTRAL, LLAMA])
@pytest.mark.parametrize("messages", [LONG, LONG[:2], LONG[1:], LONG[1:2]])
@pytest.mark.parametrize("tools", [TOOLS, TOOLS[:1]])
def test_tools_and_system(template, messages, tools):
    system, shown, _ = found(template, messages, tools)
    assert len(system) == (messages[0]["role"] == "system")
    assert all(text.endswith("Rules: be brief.") for text in system)
    for each in tools:
        name = each["function"]["name"]
        assert f'"{name}"' in shown
        assert f"Does {name}." in shown
    assert shown.count("{") == shown.count("}")  # whole
    assert "1 + 1" not in shown
    assert "2 + 2" not in shown


@pytest.mark.parametrize("template", [HERMES, MISTRAL, LLAMA])
def test_messages_are_found(template):
    _, shown, messages = found(template, LONG, ())
    assert shown is None
    assert {index: text.strip() for index, text in messages.items()} == {
        index: message["content"].strip() for index, message in enumerate(LONG)
    }


def test_equal_messages_are_told_apart():
    text = render_with(MISTRAL)([{"role": "user", "content": "a"}] * 3, ())
    parts = find_parts([{"role": "user", "content": "a"}] * 3, (), render_with(MISTRAL), text)
    assert parts.messages[2] == (text.rindex("a["), text.rindex("a[") + 1)
    assert len(parts.messages) == 3


def test_what_depends_on_the_content_is_not_found():
    assert found(CHANGED, LONG, TOOLS) == ([], None, {})


def test_texts_with_marks():
    """Even those of this very text."""
    for trick in ("\ue1000:0\ue100", "\ue1000:" + "9" * 5000 + "\ue101", "\ue100", "\ue1000:1\ue101 \ue1001:0\ue100"):
        messages = [{"role": "system", "content": f"Rules {trick}"}, {"role": "user", "content": trick}]
        system, shown, contents = found(HERMES, messages, [*TOOLS, tool(f"x{trick}")])
        assert system[0].endswith(f"Rules {trick}")
        assert '"first"' in shown
        assert contents[1] == trick


def test_a_message_that_the_template_looks_into():
    """The system message is found nevertheless."""
    looking = "{% for m in messages %}{% if m.content.startswith('<x>') %}!{% endif %}{{ m.content }};{% endfor %}"
    messages = [{"role": "system", "content": "Rules."}, {"role": "user", "content": "<x>"}]
    assert found(looking, messages, ()) == (["Rules."], None, {0: "Rules."})


def test_only_system_messages_at_the_beginning_stand():
    messages = [*LONG, {"role": "system", "content": "Later."}]
    assert found(MISTRAL, messages, ())[0] == ["[system] Rules: be brief."]


def test_a_template_that_refuses_marks():
    refusing = "{% if '\ue100' in messages[0].content %}{{ raise_exception('no') }}{% endif %}{{ messages[0].content }}"
    assert found(refusing, LONG, ()) == ([], None, {})


def test_empty_and_other_contents():
    strange = [
        {"role": "system", "content": " "},
        {"role": "system", "content": None},
        {"role": "user", "content": "x"},
    ]
    assert found("{% for m in messages %}{{ m.content }}{% endfor %}", strange, ()) == ([], None, {2: "x"})


@pytest.mark.parametrize(
    ("span", "tokens"),
    [
        ((0, 3), [(0, 1)]),
        ((0, 4), [(0, 2)]),
        ((4, 6), [(1, 2)]),  # inside a token
        ((6, 7), [(2, 4)]),  # a character of two tokens
        ((0, 99), [(0, 5)]),
        ((7, 8), [(4, 5)]),
        ((7, 7), []),
    ],
)
def test_characters_become_tokens(span, tokens):
    starts = [0, 3, 6, 6, 7]
    assert token_spans([span], starts) == tokens


def test_no_tokens():
    assert token_spans([(0, 5)], []) == []
