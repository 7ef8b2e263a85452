"""Where a model is looked for, and what of a hub repository is fetched."""

import hashlib
import http.server
import json
import os
import subprocess
import sys
import threading

import pytest

from snapstream import CheckpointError
from snapstream.models.files import resolve_checkpoint, resolve_config
from tests.checkpoints import save_checkpoint


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's protocol as its client needs to fetch one repository."""

    commit = "0" * 40

    def log_message(self, *_):
        pass

    def do_HEAD(self):
        self.answer(send_body=False)

    def do_GET(self):
        self.answer(send_body=True)

    def answer(self, *, send_body):
        files, fetched = self.server.files, self.server.fetched
        if self.path.startswith("/api/models/owner/name"):
            if "/tree/" in self.path:
                entries = [{"type": "file", "path": n, "size": len(files[n]), "oid": "0" * 40} for n in files]
                return self.respond(200, json.dumps(entries).encode(), {"Content-Type": "application/json"}, send_body)
            about = {"id": "owner/name", "sha": self.commit, "siblings": [{"rfilename": name} for name in files]}
            return self.respond(200, json.dumps(about).encode(), {"Content-Type": "application/json"}, send_body)
        name = self.path.partition(f"/owner/name/resolve/{self.commit}/")[2]
        if name not in files:
            return self.respond(404, b"", {"X-Error-Code": "EntryNotFound"}, send_body)
        if send_body:
            fetched.append(name)
        tag = hashlib.sha256(files[name]).hexdigest()
        return self.respond(200, files[name], {"ETag": f'"{tag}"', "X-Repo-Commit": self.commit}, send_body)

    def respond(self, status, body, headers, send_body):
        self.send_response(status)
        for key, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(key, value)
        self.end_headers()
        if send_body:
            self.wfile.write(body)


@pytest.fixture
def hub(tmp_path):
    """Fetches from a server of ours, with the real client, in a process of its own."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.files, server.fetched = {}, []
    threading.Thread(target=server.serve_forever, daemon=True).start()

    def fetch(files, function="resolve_checkpoint", model="owner/name", cwd=tmp_path):
        server.files, server.fetched[:] = files, []
        code = f"from snapstream.models.files import *; print({function}({model!r}))"
        address = f"http://127.0.0.1:{server.server_port}"
        environment = os.environ | {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}
        run = subprocess.run(
            [sys.executable, "-c", code], cwd=cwd, env=environment, capture_output=True, text=True, check=False
        )
        return run, sorted(server.fetched)

    yield fetch
    server.shutdown()


# What files say differs, as files that say the same are fetched once.
NEEDED = {
    name: json.dumps({"name": name}).encode()
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    )
}
OTHERS = {
    "consolidated.safetensors": b"large",
    "consolidated.00.pth": b"large",
    "original/params.json": b"{}",
    "onnx/model.onnx": b"large",
    "onnx/config.json": b"{}",
    "model.fp32-00001-of-00002.safetensors": b"large",
    "pytorch_model.bin": b"large",
    "README.md": b"text",
}


def test_only_what_is_needed_is_fetched(hub):
    run, fetched = hub(NEEDED | OTHERS | {"model.safetensors": b"weights"})
    assert not run.returncode, run.stderr
    assert fetched == sorted([*NEEDED, "model.safetensors"])


def test_of_shards_those_that_the_index_names(hub):
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    shards = {name: name.encode() for name in index["weight_map"].values()}
    files = {"model.safetensors.index.json": json.dumps(index).encode()} | shards
    run, fetched = hub(NEEDED | OTHERS | files | {"model.safetensors": b"an old one"})
    assert not run.returncode, run.stderr
    assert fetched == sorted([*NEEDED, *files])


def test_of_a_plan_only_the_configuration(hub):
    run, fetched = hub(NEEDED | OTHERS | {"model.safetensors": b"weights"}, "resolve_config")
    assert not run.returncode, run.stderr
    assert fetched == ["config.json", "generation_config.json"]


def test_a_repository_of_other_files(hub):
    run, _ = hub({"model-q4_k_m.gguf": b"GGUF", "README.md": b"text"})
    assert "the hub repository owner/name has no config.json; if it has GGUF files, download one" in run.stderr


def test_a_hub_id_whose_owner_is_a_directory_here(hub, tmp_path):
    """A typing error is more likely; what is meant can be said."""
    (tmp_path / "owner" / "nome").mkdir(parents=True)
    run, fetched = hub(NEEDED | {"model.safetensors": b"weights"})
    assert "did you mean owner/nome?; for a model on the hub, give hf://owner/name" in run.stderr
    assert not fetched
    run, fetched = hub(NEEDED | {"model.safetensors": b"weights"}, model="hf://owner/name")
    assert not run.returncode, run.stderr
    assert fetched == sorted([*NEEDED, "model.safetensors"])


@pytest.mark.parametrize("resolve", [resolve_checkpoint, resolve_config])
def test_typing_errors(tmp_path, monkeypatch, resolve):
    """None of them asks the network."""
    monkeypatch.setattr("huggingface_hub.snapshot_download", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    save_checkpoint(tmp_path / "models" / "small-chat", "qwen2")
    (tmp_path / "notes.txt").write_text("no model")
    (tmp_path / "many").mkdir()
    (tmp_path / "many" / "a.Q4.gguf").write_bytes(b"GGUF")
    for given, message in (
        ("models/smal-chat", r"did you mean models/small-chat\?"),
        ("models/smal-chat.gguf", r"neither a directory, nor a \.gguf file"),
        ("nowhere/model.gguf", "there is no directory nowhere"),
        ("./owner/name", "there is no directory owner"),
        ("smollm", r"did you mean smollm2\?"),
        ("notes.txt", "neither a directory nor a GGUF file: it does not begin with the bytes 'GGUF'"),
        ("many", r"no config.json; .* a GGUF file itself: many/a.Q4.gguf"),
    ):
        with pytest.raises(CheckpointError, match=message):
            resolve(given)
    assert resolve("models/small-chat").name == "small-chat"
