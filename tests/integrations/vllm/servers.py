"""vLLM's own server, in a process of its own."""

import contextlib
import os
import socket
import subprocess
import sys
import time
import urllib.request

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"


def start(directory, model, *options, environment=None):
    """Start a server of `model` under the name `tiny`; returns its process, its address and its log."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    template, log = directory / "chat.jinja", directory / "server.log"
    template.write_text(TEMPLATE)
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
    command += ["--served-model-name", "tiny", "--port", str(port), "--host", "127.0.0.1"]
    command += ["--dtype", "float32", "--max-model-len", "12000", "--block-size", "32", "--enforce-eager"]
    command += ["--chat-template", str(template), *options]
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"} | (environment or {})
    with log.open("w") as output:
        process = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT)
    return process, f"http://127.0.0.1:{port}", log


def wait_for(process, address, log):
    """Until a server answers."""
    deadline = time.monotonic() + 240
    while True:
        assert process.poll() is None, log.read_text()[-4000:]
        assert time.monotonic() < deadline, log.read_text()[-4000:]
        try:
            urllib.request.urlopen(address, timeout=5)
            return
        except OSError:
            time.sleep(0.5)


@contextlib.contextmanager
def running(directory, model, *options, environment=None):
    """A server that answers; its address and its log."""
    process, address, log = start(directory, model, *options, environment=environment)
    try:
        wait_for(process, f"{address}/health", log)
        yield address, log
    finally:
        process.terminate()
        process.wait(60)
