"""Bodies that nobody should send: every one is answered below 500, at once, and others never notice."""

import json
import os
import re
import resource
import subprocess
import sys
import threading
import time

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.bytelevel import MERGES, save_model
from tests.checkpoints import prompt
from tests.engine.test_engine import make
from tests.serving.servers import idle, post, running, wait_until
from tests.serving.test_tools import TEMPLATE

WORDS = " ".join(f"w{token}" for token in prompt(100))
PATHS = [
    "/v1/completions",
    "/v1/chat/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/contexts",
    "/tokenize",
    "/detokenize",
]
BROKEN = {
    "nothing": b"",
    "not JSON": b"hello",
    "half of it": b'{"prompt": "w5", "max_tokens": ',
    "truncated UTF-8": b'{"prompt": "w5 \xe2\x82"}',
    "invalid UTF-8": b'{"prompt": "\xff\xfe"}',
    "UTF-16": '{"prompt": "w5", "x": 1}'.encode("utf-16"),
    "half of a surrogate pair": b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\udfff"}]}',
    "a surrogate in a name": b'{"prompt": "w5", "\\ud800": 1}',
    "a surrogate as model": b'{"prompt": "w5", "model": "\\ud800"}',
    "NUL": b'{"prompt": "\x00"}',
    "deep lists": b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "deep objects": b'{"prompt": ' + b'{"a":' * 50_000 + b"1" + b"}" * 50_000 + b"}",
    "deep and open": b"[" * 1_000_000,
    "NaN": b'{"prompt": "w5", "temperature": NaN}',
    "infinity": b'{"prompt": "w5", "temperature": Infinity, "top_p": -Infinity}',
    "a huge exponent": b'{"prompt": "w5", "temperature": 1e999999}',
    "a huge integer": b'{"prompt": "w5", "seed": ' + b"9" * 100_000 + b"}",
    "a huge negative": b'{"prompt": [-' + b"9" * 4_000 + b"]}",
    "twice the same": b'{"prompt": "w5", "prompt": 5}',
    "a number": b"5",
    "null": b"null",
    "a list": b'["prompt"]',
    "a string": b'"prompt"',
    "wrong types": b'{"prompt": {"a": 1}, "messages": "x", "tokens": "5", "max_tokens": "5", "stream": "yes"}',
    "booleans as numbers": b'{"prompt": [true, false], "max_tokens": true}',
    "many keys": json.dumps({f"k{i}": i for i in range(50_000)}).encode(),
    "a long key": json.dumps({"k" * 1_000_000: 1}).encode(),
    "messages of messages": b'{"messages": [{"role": "user", "content": [{"type": "text", "text": [{}]}]}]}',
    "an unknown role": b'{"messages": [{"role": "root", "content": "w5"}]}',
    "tool calls of anything": b'{"messages": [{"role": "assistant", "tool_calls": [{"a": 1e308}]}], "n": 0}',
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory):
    """A model whose tokenizer takes any text, so that grammars and tools can be used."""
    made = make(
        save_model(tmp_path_factory.mktemp("bytes"), MERGES), max_model_len=2000, sessions=2, context_bytes=2**20
    )
    made.chat_template = TEMPLATE
    return made


@pytest.fixture(scope="module")
def server(llm):
    with running(llm) as one:
        yield one


@pytest.fixture(scope="module", autouse=True)
def others(server):
    """Requests that run all the while; every one must get the same answer."""
    body = {"prompt": WORDS, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    expected, answers, stop = post(server, **body).json()["choices"], [], threading.Event()

    def ask():
        while not stop.is_set():
            answers.append(post(server, **body).json().get("choices"))

    thread = threading.Thread(target=ask)
    thread.start()
    yield
    stop.set()
    thread.join(30)
    assert len(answers) > 5
    assert all(answer == expected for answer in answers)
    wait_until(lambda: idle(server))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BROKEN)
def test_broken_bodies(server, path, name):
    reply = httpx.post(
        server.url + path, content=BROKEN[name], headers={"Content-Type": "application/json"}, timeout=10
    )
    assert reply.status_code == 400, reply.text[:300]
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["request_id"] == reply.headers["x-request-id"]
    assert len(error["message"]) <= 2_000


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": [5] * 1_000_000 + ["x"]},
        {"prompt": [[5]] * 500_000 + ["x"]},
        {"prompt": ["w5"] * 500_000 + [5]},
        {"prompt": [5] * 1_000_000},
        {"messages": [{"role": "nobody"}] * 200_000},
        {"messages": [{"role": "user", "content": [{"type": "text"}] * 200_000}]},
        {"prompt": "w5", "logit_bias": {f"x{i}": "x" for i in range(300_000)}},
        {"tokens": ["x"] * 500_000},
        {"text": [5] * 500_000 + ["x"]},
    ],
    ids=lambda body: f"{next(iter(body))} {len(str(body))}",
)
def test_long_lists_of_errors_are_cheap(server, body):
    """One error is enough: a list of them for every item took gigabytes."""
    data = json.dumps(body)
    paths = {"messages": "/v1/chat/completions", "tokens": "/detokenize", "text": "/v1/contexts"}
    path = paths.get(next(iter(body)), "/v1/completions")
    began = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reply = httpx.post(server.url + path, content=data, headers={"Content-Type": "application/json"}, timeout=30)
    assert reply.status_code == 400
    assert time.monotonic() - began < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000  # KiB; the body itself takes some


ATTACKS = {
    "many values": {"guided_json": {"enum": [f"value {at}" for at in range(9000)]}},
    "too many values": {"guided_json": {"enum": [f"value {at}" for at in range(300_000)]}},
    "many properties": {"guided_json": {"properties": {f"p{at}": {} for at in range(8000)}}},
    "many required ones": {"guided_json": {"properties": {f"p{at}": {} for at in range(4000)}, "required": ["p1"]}},
    "many alternatives": {
        "guided_json": {"anyOf": [{"properties": {f"k{at}": {"pattern": f"(a|b)*c{{{at}}}"}}} for at in range(900)]}
    },
    "products of alternatives": {
        "guided_json": {"allOf": [{"anyOf": [{"properties": {f"k{a}{b}": {}}} for a in range(8)]} for b in range(8)]}
    },
    "deep arrays": {"guided_json": '{"items":' * 10_000 + "{}" + "}" * 10_000},
    "a circle": {"guided_json": {"$ref": "#"}},
    "a circle of two": {
        "guided_json": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
    },
    "an endless tree": {
        "guided_json": {
            "$ref": "#/$defs/a",
            "$defs": {
                "a": {
                    "properties": {f"p{at}": {"$ref": "#/$defs/a"} for at in range(50)},
                    "required": [f"p{at}" for at in range(50)],
                }
            },
        }
    },
    "a file": {"guided_json": {"$ref": "file:///etc/passwd"}},
    "another host": {"guided_json": {"$ref": "http://127.0.0.1:1/schema"}},
    "long strings": {"guided_json": {"type": "string", "minLength": 10**9, "maxLength": 10**9}},
    "long arrays": {"guided_json": {"type": "array", "minItems": 10**6, "items": {"type": "array", "minItems": 10**6}}},
    "large numbers": {
        "guided_json": {"type": "integer", "minimum": -(10**300), "maximum": 10**300, "multipleOf": 7919}
    },
    "an exponential pattern": {"guided_json": {"type": "string", "pattern": "^(.*a.{0,2000}){5}$"}},
    "nested repetition": {"guided_regex": "((a{0,100}){0,100}){0,100}"},
    "catastrophic backtracking": {"guided_regex": "(x+x+)+y"},
    "many states": {"guided_regex": "(a|b|c|d|e)*a(a|b|c|d|e){400}"},
    "large classes": {"guided_regex": "[\\p{L}\\p{N}]{1,5000}x{5000}"},
    "deep groups": {"guided_regex": "(" * 60_000 + "a" + ")" * 60_000},
    "a long regex": {"guided_regex": "a|" * 60_000 + "b"},
    "ambiguous rules": {"guided_grammar": 'start: s\ns: s s | s s s | "a" | ""'},
    "left recursion": {"guided_grammar": "start: start"},
    "many rules": {
        "guided_grammar": "start: r0\n"
        + "\n".join(f'r{at}: r{at + 1} r{at + 1} | "x"' for at in range(3000))
        + '\nr3000: "y"'
    },
    "rules of rules": {
        "guided_grammar": "start:r0\n" + "\n".join(f"r{at}:r{at + 1}" for at in range(9000)) + '\nr9000:"y"'
    },
    "references to references": {
        "guided_json": {
            "$ref": "#/$defs/0",
            "$defs": {str(at): {"$ref": f"#/$defs/{at + 1}"} for at in range(3500)} | {"3500": {}},
        }
    },
    "definitions in definitions": {
        "guided_json": {
            "$ref": "#/$defs/0",
            "$defs": {str(at): {"properties": {"p": {"$ref": f"#/$defs/{at + 1}"}}} for at in range(2000)}
            | {"2000": {}},
        }
    },
    "many choices": {"guided_choice": [f"choice {at}" for at in range(8000)]},
    "one long choice": {"guided_choice": ["x" * 100_000]},
    "GBNF": {"guided_grammar": 'root ::= ("a" | root root)*'},
}


@pytest.mark.parametrize("name", ATTACKS)
def test_grammars_under_attack(server, name):
    """Each is followed or refused, within seconds and bounded memory; the requests beside it never notice."""
    began, before = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    reply = post(server, timeout=60, prompt="w5", max_tokens=8, temperature=1, **ATTACKS[name])
    assert reply.status_code in (200, 400) or "cannot be followed" in reply.text, reply.text[:300]
    assert time.monotonic() - began < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400_000
    if reply.status_code == 200:
        assert len(reply.json()["choices"][0]["text"]) < 5000


@pytest.mark.parametrize("kind", ["", "text/plain", "application/xml", "multipart/form-data; boundary=x", "\xff"])
def test_other_content_types(server, kind):
    headers = [(b"Content-Type", kind.encode("latin-1"))]
    reply = httpx.post(server.url + "/v1/completions", content=b'{"prompt": "w5"}', headers=headers)
    assert reply.status_code == 400
    assert "sent as application/json" in reply.json()["error"]["message"]


@pytest.mark.parametrize("method", ["GET", "PUT", "PATCH", "DELETE", "HEAD", "TRACE", "NONSENSE"])
def test_other_methods(server, method):
    assert httpx.request(method, server.url + "/v1/completions").status_code in (400, 405)


@pytest.mark.parametrize(
    "path",
    ["/../etc/passwd", "/page/../server.py", "/page/%2e%2e/server.py", "/page//etc/passwd", "/%00", "/" + "a" * 5000],
)
def test_other_paths(server, path):
    assert httpx.get(server.url + path).status_code in (400, 404)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = [
    "prompt", "messages", "model", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "n",
    "stop", "seed", "stream", "stream_options", "logprobs", "top_logprobs", "logit_bias", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "kv_budget", "return_kept_tokens", "telemetry", "session_id", "echo",
    "user", "tools", "response_format", "vllm_xargs", "stop_token_ids", "ignore_eos", "tokens", "return_token_strs",
    "suffix", "context_id", "text", "chat", "system", "name", "tool_choice", "parallel_tool_calls",
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar", "reasoning_effort",
    "enable_thinking", "input",
    "instructions", "previous_response_id", "reasoning", "thinking", "stop_sequences", "output_config", "store",
]  # fmt: skip
good = {
    "/v1/completions": {"prompt": "w5 w6", "max_tokens": 3},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 3},
    "/v1/responses": {"input": "w5", "max_output_tokens": 3},
    "/v1/messages": {"messages": [{"role": "user", "content": "w5"}], "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "w5"}]},
    "/v1/contexts": {"text": "w5 w6"},
    "/tokenize": {"prompt": "w5"},
    "/detokenize": {"tokens": [5]},
}


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(path=st.sampled_from(PATHS), odd=st.dictionaries(st.sampled_from(FIELDS), values, min_size=1, max_size=3))
def test_odd_values_in_good_requests(server, path, odd):
    data = json.dumps(good[path] | odd, ensure_ascii=True)
    reply = httpx.post(server.url + path, content=data, headers={"Content-Type": "application/json"}, timeout=30)
    assert reply.status_code in (200, 400, 404, 409, 429), reply.text


def test_schemathesis(server, tmp_path):
    """Requests made from the OpenAPI document: no 5xx, nothing undocumented, no hang."""
    examples = os.environ.get("SNAPSTREAM_FUZZ_EXAMPLES", "15")
    run = subprocess.run(
        [
            os.path.join(os.path.dirname(sys.executable), "schemathesis"),
            "run",
            f"{server.url}/openapi.json",
            f"--max-examples={examples}",
            "--checks=not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance",
            "--request-timeout=30",
            "--suppress-health-check=all",
            "--continue-on-failure",
            "--no-color",
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    print(run.stdout)
    generated = re.search(r"(\d+) generated, (\d+) passed", run.stdout)
    assert run.returncode == 0, run.stdout[-4000:]
    assert generated, run.stdout[-2000:]
    assert int(generated[1]) > 300
