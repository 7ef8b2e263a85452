"""Real servers for tests: uvicorn on a free port, in a thread of this process."""

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import httpx

from snapstream.serving.server import Server
from snapstream.serving.settings import ServerSettings


@contextlib.contextmanager
def running(llm, **settings):
    """A server over an engine; the engine is as before at the end, so it can be used again."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = Server(llm, ServerSettings(**({"model_name": "tiny"} | settings)))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive())
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        parts = server.application.state.parts
        yield SimpleNamespace(url=url, server=server, parts=parts, driver=parts.driver, llm=llm, thread=thread)
    finally:
        server.should_exit = True
        thread.join(60)
        listener.close()
        assert not thread.is_alive()
        llm.engine.reset()


def wait_until(condition, seconds=30.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.002)


def idle(server):
    """Nothing waits or runs, for the event loop and for the engine."""
    return server.driver.unfinished == 0 and not server.llm.engine.busy and not any(server.llm.engine.table.slots)


def post(server, path="/v1/completions", timeout=30.0, headers=None, **body):
    return httpx.post(server.url + path, json=body, timeout=timeout, headers=headers)


def metric(server, name):
    """Sum of a metric over its labels."""
    lines = httpx.get(server.url + "/metrics").text.splitlines()
    found = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
    assert found, name
    return sum(float(line.rsplit(" ", 1)[1]) for line in found)
