"""Payloads and how they travel; no vLLM needed."""

import hashlib
import os
import socket
import struct
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from snapstream.compression.layout import lay_out
from snapstream.config import CacheBudget
from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm.payload import Label, PayloadError, heads_of, pack, shares_for, unpack
from snapstream.integrations.vllm.tcp import SECRET, TcpTransport, parse_address
from snapstream.integrations.vllm.transports import DirectoryTransport, PayloadStore

NAME, OTHER = "0" * 32 + "-0-0", "1" * 32 + "-0-0"


def label(layers=2, dtype="float32", value=(2, 8), **changes):
    layout = lay_out(50, CacheBudget(sink=2, recent=20, top_k=8, window=4))
    return Label(layout, (layers, 64, 96), 0, dtype, (2, 16), value, **changes)


def layers_of(one):
    def part(shape):
        heads, size = shape
        return torch.randn(heads, one.layout.count, size).to(getattr(torch, one.dtype))

    return [
        (part(one.key_shape), None if one.value_shape is None else part(one.value_shape)) for _ in range(one.model[0])
    ]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [(2, 8), None])
def test_what_is_packed_comes_out(dtype, value):
    one = label(dtype=dtype, value=value)
    layers = layers_of(one)
    payload = pack(one, layers)
    assert one.nbytes() < len(payload) <= one.most_bytes()
    for (keys, values), (got_keys, got_values) in zip(layers, unpack(payload, one), strict=True):
        assert torch.equal(keys, got_keys)
        assert values is got_values is None or torch.equal(values, got_values)


def test_many_layers_fit_what_is_expected():
    one = label(layers=200)
    assert len(pack(one, layers_of(one))) <= one.most_bytes()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (label(layers=3), r"model \[2, 64, 96\], not \[3, 64, 96\]"),
        (label(dtype="bfloat16"), "dtype float32, not bfloat16"),
        (label(value=None), r"value_shape \[2, 8\], not None"),
    ],
)
def test_what_is_for_another_instance_is_refused(other, message):
    one = label()
    with pytest.raises(PayloadError, match=message):
        unpack(pack(one, layers_of(one)), other)


@given(st.binary(max_size=200), st.integers(0, 3000), st.integers(0, 200))
def test_damage_is_an_error(junk, at, cut):
    one = label()
    whole = pack(one, layers_of(one))
    payload = bytearray(whole)
    payload[at : at + len(junk)] = junk
    payload = bytes(payload[: len(payload) - cut])
    if payload == whole:
        return
    with pytest.raises(PayloadError):
        unpack(payload, one)


@given(st.binary(max_size=300))
def test_junk_is_an_error(junk):
    with pytest.raises(PayloadError):
        unpack(junk, label())


@given(st.sampled_from([1, 2, 3, 6, 8]), st.sampled_from([1, 2, 3, 4, 8, 16]), st.sampled_from([1, 2, 3, 4, 8, 16]))
def test_every_head_comes_once_from_somebody_who_has_it(heads, senders, receivers):
    for receiver in range(receivers):
        got = []
        for share in shares_for(heads, senders, receivers, receiver):
            here = range(share.first, share.first + share.heads)
            assert set(here) <= set(heads_of(heads, senders, share.sender))
            got += here
        assert got == list(heads_of(heads, receivers, receiver))
    held = [head for rank in range(senders) for head in heads_of(heads, senders, rank)]
    assert set(held) == set(range(heads))


# -- a directory ------------------------------------------------------------------------------------------------------


def test_a_file_is_fetched_once(tmp_path):
    here, there = DirectoryTransport(tmp_path / "new"), DirectoryTransport(tmp_path / "new")
    here.publish(NAME, b"something")
    with pytest.raises(PayloadError, match="it has 9 bytes, more than 8"):
        there.fetch("directory", 0, NAME, 8)
    assert there.fetch("directory", 0, NAME, 9) == b"something"
    with pytest.raises(PayloadError, match="not available"):
        there.fetch("directory", 0, NAME, 9)
    here.publish(NAME, b"")
    here.drop(NAME)
    here.drop(NAME)
    assert not list((tmp_path / "new").iterdir())
    assert (tmp_path / "new").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize(
    "name", ["../secret", "0" * 32, f"{'0' * 32}-0-0/..", f"{'G' * 32}-0-0", "", f"{'0' * 32}-0-0\n"]
)
def test_nothing_but_payloads_is_touched(tmp_path, name):
    (tmp_path / "secret").write_text("x")
    transport = DirectoryTransport(tmp_path / "new")
    for call in (lambda: transport.fetch("directory", 0, name, 9), lambda: transport.drop(name)):
        with pytest.raises(PayloadError, match="not the name of a payload"):
            call()
    with pytest.raises(PayloadError):
        transport.publish(name, b"")
    assert (tmp_path / "secret").exists()


def test_old_files_go_and_too_many_too(tmp_path):
    (tmp_path / "of somebody else").write_text("x")
    first = DirectoryTransport(tmp_path, keep=100, limit=25 / 2**30)
    first.publish(NAME, b"0" * 20)
    os.utime(tmp_path / NAME, (1, 1))
    (tmp_path / f".{OTHER}").write_bytes(b"half of one")
    os.utime(tmp_path / f".{OTHER}", (1, 1))
    DirectoryTransport(tmp_path, keep=100)  # as after a crash
    assert [path.name for path in tmp_path.iterdir()] == ["of somebody else"]
    first.publish(NAME, b"0" * 20)
    time.sleep(0.02)
    first.publish(OTHER, b"1" * 20)
    assert {path.name for path in tmp_path.iterdir()} == {"of somebody else", OTHER}


def test_a_directory_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigurationError, match="cannot be used"):
        DirectoryTransport(tmp_path / "file")


@pytest.mark.parametrize("comes", [True, False])
def test_what_was_announced_is_waited_for(tmp_path, port, comes):
    there = DirectoryTransport(tmp_path, patience=2)
    holder = TcpTransport(f"127.0.0.1:{port}", [], patience=2)
    for one, other, source in ((there, there, "directory"), (holder, fetcher(holder), holder.address)):
        one.announce(NAME)
        later = threading.Timer(0.2, lambda one=one: one.publish(NAME, b"late") if comes else one.drop(NAME))
        later.start()
        if comes:
            assert other.fetch(source, 0, NAME, 10) == b"late"
        else:
            with pytest.raises(PayloadError, match="not available"):
                other.fetch(source, 0, NAME, 10)
        later.join()
    holder.close()


# -- TCP --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def port(monkeypatch):
    monkeypatch.setenv(SECRET, "a key that both sides know")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def holder(port):
    transport = TcpTransport(f"127.0.0.1:{port}", [], patience=1)
    yield transport
    transport.close()


def fetcher(holder, **options):
    return TcpTransport(None, [holder.address], patience=1, **options)


def eventually(condition):
    deadline = time.monotonic() + 5
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def test_a_payload_over_tcp_is_forgotten_when_it_has_arrived(holder):
    payload = os.urandom(5_000_000)
    holder.publish(NAME, payload)
    holder.publish(OTHER, b"another")
    assert fetcher(holder).fetch(holder.address, 0, NAME, len(payload)) == payload
    eventually(lambda: len(holder.store) == 1)
    with pytest.raises(PayloadError, match="not available"):
        fetcher(holder).fetch(holder.address, 0, NAME, len(payload))
    with pytest.raises(PayloadError, match="it has 7 bytes, more than 6"):
        fetcher(holder).fetch(holder.address, 0, OTHER, 6)
    assert fetcher(holder).fetch(holder.address, 0, OTHER, 7) == b"another"  # it was kept


def test_many_at_once(holder):
    names = [f"{number:032x}-0-0" for number in range(40)]
    for name in names:
        holder.publish(name, name.encode() * 1000)
    got = {}
    threads = [
        threading.Thread(
            target=lambda name=name: got.update({name: fetcher(holder).fetch(holder.address, 0, name, 10**6)})
        )
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == {name: name.encode() * 1000 for name in names}


def test_whoever_does_not_know_the_key_gets_nothing_and_is_believed_nothing(holder, monkeypatch):
    holder.publish(NAME, b"secret")
    monkeypatch.setenv(SECRET, "another key, also long enough")
    with pytest.raises((PayloadError, OSError)):
        fetcher(holder).fetch(holder.address, 0, NAME, 100)
    assert len(holder.store) == 1
    monkeypatch.setenv(SECRET, "too short")
    with pytest.raises(ConfigurationError, match="16 characters or more"):
        fetcher(holder)


def test_a_peer_that_pretends_and_one_that_breaks_off(port):
    """A holder without the key, and one that ends in the middle: an error, whatever they send."""
    answers = [
        bytes(32),
        bytes(32) + bytes(32) + struct.pack(">Q", 4) + b"evil",
        bytes(32) + bytes(32) + struct.pack(">Q", 2**63),
        bytes(32) + bytes(32) + struct.pack(">Q", 50) + b"half",
    ]
    for answer in answers:
        with socket.create_server(("127.0.0.1", 0)) as server:

            def pretend(server=server, answer=answer):
                line, _ = server.accept()
                with line:
                    line.sendall(answer)
                    line.recv(200)

            thread = threading.Thread(target=pretend)
            thread.start()
            address = f"127.0.0.1:{server.getsockname()[1]}"
            with pytest.raises((PayloadError, OSError)):
                TcpTransport(None, [address], patience=1).fetch(address, 0, NAME, 100)
            thread.join()


def test_a_damaged_payload_is_noticed(holder, monkeypatch):
    holder.publish(NAME, b"0123456789")
    sendall = socket.socket.sendall
    monkeypatch.setattr(
        socket.socket, "sendall", lambda self, data: sendall(self, b"0123X56789" if data == b"0123456789" else data)
    )
    with pytest.raises(PayloadError, match="damaged in transit"):
        fetcher(holder).fetch(holder.address, 0, NAME, 100)
    assert len(holder.store) == 1


@given(st.binary(max_size=400))
def test_junk_from_a_stranger_does_no_harm(junk):
    os.environ[SECRET] = "a key that both sides know"
    if not hasattr(test_junk_from_a_stranger_does_no_harm, "holder"):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        test_junk_from_a_stranger_does_no_harm.holder = TcpTransport(f"127.0.0.1:{port}", [], patience=0.5)
    holder = test_junk_from_a_stranger_does_no_harm.holder
    holder.publish(NAME, b"secret")
    with socket.create_connection(parse_address(holder.address)) as line:
        line.sendall(junk)
        line.shutdown(socket.SHUT_WR)
        line.settimeout(5)
        said = b""
        try:
            while part := line.recv(1000):
                said += part
        except ConnectionError:
            pass
    assert len(said) <= 32  # its nonce, and not a word more
    assert len(holder.store) == 1


def test_a_recorded_conversation_is_worth_nothing(holder):
    """Whoever has listened may say the same again: the other side's nonce is new."""
    holder.publish(NAME, b"secret")
    key, asked = hashlib.sha256(os.environ[SECRET].encode()).digest(), NAME.encode()

    def ask(nonce_of_before=None):
        with socket.create_connection(parse_address(holder.address), timeout=5) as line:
            theirs, mine = line.recv(32), bytes(32)
            digest = hashlib.blake2b(key=key, digest_size=32)
            for part in (b"fetch", nonce_of_before or theirs, mine, asked):
                digest.update(struct.pack(">Q", len(part)) + part)
            line.sendall(mine + digest.digest() + struct.pack(">H", len(asked)) + asked)
            said = b""
            try:
                while part := line.recv(1000):
                    said += part
                    if said.endswith(b"secret"):
                        break
            except ConnectionError:
                pass
        return theirs, said

    nonce, said = ask()
    assert said.endswith(b"secret")
    assert len(holder.store) == 1  # nobody has said that it arrived
    assert ask(nonce)[1] == b""


def test_addresses_and_peers(holder, port):
    with pytest.raises(PayloadError, match="not among the peers of this instance: none"):
        TcpTransport(None, []).fetch(holder.address, 0, NAME, 10)
    with pytest.raises(ConfigurationError, match="cannot listen"):
        TcpTransport(holder.address, [])
    assert parse_address("[::1]:80") == ("::1", 80)
    for text in ("host", "host:", ":80", "host:0", "host:65536", "host:\uff18\uff10", 5):
        with pytest.raises(ConfigurationError, match="not an address"):
            parse_address(text)
    with pytest.raises(OSError, match=r".*"):  # nobody listens at the port of rank 7
        fetcher(holder).fetch(holder.address, 7, NAME, 10)


def test_the_store_forgets():
    store = PayloadStore(keep=0.05, limit=10 / 2**30)
    store.put(NAME, b"12345")
    store.put(OTHER, b"1234567")  # together more than the limit
    assert store.get(NAME) is None
    assert store.get(OTHER) == b"1234567"
    time.sleep(0.1)
    store.sweep()
    assert len(store) == 0
