"""Payloads over TCP. Both sides prove that they know a common key before any received data is interpreted.

The protocol::

    holder  -> fetcher   nonce of the holder, 32 bytes
    fetcher -> holder    nonce of the fetcher, 32 bytes; proof, 32 bytes; length of the name, 2 bytes; name
    holder  -> fetcher   proof, 32 bytes; length of the payload, 8 bytes (0: not available); payload
    fetcher -> holder    1 byte: acknowledges the whole payload, so it may be dropped

A proof is a keyed digest (BLAKE2b) of both nonces, the sender's role, and the sender's message. Data is not encrypted:
use this transport only inside a trusted network.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import socket
import struct
import threading
from collections.abc import Sequence

from typing_extensions import override

from snapstream.errors import ConfigurationError
from snapstream.integrations.vllm.payload import PayloadError
from snapstream.integrations.vllm.transports import KEEP, LIMIT, PATIENCE, PayloadStore, Transport

SECRET = "SNAPSTREAM_TRANSFER_KEY"
_NONCE, _PROOF, _PIECE = 32, 32, 2**20
_CONVERSATIONS = 64

logger = logging.getLogger("vllm.snapstream")


class TcpTransport(Transport):
    """A server for payloads published here, and a client for payloads of other instances."""

    def __init__(
        self,
        address: str | None,
        peers: Sequence[str],
        *,
        offset: int = 0,
        keep: float = KEEP,
        limit: float = LIMIT,
        patience: float = PATIENCE,
    ) -> None:
        """Start listening, if there is an address.

        Args:
            address: ``host:port`` to listen at; ``None`` if nothing is published here.
            peers: Addresses that payloads may be fetched from.
            offset: Added to the port; the rank, because each rank has its own port.
            keep: Seconds for which a payload is kept.
            limit: Maximum size of all kept payloads, in GiB.
            patience: Timeout for the other side, in seconds.

        Raises:
            ConfigurationError: There is no key, or the address is invalid or in use.
        """
        self._key = secret()
        self.address, self.peers, self.patience = address, tuple(peers), patience
        self.store = PayloadStore(keep=keep, limit=limit)
        self._listener: socket.socket | None = None
        if address is not None:
            host, port = parse_address(address)
            try:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                self._listener = socket.create_server((host, port + offset), family=family, backlog=_CONVERSATIONS)
            except OSError as error:
                raise ConfigurationError(f"cannot listen at {host}:{port + offset}: {error}") from error
            self._slots = threading.BoundedSemaphore(_CONVERSATIONS)
            threading.Thread(
                target=self._serve, args=(self._listener,), name="snapstream-payloads", daemon=True
            ).start()

    @override
    def announce(self, name: str) -> None:
        self.store.announce(name)

    @override
    def publish(self, name: str, payload: bytes) -> None:
        self.store.put(name, payload)

    @override
    def drop(self, name: str) -> None:
        self.store.drop(name)

    @override
    def sweep(self) -> None:
        self.store.sweep()

    @override
    def close(self) -> None:
        if self._listener is not None:
            self._listener.close()

    @override
    def fetch(self, source: str, rank: int, name: str, most: int) -> bytes:
        if source not in self.peers:
            raise PayloadError(f"{source!r} is not among the peers of this instance: {', '.join(self.peers) or 'none'}")
        host, port = parse_address(source)
        asked = name.encode()
        with socket.create_connection((host, port + rank), timeout=self.patience) as line:
            theirs, mine = _receive(line, _NONCE), os.urandom(_NONCE)
            line.sendall(mine + self._proof(b"fetch", theirs, mine, asked) + struct.pack(">H", len(asked)) + asked)
            proof, (size,) = _receive(line, _PROOF), struct.unpack(">Q", _receive(line, 8))
            if size > most:
                raise PayloadError(f"it has {size} bytes, more than {most}")
            payload = _receive(line, size)
            if not hmac.compare_digest(proof, self._proof(b"payload", theirs, mine, payload)):
                raise PayloadError(f"it was damaged in transit, or the other side has a different {SECRET}")
            if not size:
                raise PayloadError("it is not available (any more)")
            line.sendall(b"\1")
        return bytes(payload)

    def _proof(self, who: bytes, theirs: bytes | bytearray, mine: bytes | bytearray, said: bytes | bytearray) -> bytes:
        digest = hashlib.blake2b(key=self._key, digest_size=_PROOF)
        for part in (who, theirs, mine, said):
            digest.update(struct.pack(">Q", len(part)))
            digest.update(part)
        return digest.digest()

    def _serve(self, listener: socket.socket) -> None:
        while True:
            try:
                line, _ = listener.accept()
            except OSError:
                return  # closed
            if not self._slots.acquire(timeout=self.patience):
                line.close()
                continue
            threading.Thread(target=self._converse, args=(line,), name="snapstream-payload", daemon=True).start()

    def _converse(self, line: socket.socket) -> None:
        try:
            with line:
                line.settimeout(self.patience)
                self._hand_over(line)
        except (OSError, PayloadError) as error:
            logger.warning("SnapStream: a cache was requested, but could not be sent: %s", error)
        finally:
            self._slots.release()

    def _hand_over(self, line: socket.socket) -> None:
        mine = os.urandom(_NONCE)
        line.sendall(mine)
        theirs, proof = _receive(line, _NONCE), _receive(line, _PROOF)
        (size,) = struct.unpack(">H", _receive(line, 2))
        asked = bytes(_receive(line, min(size, 64)))
        if size > 64 or not hmac.compare_digest(proof, self._proof(b"fetch", mine, theirs, asked)):
            raise PayloadError(f"the requester does not know {SECRET}")
        name = asked.decode("ascii", "replace")
        payload = self.store.get(name, self.patience / 2) or b""
        line.sendall(self._proof(b"payload", mine, theirs, payload) + struct.pack(">Q", len(payload)))
        line.sendall(payload)
        if payload and line.recv(1) == b"\1":
            self.store.drop(name)


def secret() -> bytes:
    """The common key. It comes from the environment rather than the configuration, so it is never logged.

    Raises:
        ConfigurationError: There is no key, or it is too short.
    """
    key = os.environ.get(SECRET, "").encode()
    if len(key) < 16:
        raise ConfigurationError(f"{SECRET} must hold the same key of 16 characters or more on all instances")
    return hashlib.sha256(key).digest()


def parse_address(text: str) -> tuple[str, int]:
    """Parse ``host:port`` into host and port.

    Raises:
        ConfigurationError: The text does not have this form.
    """
    host, _, port = text.rpartition(":") if isinstance(text, str) else ("", "", "")
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise ConfigurationError(f"{text!r} is not an address of the form host:port")
    return host.strip("[]"), int(port)


def _receive(line: socket.socket, size: int) -> bytearray:
    """Receive exactly ``size`` bytes.

    Raises:
        PayloadError: The other side closed the connection early.
    """
    received = bytearray(size)
    view = memoryview(received)
    done = 0
    while done < size:
        count = line.recv_into(view[done : done + _PIECE])
        if not count:
            raise PayloadError("the other side closed the connection")
        done += count
    return received
