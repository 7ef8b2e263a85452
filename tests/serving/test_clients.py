"""Clients that people have, besides OpenAI's own: what they see of errors, and what they send."""

import shutil
import subprocess

import httpx
import pytest

from tests.checkpoints import prompt
from tests.serving.servers import running

TOO_LONG = [{"role": "user", "content": "w5 " * 2500}]


@pytest.fixture(scope="module")
def server(llm):
    with running(llm) as one:
        yield one


@pytest.mark.parametrize("stream", [False, True])
def test_litellm_knows_a_prompt_that_is_too_long(server, stream):
    litellm = pytest.importorskip("litellm")
    settings = {"api_base": server.url + "/v1", "api_key": "none", "max_retries": 0, "stream": stream}
    with pytest.raises(litellm.ContextWindowExceededError, match="maximum context length is 2000 tokens"):
        litellm.completion(model="openai/tiny", messages=TOO_LONG, **settings)
    model, text = "text-completion-openai/tiny", TOO_LONG[0]["content"]
    with pytest.raises(litellm.ContextWindowExceededError):
        list(litellm.text_completion(model=model, prompt=text, **settings))  # a stream is asked for when it is read


def test_litellm_talks(server):
    litellm = pytest.importorskip("litellm")
    reply = litellm.completion(
        model="openai/tiny",
        messages=[{"role": "developer", "content": "w9"}, {"role": "user", "content": "w5 w6"}],
        max_tokens=4,
        api_base=server.url + "/v1",
        api_key="none",
    )
    # What it says is sent back as it is, with fields that say nothing.
    again = [
        {"role": "user", "content": "w5"},
        reply.choices[0].message.model_dump(),
        {"role": "user", "content": "w6"},
    ]
    body = {"model": "tiny", "messages": again, "max_tokens": 4}
    assert httpx.post(server.url + "/v1/chat/completions", json=body).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_langchain_knows_a_prompt_that_is_too_long(server, stream):
    langchain = pytest.importorskip("langchain_openai")
    from langchain_core.exceptions import ContextOverflowError

    model = langchain.ChatOpenAI(model="tiny", base_url=server.url + "/v1", api_key="none", max_retries=0)
    with pytest.raises(ContextOverflowError):
        list(model.stream(TOO_LONG)) if stream else model.invoke(TOO_LONG)
    assert isinstance(model.invoke([{"role": "user", "content": "w5"}], max_tokens=3).content, str)


@pytest.mark.parametrize(
    ("path", "field", "body"),
    [
        ("/v1/completions", "prompt", {"prompt": "w5 " * 2500}),
        ("/v1/completions", "prompt", {"prompt": "w5 " * 2500, "stream": True}),
        ("/v1/completions", "prompt", {"prompt": "w5 " * 500_000}),
        ("/v1/completions", "prompt", {"prompt": ["w5", "w5 " * 2500]}),
        ("/v1/completions", "prompt", {"prompt": prompt(2500)}),
        ("/v1/completions", "prompt", {"prompt": prompt(2000)}),
        ("/v1/chat/completions", "messages", {"messages": TOO_LONG}),
        ("/v1/chat/completions", "messages", {"messages": TOO_LONG, "stream": True}),
        ("/v1/chat/completions", "messages", {"messages": TOO_LONG, "session_id": "a"}),
        ("/v1/contexts", "text", {"text": "w5 " * 2500}),
        ("/v1/contexts", "text", {"text": prompt(2500)}),
    ],
)
def test_too_long_is_said_as_openai_says_it(server, path, field, body):
    reply = httpx.post(server.url + path, json=body, timeout=30)
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert error["code"] == "context_length_exceeded"
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field
    assert error["message"].startswith("This model's maximum context length is 2000 tokens. However, the prompt has ")
    assert "at most 1999 fit" in error["message"]


JAVA = """
import java.net.URI;
import java.net.http.*;

public class Ask {
    public static void main(String[] arguments) throws Exception {
        var body = HttpRequest.BodyPublishers.ofString("{\\"prompt\\": \\"w5 w6\\", \\"max_tokens\\": 3}");
        var request = HttpRequest.newBuilder(URI.create(arguments[0] + "/v1/completions"))
            .header("Content-Type", "application/json").POST(body).build();
        // Offers HTTP/2 by default, with "Upgrade: h2c".
        var reply = HttpClient.newHttpClient().send(request, HttpResponse.BodyHandlers.ofString());
        System.out.println(reply.statusCode() + " " + reply.body());
    }
}
"""


@pytest.mark.skipif(shutil.which("java") is None, reason="needs Java")
def test_javas_default_client(server, tmp_path):
    (tmp_path / "Ask.java").write_text(JAVA)
    run = subprocess.run(["java", str(tmp_path / "Ask.java"), server.url], capture_output=True, text=True, check=False)
    assert run.stdout.startswith('200 {"id": "cmpl-'), run.stdout + run.stderr
