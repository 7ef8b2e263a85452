"""``snapstream serve`` as a process: how it starts, stops, dies and comes back; and the files to run it with."""

import configparser
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.serving.servers import post, running, wait_until

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "snapstream.cli", "serve", "--eager", "--max-model-len", "2048", "--budget", "256"]


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


@contextlib.contextmanager
def process(log, *options, command=COMMAND, env=None):
    with log.open("ab") as out:
        started = subprocess.Popen([*command, *options], stdout=out, stderr=out, env=os.environ | (env or {}))
    try:
        yield started
    finally:
        started.kill()
        started.wait()


def ready(url, seconds=60):
    def answers():
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(url + "/ready").status_code == 200
        return False

    wait_until(answers, seconds)


def test_a_life(tmp_path):
    """Start, serve, log, SIGTERM while a stream runs: it ends well, and so does the process."""
    port, log = free_port(), tmp_path / "log"
    url = f"http://127.0.0.1:{port}"
    browser, opened = tmp_path / "browser", tmp_path / "opened"
    browser.write_text(f'#!/bin/sh\necho "$1" > {opened}\n')
    browser.chmod(0o755)
    environment = {"SNAPSTREAM_API_KEY": "secret-key", "BROWSER": str(browser)}
    with process(log, "--port", str(port), "--log-format", "json", "--open", env=environment) as started:
        ready(url)
        wait_until(lambda: opened.exists() and opened.read_text() == url + "\n", 20)
        key = {"Authorization": "Bearer secret-key"}
        assert httpx.get(url + "/v1/models").status_code == 401
        assert httpx.get(url + "/v1/models", headers=key).json()["data"][0]["id"] == "task-model"
        body = {
            "messages": [{"role": "user", "content": "Notes"}],
            "max_tokens": 1500,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", url + "/v1/chat/completions", json=body, headers=key, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            started.send_signal(signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"
        assert started.wait(30) == -signal.SIGTERM  # having ended well, it lets the signal have its way
    records = [json.loads(line) for line in log.read_text().splitlines()]
    assert any(record["message"].startswith("listening on") for record in records)
    request = next(record for record in records if record.get("path") == "/v1/chat/completions")
    assert (request["status"], request["completion_tokens"], request["key"]) == (200, 1500, "key-1")
    assert records[-1]["message"] == "stopped" or "Finished" in records[-1]["message"]
    assert "secret-key" not in log.read_text()


def test_a_second_signal_stops_at_once(tmp_path):
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with process(tmp_path / "log", "--port", str(port), "--max-model-len", "16384") as started:
        ready(url)
        body = {"prompt": "Notes", "max_tokens": 16_000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as reply:
            lines = reply.iter_lines()
            next(lines)
            started.send_signal(signal.SIGTERM)
            time.sleep(0.3)
            assert started.poll() is None
            started.send_signal(signal.SIGTERM)
            began = time.monotonic()
            started.wait(20)
            assert time.monotonic() - began < 5


def test_an_empty_key_does_not_open_the_server():
    run = subprocess.run(
        COMMAND, capture_output=True, text=True, timeout=60, check=False, env=os.environ | {"SNAPSTREAM_API_KEY": ""}
    )
    assert run.returncode == 1
    assert "an API key is empty" in run.stderr


def test_killed_in_mid_stream_and_restarted_by_the_unit(tmp_path):
    """The client of a killed server learns of it at once, and the unit brings the server back."""
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str
    unit.read(ROOT / "deploy/snapstream.service")
    service = unit["Service"]
    assert service["Restart"] == "always"
    port, log = free_port(), tmp_path / "log"
    options = {"OPTIONS": f"--eager --port {port} --budget 256"}
    command = shlex.split(service["ExecStart"].replace("$OPTIONS", options["OPTIONS"]))
    assert command[:2] == ["/opt/snapstream/bin/snapstream", "serve"]
    command[:1] = [sys.executable, "-m", "snapstream.cli"]
    url = f"http://127.0.0.1:{port}"
    body = {"prompt": "Notes", "max_tokens": 10_000, "ignore_eos": True, "stream": True, "temperature": 0}
    texts = []
    for _ in range(2):  # a kill, and what Restart=always does
        with process(log, command=command) as started:
            ready(url)
            texts.append(httpx.post(url + "/v1/completions", json=body | {"stream": False, "max_tokens": 20}).json())
            with httpx.stream("POST", url + "/v1/completions", json=body, timeout=60) as reply:
                lines = reply.iter_lines()
                next(lines)
                started.kill()
                began = time.monotonic()
                with pytest.raises(httpx.RemoteProtocolError):
                    list(lines)
                assert time.monotonic() - began < 5
            assert started.wait(10) == -signal.SIGKILL
    assert texts[0]["choices"] == texts[1]["choices"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
def test_systemd_likes_the_unit(tmp_path):
    """The unit, with a command that exists here."""
    text = (ROOT / "deploy/snapstream.service").read_text().replace("/opt/snapstream/bin/snapstream", sys.executable)
    unit = tmp_path / "snapstream.service"
    unit.write_text(text)
    run = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    complaints = [line for line in run.stderr.splitlines() if "snapstream.service" in line]
    assert not complaints, complaints


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--log-format", "xml"], "allowed: json, text"),
        (["--slots", "0"], "slots is 0"),
        (["--sessions", "-1"], "sessions is -1"),
        (["--model", "/nowhere"], "/nowhere"),
        (["--chat-template", "/nowhere"], "chat template /nowhere could not be read"),
        (["--api-key", ""], "an API key is empty"),
        (["--host", "203.0.113.1"], "203.0.113.1:"),
        (["--policy", "fast"], "unknown policy"),
    ],
)
def test_what_cannot_start_says_why_in_one_line(options, message):
    run = subprocess.run([*COMMAND, "--port", "0", *options], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_a_port_that_is_taken(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        run = subprocess.run([*COMMAND, "--port", str(port)], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in run.stderr
    assert "loading" not in run.stderr


def test_the_dashboard_asks_for_metrics_that_exist(llm):
    dashboard = json.loads((ROOT / "deploy/grafana-dashboard.json").read_text())
    asked = " ".join(target["expr"] for panel in dashboard["panels"] for target in panel["targets"])
    names = set(re.findall(r"\b(?:snapstream|process)_[a-z_]+", asked))
    with running(llm, api_keys=("k",)) as server:
        post(server, prompt="w5", max_tokens=3, headers={"Authorization": "Bearer k"})
        text = httpx.get(server.url + "/metrics").text
    shown = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert names <= shown
    ours = {
        name for name in shown if name.startswith("snapstream_") and not name.endswith(("_created", "_sum", "_count"))
    }
    assert ours <= names, "the dashboard leaves some out"
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(ids) == len(set(ids))
