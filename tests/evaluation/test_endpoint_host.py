"""The lab against an OpenAI-compatible endpoint: a small server over the built-in engine, and what may go wrong."""

import json
import re
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from transformers import AutoTokenizer
from typer.testing import CliRunner

from snapstream import LLM, CacheBudget, SamplingParams, SnapStreamError
from snapstream.assets import TASK_MODEL
from snapstream.cli import app
from snapstream.evaluation.records import read_records

pytest.importorskip("openai")


class Endpoint:
    """Serves the shipped model with a full cache, or a request's `kv_budget`; breaks on demand."""

    def __init__(self):
        self.llm = LLM(str(TASK_MODEL), budget=CacheBudget(0, 700, 0), max_model_len=700, slots=1, enforce_eager=True)
        self.lock, self.bodies = threading.Lock(), []
        self.delay = 0.0
        self.status = 200
        self.fail_after = 10**9
        self.metrics = "snapstream_prompts_compressed_total 0"
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def reply(self, status, body):
                data = body if isinstance(body, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                if self.path == "/metrics":
                    self.reply(200, outer.metrics.encode())
                else:
                    entry = {"id": "tiny", "object": "model", "root": str(TASK_MODEL), "max_model_len": 700}
                    self.reply(200, {"object": "list", "data": [entry]})

            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.bodies.append((self.path, body))
                    broken = len(outer.bodies) > outer.fail_after
                    text, used = outer.answer(body)
                time.sleep(outer.delay)
                if broken:
                    self.reply(outer.status, {"error": {"message": "out of\nluck", "type": "x", "code": outer.status}})
                    return
                choice = {"index": 0, "finish_reason": "stop"}
                choice |= {"message": {"role": "assistant", "content": text}} if "chat" in self.path else {"text": text}
                usage = {"prompt_tokens": used, "completion_tokens": 3, "total_tokens": used + 3}
                self.reply(
                    200, {"id": "1", "object": "x", "created": 1, "model": "tiny", "choices": [choice], "usage": usage}
                )

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.handle_error = lambda *_: None  # a client that gave up is no error of the server's
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def stop_after(self, requests):
        while len(self.bodies) < requests:
            time.sleep(0.01)
        self.server.shutdown()
        self.server.server_close()

    def answer(self, body):
        prompt = body["prompt"] if "prompt" in body else body["messages"][0]["content"]
        entries = body.get("vllm_xargs", {}).get("kv_budget")
        budget = CacheBudget.of(entries) if entries else None
        # Two sequences of votes need an engine that keeps their queries; a new engine per budget is the slow, sure way.
        llm = self.llm if budget is None else self.engine(budget)
        out = llm.generate(prompt, SamplingParams(max_tokens=body["max_tokens"]))[0]
        return out.text, out.cache.prompt_tokens

    def engine(self, budget):
        return LLM(str(TASK_MODEL), budget=budget, max_model_len=700, slots=1, enforce_eager=True)


@pytest.fixture
def endpoint():
    made = Endpoint()
    yield made
    made.server.shutdown()
    made.server.server_close()


def command(endpoint, output, *arguments):
    base = ["eval", "--endpoint", endpoint.url, "--lengths", "300,500", "--samples", "3", "-o", str(output)]
    return CliRunner().invoke(app, [*base, "--served-as", "full", *map(str, arguments)])


def keyed(path, **names):
    rename = {"served": "full"} | names
    return {
        (r.task, r.length, r.seed, r.depth, rename.get(r.policy, r.policy), r.size): (
            r.prompt_sha256,
            r.output,
            r.found,
        )
        for r in read_records(path / "results.jsonl")[1]
    }


def test_the_same_scores_as_the_engine(tmp_path, endpoint):
    tasks = ["--tasks", "multikey,kv,late-question"]
    done = command(endpoint, tmp_path / "http", *tasks, "--policies", "served,truncated,spans", "--budgets", "1/2,1/4")
    assert done.exit_code == 0, done.output
    assert (
        "left out: late-question, which continues in a compressed cache"
        in (tmp_path / "http" / "report.md").read_text()
    )
    local = ["eval", *tasks[:1], "multikey,kv", "--lengths", "300,500", "--samples", "3", "-o", str(tmp_path / "local")]
    done = CliRunner().invoke(app, [*local, "--policies", "full,truncated,spans", "--budgets", "1/2,1/4"])
    assert done.exit_code == 0, done.output
    ours, theirs = keyed(tmp_path / "local"), keyed(tmp_path / "http")
    assert len(ours) == 2 * 3 * (5 + 4)  # a quarter of 300 tokens leaves no room for a truncated prompt
    assert ours == theirs
    header = read_records(tmp_path / "http" / "results.jsonl")[0]
    assert header["host"] == "endpoint"
    assert "127.0.0.1" not in json.dumps(header)
    budgets = {body.get("vllm_xargs", {}).get("kv_budget") for _, body in endpoint.bodies}
    assert budgets == {None, 150, 75, 250, 125}


def test_chat_goes_to_chat_completions(tmp_path, endpoint):
    """One user message, without the lead of the answer."""
    done = command(endpoint, tmp_path, "--tasks", "kv", "--chat")
    assert "no chat template" in str(done.exception)
    directory = tmp_path / "tokenizer"
    tokenizer = AutoTokenizer.from_pretrained(TASK_MODEL)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(directory)
    done = command(endpoint, tmp_path / "out", "--tasks", "kv", "--tokenizer", directory)
    assert done.exit_code == 0, done.output
    assert {path for path, _ in endpoint.bodies} == {"/v1/chat/completions"}
    for _, body in endpoint.bodies:
        (message,) = body["messages"]
        assert message["role"] == "user"
        assert re.search(r'The value of "\d{6}"\?$', message["content"])
        assert body["temperature"] == 0
    header, records = read_records(tmp_path / "out" / "results.jsonl")
    assert header["chat"]
    assert len(records) == 6


def test_what_is_served_needs_a_name_and_is_not_mixed(tmp_path, endpoint):
    done = command(endpoint, tmp_path, "--tasks", "needle")
    assert done.exit_code == 0
    base = ["eval", "--endpoint", endpoint.url, "--lengths", "300,500", "--samples", "3", "-o", str(tmp_path)]
    done = CliRunner().invoke(app, [*base, "--tasks", "needle", "--served-as", "streaming"])
    assert "another run (served_as: 'full' there, 'streaming' now)" in str(done.exception)


def test_a_server_that_would_ignore_budgets_is_refused(tmp_path, endpoint):
    endpoint.metrics = 'vllm:num_requests_running{model_name="snapstream_prompts_compressed"} 0'
    done = command(endpoint, tmp_path, "--policies", "spans")
    assert "shows no SnapStream counters at /metrics, so it would ignore cache budgets" in str(done.exception)
    assert endpoint.bodies == []


def test_a_length_that_the_served_model_cannot_hold(tmp_path, endpoint):
    done = command(endpoint, tmp_path, "--tasks", "needle", "--lengths", "690")
    assert "690 tokens and up to 16 after them are more than the model's 700" in str(done.exception)


@pytest.mark.parametrize(("status", "told"), [(400, "answered 400: out of luck"), (503, "answered 503: out of luck")])
def test_what_finished_is_kept_when_it_fails(tmp_path, endpoint, status, told):
    endpoint.status, endpoint.fail_after = status, 4
    done = command(endpoint, tmp_path, "--tasks", "needle", "--concurrency", "1")
    assert isinstance(done.exception, SnapStreamError)
    assert told in str(done.exception)
    assert "4 new answers are kept in" in str(done.exception)
    assert "\n" not in str(done.exception)
    endpoint.fail_after = 10**9
    assert command(endpoint, tmp_path, "--tasks", "needle").exit_code == 0
    records = read_records(tmp_path / "results.jsonl")[1]
    assert len(records) == len({record.key for record in records}) == 6


def test_it_goes_down_in_mid_run(tmp_path, endpoint):
    endpoint.delay = 0.1
    threading.Thread(target=endpoint.stop_after, args=(5,), daemon=True).start()
    done = command(endpoint, tmp_path, "--tasks", "needle", "--samples", "20", "--concurrency", "2")
    assert isinstance(done.exception, SnapStreamError)
    assert "cannot be reached" in str(done.exception)
    kept = len(read_records(tmp_path / "results.jsonl")[1])
    assert 0 < kept < 40
    assert f"{kept} new answers are kept" in str(done.exception)


def test_a_slow_one_is_given_up(tmp_path, endpoint):
    endpoint.delay = 3.0
    start = time.monotonic()
    done = command(endpoint, tmp_path, "--tasks", "needle", "--timeout", "0.3", "--samples", "1", "--lengths", "300")
    assert "did not answer within 0.3 seconds in three attempts; raise --timeout" in str(done.exception)
    assert time.monotonic() - start < 20
    assert (tmp_path / "results.jsonl").exists()


def test_an_unknown_model_and_a_missing_tokenizer(tmp_path, endpoint):
    done = command(endpoint, tmp_path, "--model", "large")
    assert "does not serve 'large'; it serves tiny" in str(done.exception)
    done = command(endpoint, tmp_path, "--tokenizer", str(tmp_path / "none"))
    assert "give the model's directory or hub id with --tokenizer" in str(done.exception)
