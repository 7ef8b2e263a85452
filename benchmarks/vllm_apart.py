"""Disaggregated prefill: how evenly streams run while long prompts arrive, and how much data is transferred.

Two streams decode; then prompts of 16k tokens arrive, one after the other. The time between two chunks of a stream is
measured at the client, for three setups: one instance on one core, one instance on two cores, and two instances on one
core each behind the router. In every round, each setup is started, measured and stopped. Prints Markdown; `--json FILE`
saves the raw numbers.

    .venv-vllm/bin/python -m benchmarks.vllm_apart
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from benchmarks.model import CONFIG
from benchmarks.ratios import show
from snapstream.outputs import write_text

CONTEXT, STREAM_CONTEXT, BUDGET, ARRIVALS = 16384, 2048, 4096, 3
PORTS = {"one": 8101, "prefill": 8102, "decode": 8103, "router": 8104}
WAYS = ("one instance, one core", "one instance, two cores", "two instances, one core each")


@contextlib.contextmanager
def server(name: str, model: Path, logs: Path, cores: str, transfer: dict[str, Any] | None = None) -> Iterator[None]:
    """Run vLLM's own server on some cores."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--served-model-name", "m", "--port", str(PORTS[name])]
    command += ["--dtype", "bfloat16", "--max-model-len", str(CONTEXT + 1024), "--max-num-batched-tokens", "2048"]
    command += ["--max-num-seqs", "8", "--no-enable-prefix-caching"]
    command += ["--additional-config", f'{{"snapstream": {BUDGET}}}']
    if transfer:
        command += ["--kv-transfer-config", json.dumps(transfer)]
    environment = {"VLLM_CPU_OMP_THREADS_BIND": cores, "VLLM_CPU_KVCACHE_SPACE": "3", "VLLM_LOGGING_LEVEL": "ERROR"}
    with process(command, logs / f"{name}.log", f"http://127.0.0.1:{PORTS[name]}/health", environment):
        yield


@contextlib.contextmanager
def process(command: list[str], log: Path, health: str, environment: dict[str, str]) -> Iterator[None]:
    """Run a program, and wait until it is healthy."""
    with log.open("w") as output:
        running = subprocess.Popen(command, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        while True:
            if running.poll() is not None:
                raise SystemExit(log.read_text()[-3000:])
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(health, timeout=5).status_code == 200:
                    break
            time.sleep(0.5)
        yield
    finally:
        running.terminate()
        running.wait(60)


def transfer_of(role: str, directory: Path) -> dict[str, Any]:
    extra = {"directory": str(directory)}
    return {"kv_connector": "SnapStreamConnector", "kv_role": role, "kv_connector_extra_config": extra}


@contextlib.contextmanager
def way(name: str, model: Path, logs: Path) -> Iterator[str]:
    """Run one setup; yields its address."""
    if name != WAYS[2]:
        with server("one", model, logs, "0" if name == WAYS[0] else "0-1"):
            yield f"http://127.0.0.1:{PORTS['one']}"
        return
    payloads = logs / "payloads"
    router = [sys.executable, "-m", "snapstream", "route", "--port", str(PORTS["router"])]
    for kind in ("prefill", "decode"):
        router += [f"--{kind}", f"http://127.0.0.1:{PORTS[kind]}"]
    address = f"http://127.0.0.1:{PORTS['router']}"
    with (
        server("prefill", model, logs, "1", transfer_of("kv_producer", payloads)),
        server("decode", model, logs, "0", transfer_of("kv_consumer", payloads)),
        process(router, logs / "router.log", f"{address}/health", {}),
    ):
        yield address


def save_model(directory: Path) -> None:
    """Save random weights, and a tokenizer with one word per token."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).to(torch.bfloat16).save_pretrained(directory)
    words = WordLevel({f"w{number}": number for number in range(CONFIG["vocab_size"])}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(directory)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, CONFIG["vocab_size"]) for _ in range(length)]


async def stream(client: httpx.AsyncClient, address: str, tokens: list[int], steps: int, times: list[float]) -> None:
    """Request a stream, and record the time of each chunk."""
    body = {"model": "m", "prompt": tokens, "max_tokens": steps, "temperature": 0, "ignore_eos": True, "stream": True}
    async with client.stream("POST", f"{address}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                times.append(time.perf_counter())


async def measure(address: str, seed: int) -> dict[str, Any]:
    """Gaps of two streams, alone and while prompts arrive, and the time to first token of those prompts."""
    async with httpx.AsyncClient(timeout=None) as client:
        await stream(client, address, prompt(256, 1), 4, [])
        running: list[list[float]] = [[], []]
        tasks = [
            asyncio.create_task(stream(client, address, prompt(STREAM_CONTEXT, seed + n), 900, times))
            for n, times in enumerate(running)
        ]
        while any(len(times) < 60 for times in running):
            await asyncio.sleep(0.01)
        alone_from = [len(times) - 40 for times in running]
        begin = time.perf_counter()
        first = []
        for number in range(ARRIVALS):
            arrived: list[float] = []
            asked = time.perf_counter()
            await stream(client, address, prompt(CONTEXT, seed + 10 + number), 4, arrived)
            first.append(arrived[0] - asked)
        end = time.perf_counter()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    gaps: dict[str, list[float]] = {"alone": [], "arriving": []}
    for times, start in zip(running, alone_from, strict=True):
        for before, after in zip(times[start:], times[start + 1 :], strict=False):
            if after <= begin:
                gaps["alone"].append(after - before)
            elif before < end:
                gaps["arriving"].append(after - before)
    return gaps | {"first": first, "seconds": end - begin}


def payload_bytes(model: Path, logs: Path) -> dict[str, int]:
    """Bytes transferred for one prompt of 16k tokens, and sizes of its compressed and full cache."""
    payloads = logs / "payloads"
    with server("prefill", model, logs, "0-1", transfer_of("kv_producer", payloads)):
        body = {"model": "m", "prompt": prompt(CONTEXT, 5), "max_tokens": 1, "temperature": 0}
        body["kv_transfer_params"] = {"do_remote_decode": True}
        httpx.post(f"http://127.0.0.1:{PORTS['prefill']}/v1/completions", json=body, timeout=None).raise_for_status()
        time.sleep(1)
        (payload,) = payloads.iterdir()
        sent = payload.stat().st_size
        payload.unlink()
    head = CONFIG["hidden_size"] // CONFIG["num_attention_heads"]
    size = head * CONFIG["num_key_value_heads"] * 2 * 2 * CONFIG["num_hidden_layers"]
    return {"sent": sent, "compressed": BUDGET * size, "full": CONTEXT * size}


def table(results: dict[str, list[dict[str, Any]]]) -> None:
    """Print gaps as multiples of the setup's undisturbed gap, and TTFT relative to one instance on one core."""
    print(
        f"\nTwo streams while {ARRIVALS} prompts of {CONTEXT} tokens arrive, budget {BUDGET}; gaps between chunks as "
        "multiples of the median gap before:\n\n"
        "| | median gap | 95 % | longest | first token of a prompt, beside one core |\n|---|---|---|---|---|"
    )
    base = [statistics.median(one["first"]) for one in results[WAYS[0]]]
    for name, rounds in results.items():
        columns: list[list[float]] = [[], [], [], []]
        for one, beside in zip(rounds, base, strict=True):
            quiet, gaps = statistics.median(one["alone"]), sorted(one["arriving"])
            columns[0].append(statistics.median(gaps) / quiet)
            columns[1].append(gaps[int(len(gaps) * 0.95)] / quiet)
            columns[2].append(gaps[-1] / quiet)
            columns[3].append(statistics.median(one["first"]) / beside)
        print(f"| {name} | {' | '.join(show(column) for column in columns)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory() as directory:
        model, logs = Path(directory) / "model", Path(directory)
        save_model(model)
        sizes = payload_bytes(model, logs)
        print(
            f"A prompt of {CONTEXT} tokens transfers {sizes['sent'] / 2**20:.1f} MiB; its compressed cache has "
            f"{sizes['compressed'] / 2**20:.1f} MiB, its full cache {sizes['full'] / 2**20:.1f} MiB."
        )
        for number in range(options.rounds):
            for name in WAYS:
                with way(name, model, logs) as address:
                    results[name].append(asyncio.run(measure(address, 100 * number)))
    table(results)
    if options.json:
        write_text(options.json, json.dumps({"sizes": sizes, "results": results}))


if __name__ == "__main__":
    main()
