"""A model of a known shape with random weights, created on the device, and clocks to time it."""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from snapstream.attention import choose_backend
from snapstream.config import CacheBudget, EngineConfig
from snapstream.engine.settings import Setup, Types
from snapstream.kernels.formats import FORMATS
from snapstream.models.decoder import DecoderModel
from snapstream.models.families import tensor_places
from snapstream.models.spec import ModelSpec
from snapstream.models.storage import quantized_formats, with_formats
from snapstream.models.weights import allocate_model, load_spec

LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072 + 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TINY = LLAMA_8B | {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 96,
}

WAIT = 4_000_000
"""Cycles that a device waits for the host, about 2 ms; a layer's part is launched in less."""


@dataclass(frozen=True)
class Scale:
    """Sizes of the benchmarks.

    Attributes:
        config: Configuration of the model.
        lengths: Prompt lengths in tokens, the longest last.
        cache: Entries of a compressed cache.
        batches: Numbers of slots that decode together; the largest number that fits is measured as well.
        table: Lengths of full and compressed caches, as in the paper's table 5.
        chunk: Prompt tokens per launch.
        steps: Tokens that a slot decodes per launch.
        copied: Number of 2-byte elements that are copied to measure bandwidth.
        widened: Prompt lengths in tokens for which weights are widened or not.
        repeats: Number of measurements.
        most_slots: Maximum number of slots, even if more fit.
    """

    config: dict[str, Any]
    lengths: tuple[int, ...]
    cache: int
    batches: tuple[int, ...]
    table: tuple[tuple[int, int], ...]
    chunk: int
    steps: int
    copied: int
    widened: tuple[int, ...]
    repeats: int
    most_slots: int


FULL = Scale(
    config=LLAMA_8B,
    lengths=(8192, 32768, 131072),
    cache=4096,
    batches=(1, 4, 16, 64),
    table=((131072, 32768), (65536, 16384), (32768, 8192)),
    chunk=2048,
    steps=8,
    copied=2**31,
    widened=(16, 64, 128, 192, 256, 384, 512, 1024, 2048),
    repeats=7,
    most_slots=512,
)
DRY = Scale(
    config=TINY,
    lengths=(48, 80),
    cache=32,
    batches=(1, 2),
    table=((80, 32),),
    chunk=16,
    steps=2,
    copied=2**16,
    widened=(8, 16),
    repeats=1,
    most_slots=2,
)


def spec_of(config: dict[str, Any], layers: int | None = None, weights: str = "bfloat16") -> ModelSpec:
    """The spec of the model, optionally with fewer layers, or with weights in blocks."""
    config = config | ({} if layers is None else {"num_hidden_layers": layers})
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(config))
        spec = load_spec(Path(directory))
    kind = FORMATS.get(weights)
    return spec if kind is None else with_formats(spec, quantized_formats(tensor_places(spec), kind))


def make_model(spec: ModelSpec, device: torch.device) -> DecoderModel:
    """Create random weights in bfloat16 or blocks, directly on the device."""
    model = allocate_model(spec, torch.bfloat16, device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1.0)
        elif parameter.dtype == torch.uint8:
            parameter.random_(0, 32, generator=generator)  # scales, of two of these bytes each, are below 0.01
        else:
            parameter.normal_(0.0, 0.02, generator=generator)
    return model


def setup_of(spec: ModelSpec, device: torch.device, scale: Scale, budget: int, length: int, *, slots: int) -> Setup:
    """The setup of an engine for a checkpoint of this shape."""
    sizes = {"slots": slots, "prefill_chunk": scale.chunk, "decode_steps": scale.steps, "max_logprobs": 1}
    config = EngineConfig(max_model_len=length, prefix_cache=0, **sizes)
    name = "auto" if device.type == "cuda" else "triton"
    return Setup(
        spec=spec,
        config=config,
        device=device,
        types=Types.all(torch.bfloat16),
        max_model_len=length,
        budget=CacheBudget.of(budget),
        backend=choose_backend(name, device, torch.bfloat16, spec.head_dim, spec.value_size),
        eager=device.type != "cuda",
    )


class Clock:
    """Times work on a device; on CUDA, with events."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats

    def once(self, work: Callable[[], object], *, queued: bool = False) -> float:
        """Seconds of one call.

        Args:
            work: What to time.
            queued: Leave out the time that the host needs to launch it: the device waits until all is in its queue.
        """
        if self.device.type != "cuda":
            start = time.perf_counter()
            work()
            return time.perf_counter() - start
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        if queued:
            torch.cuda._sleep(WAIT)  # type: ignore[no-untyped-call]
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000

    def __call__(self, work: Callable[[], object]) -> dict[str, float]:
        """Median, minimum and maximum seconds of several calls, after one warm-up call."""
        work()
        seconds = sorted(self.once(work) for _ in range(self.repeats))
        return {"median": statistics.median(seconds), "least": seconds[0], "most": seconds[-1]}
