"""HTTP as other clients and proxies speak it: HEAD, HTTP/1.0, other protocols offered, compressed bodies."""

import functools
import gzip
import json
import socket
import zlib

import httpx
import pytest

from tests.serving.servers import metric, running

# Without the time, which names of cases would have.
gzipped = functools.partial(gzip.compress, mtime=0)
BODY = json.dumps({"prompt": "w5 w6", "max_tokens": 3, "temperature": 0}).encode()


@pytest.fixture(scope="module")
def server(llm):
    with running(llm, max_body_bytes=100_000) as one:
        yield one


def talk(server, data):
    """What the server says to these bytes, until it closes."""
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        raw.sendall(data)
        said = b""
        while part := raw.recv(65536):
            said += part
    return said


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/", "/metrics", "/page/page.js", "/openapi.json"])
def test_head_is_get_without_a_body(server, path):
    head, get = httpx.head(server.url + path), httpx.get(server.url + path)
    assert head.status_code == get.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == get.headers["content-type"]
    if path != "/metrics":  # which counts itself
        assert head.headers["content-length"] == get.headers["content-length"]


def test_head_of_what_is_not_there(server):
    assert httpx.head(server.url + "/nothing").status_code == 404
    assert httpx.head(server.url + "/v1/completions").status_code == 405
    before = metric(server, "snapstream_http_requests_total")
    httpx.head(server.url + "/health")
    assert metric(server, "snapstream_http_requests_total") == before + 2  # and that of the metrics before


def test_a_connection_goes_on_after_head(server):
    said = talk(
        server,
        b"HEAD /health HTTP/1.1\r\nHost: a\r\n\r\nGET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n",
    )
    assert said.count(b"HTTP/1.1 200") == 2
    assert said.count(b'{"status":"ok"}') == 1


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0_gets_no_chunks(server, stream):
    body = json.dumps(json.loads(BODY) | {"stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    said = talk(server, head.encode() + body)
    headers, _, text = said.partition(b"\r\n\r\n")
    assert b" 200 " in headers.splitlines()[0]
    assert b"transfer-encoding" not in headers.lower()
    assert text.endswith(b"data: [DONE]\n\n") if stream else json.loads(text)["choices"]


def test_another_protocol_that_is_offered_is_not_taken(server):
    """As Java's client does, with the body of the request behind it."""
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
        f"HTTP2-Settings: AAEAAEAAAAIAAAAB\r\nContent-Type: application/json\r\nContent-Length: {len(BODY)}\r\n\r\n"
    )
    after = b"GET /health HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"
    said = talk(server, head.encode() + BODY + after)
    assert said.count(b"HTTP/1.1 200") == 2
    assert b'"choices"' in said
    # And where the body comes later than the head.
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as raw:
        raw.sendall(head.encode())
        raw.sendall(BODY[:10])
        raw.sendall(BODY[10:])
        assert b"HTTP/1.1 200" in raw.recv(65536)


@pytest.mark.parametrize(
    ("encoding", "pack"),
    [
        ("gzip", gzipped),
        ("GZIP", gzipped),
        ("x-gzip", gzipped),
        ("deflate", zlib.compress),
        ("identity", bytes),
        ("identity, gzip", gzipped),
        ("gzip", lambda body: gzipped(body[:9]) + gzipped(body[9:])),
    ],
)
def test_compressed_bodies(server, encoding, pack):
    headers = {"Content-Type": "application/json"}
    want = httpx.post(server.url + "/v1/completions", content=BODY, headers=headers).json()["choices"]
    headers["Content-Encoding"] = encoding
    assert httpx.post(server.url + "/v1/completions", content=pack(BODY), headers=headers).json()["choices"] == want


@pytest.mark.parametrize(
    ("encoding", "body", "status", "message"),
    [
        ("br", BODY, 415, "'br' is not supported; send the body uncompressed, or with one of gzip, x-gzip, deflate"),
        ("gzip, gzip", gzipped(gzipped(BODY)), 415, "is not supported"),
        ("gzip", BODY, 400, "not compressed as its Content-Encoding says"),
        ("gzip", gzipped(BODY)[:-9], 400, "it ends too soon"),
        ("gzip", gzipped(b" " * 100_001), 413, "longer than 100000 bytes"),
        ("gzip", gzipped(b" " * 60_000) * 2, 413, "longer than 100000 bytes"),
        ("gzip", gzipped(gzipped(b" " * 10**8)), 400, ""),
        ("deflate", zlib.compress(b" " * 10**8), 413, "longer than 100000 bytes"),
        ("gzip", b"", 400, ""),
        ("gzip", gzipped(b"") * 1000, 400, "more than 100 members"),
    ],
)
def test_bodies_that_cannot_be_decompressed(server, encoding, body, status, message):
    headers = {"Content-Type": "application/json", "Content-Encoding": encoding}
    reply = httpx.post(server.url + "/v1/completions", content=body, headers=headers)
    assert reply.status_code == status
    assert message in reply.json()["error"]["message"]
    assert httpx.get(server.url + "/health").status_code == 200
