"""Triton's compiler without a device: kernels are compiled for one that is not here, and not run.

What the interpreter cannot show is seen here: that the compiler takes a kernel, how much of a processor's memory it
asks for, and when it would be compiled again. For processes of their own, as it cannot be undone::

    python -m tests.kernels.triton.compile_only 90 bfloat16:128 float32:64 bfloat16:blocks
    python -m tests.kernels.triton.compile_only engine DIRECTORY SPECULATIVE WEIGHTS
    python -m tests.kernels.triton.compile_only memory DIRECTORY LENGTH SLOTS
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import random
import sys
import warnings

os.environ.pop("TRITON_INTERPRET", None)

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

MEMORY = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes that one program may have of a processor's own memory, by compute capability."""

compiled: dict[str, dict[str, object]] = {}
"""What has been compiled, by hash."""


class Device:
    """What the compiler asks a driver."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


def compile_for(capability: int) -> None:
    """From now on launches compile, and do nothing else."""
    run = JITFunction.run

    def compile_kernel(self, *arguments, grid, warmup, **options):
        kernel = run(self, *arguments, grid=grid, warmup=True, **options)
        about = {"name": self.__name__, "file": self.fn.__module__.rpartition(".")[2]}
        about |= {"shared": kernel.metadata.shared, "room": MEMORY[capability]}
        compiled[kernel.hash] = about | {name: value for name, value in options.items() if isinstance(value, int)}
        return kernel

    from snapstream.kernels import triton as kernels

    kernels.memory_of_processor = lambda device: MEMORY[capability]
    warnings.simplefilter("ignore")  # of defaults that will change
    driver.set_active(Device(capability))
    JITFunction.run = compile_kernel


def compile_kernels(dtype: torch.dtype, size: int, stored: torch.dtype) -> None:
    """Every kernel, as a model with heads of ``size`` numbers needs it; 576 is a latent, beside 128 query heads.

    Slots' caches have entries of the type ``stored``.
    """
    from snapstream.cache import EntryShape
    from snapstream.kernels.buffers import Slots
    from snapstream.kernels.plain import Activation
    from snapstream.kernels.triton import decode, prefill, rows, select, store, votes
    from snapstream.kernels.triton import keys as differences
    from snapstream.kernels.triton.places import RING, STRAIGHT, Places

    latent, B, L = size == 576, 4, 4096
    H, N, columns = (128, 1, 512) if latent else (32, 8, size)
    shape, one = EntryShape(N, size, latent=latent), torch.zeros(1, dtype=torch.int64)
    state, active = torch.zeros(B, dtype=torch.int64), torch.zeros(B, dtype=torch.bool)
    cache, staging = shape.empty(B, 1024, entry_type=stored), shape.empty(1, L, entry_type=dtype)
    for tokens in (1, 4):
        query, out = torch.zeros(B * tokens, H, size, dtype=dtype), torch.zeros(B * tokens, H, columns, dtype=dtype)
        token = torch.zeros(B, tokens, dtype=torch.int64)
        ring = [state[None]] * 3
        slots = Slots(token, state, *ring, active, state[:, None], state[None])
        pending = shape.empty(B, tokens, entry_type=stored) if tokens > 1 else None
        if pending is not None:
            store.commit(pending, cache, dataclasses.replace(slots, accepted=state))
        for splits in (1, 16):
            decode.attend_slots(query, out, cache, pending, slots, 0.1, splits=splits)
        decode.attend_slots(query, out, cache, pending, slots, 0.1, cap=5.0, sinks=torch.zeros(H), splits=16)
    keys, values = staging.keys[0], staging.values[0][..., :columns]
    for window in (0, 512):
        prefill.attend_chunk(torch.zeros(512, H, size, dtype=dtype), keys, values, one[0], 0.1, window)
    sinks, rows_of = torch.zeros(H), torch.zeros(512, H, size, dtype=dtype)
    prefill.attend_chunk(rows_of, keys, values, one[0], 0.1, 512, cap=5.0, sinks=sinks)
    votes.window_attention(torch.zeros(1, H, 32, size, dtype=dtype), staging.keys, one, one, one, 0.1, 4, True, 16, 32)
    windows = (torch.zeros(1, H, 32, size, dtype=dtype), staging.keys, one, one, one, 0.1, 4, True, 16, 32)
    votes.window_attention(*windows, cap=5.0, sinks=sinks)
    votes.pool_votes(torch.zeros(1, N, L), False, 7, 0)
    for near in (0, 32):
        differences.key_differences(staging.keys, one, 4, near)
    positions = select.select_entries(torch.zeros(1, N, L), one, one, one, 4, 100, 200)
    select.gather(keys, positions[0], shape.empty(1, 1024, entry_type=dtype).keys[0])
    wide = torch.zeros(B, 14336, dtype=dtype)
    rows.norm(wide[:, None, :4096], wide[:, None, :4096], wide[0, :4096], 1e-5)
    for activation in Activation:
        rows.gate(wide, wide[:, :7168], activation)
    angles = torch.zeros(B, size // 2, dtype=dtype)
    rows.rotate(wide.view(B, -1, 64), wide.view(B, -1, 64), angles, angles, pairs=True)
    rows.gate_by(wide[:, None, :4096], wide[:, None, 4096:8192], sigmoid=True)
    rows.gate_by(wide[:, None, :1], wide[:, None, 4096:8192], sigmoid=True)
    rows.gate_by(wide.view(B, -1, 128), wide.view(B, -1, 128), sigmoid=False)
    compile_states(dtype, stored, B)
    compile_codes(dtype, shape, H, columns)
    places = (Places(RING, 1, state, state, state, active), Places(STRAIGHT, B, one))
    for each, into in zip(places, (cache, staging), strict=True):
        if latent:
            store.store_latent(wide[:, :size], angles, angles, into, each, (wide[0, :512], 1e-5), pairs=True)
        else:
            qkv = torch.zeros(B, (H + 2 * N) * size, dtype=dtype)
            store.store_grouped(qkv, qkv, angles, angles, into, each, (wide[0, :size], wide[0, :size], 1e-5))


def compile_codes(dtype: torch.dtype, shape, heads: int, columns: int) -> None:
    """Entries of 8 and 4 bits: prompts, steps of one token and of several."""
    from snapstream.cache import CODES, QuantizedType
    from snapstream.kernels.buffers import Slots
    from snapstream.kernels.triton import codes, decode, store
    from snapstream.kernels.triton.places import RING, Places

    B, D = 4, shape.size
    state, active = torch.zeros(B, dtype=torch.int64), torch.zeros(B, dtype=torch.bool)
    for each, other in itertools.product(CODES.values(), repeat=2):
        cache = shape.empty(B, 1024, entry_type=QuantizedType(each, each if shape.latent else other, dtype))
        prompt, target = torch.zeros(1, 512, D, dtype=dtype), torch.zeros(1, 512, each.nbytes(D), dtype=torch.uint8)
        codes.encode(prompt, cache.frames[0, :1], cache.rotation, each.bits, target)
        places = Places(RING, 1, state, state, state, active)
        codes.store_tokens(shape.empty(B, 1, entry_type=dtype), cache, places)
        for tokens in (1, 4):
            query, out = (
                torch.zeros(B * tokens, heads, D, dtype=dtype),
                torch.zeros(B * tokens, heads, columns, dtype=dtype),
            )
            slots = Slots(
                torch.zeros(B, tokens, dtype=torch.int64),
                state,
                *[state[None]] * 3,
                active,
                state[:, None],
                state[None],
            )
            pending = cache.pending(tokens) if tokens > 1 else None
            if pending is not None:
                store.commit(pending, cache, dataclasses.replace(slots, accepted=state))
            for splits in (1, 16):
                decode.attend_slots(query, out, cache, pending, slots, 0.1, splits=splits)


def compile_states(dtype: torch.dtype, stored: torch.dtype, B: int) -> None:
    """Steps of layers with a state."""
    from snapstream.cache import StateShape
    from snapstream.kernels.buffers import BufferView, Slots, StepBuffers, allocate_buffers
    from snapstream.kernels.recurrence import Recur
    from snapstream.kernels.triton.recurrence import recur

    state, active = torch.zeros(B, dtype=torch.int64), torch.zeros(B, dtype=torch.bool)
    shape, taps = StateShape(heads=32, key_heads=16, key=128, value=128), torch.zeros(4, 8192, dtype=dtype)
    cache, numbers = shape.empty(B, 12, entry_type=stored), torch.zeros(32)
    o = Recur(
        BufferView("mixed", shape.size),
        BufferView("made", 128, 32),
        0,
        taps,
        numbers,
        numbers,
        3,
        16,
        128,
        in_turn=False,
    )
    for tokens in (1, 4):
        several = {"drafted": state, "accepted": state} if tokens > 1 else {}
        token = torch.zeros(B, tokens, dtype=torch.int64)
        slots = Slots(token, state, *[state[None]] * 3, active, state[:, None], state[None], **several)
        m = StepBuffers(allocate_buffers(o.parts(), B * tokens, dtype), slots, [cache], [cache], dtype)
        recur(o, m)
        if several:
            recur(dataclasses.replace(o, settles=True, in_turn=True), m)


def compile_products(dtype: torch.dtype) -> None:
    """Every kernel that reads weights in blocks, of few columns and of columns that are split."""
    from snapstream.kernels.formats import FORMATS
    from snapstream.kernels.triton import blocks
    from snapstream.kernels.weight import BlockWeight

    for kind in FORMATS.values():
        for rows, columns, tokens in ((256, 1536, 1), (256, 1536, 9), (40_000, 256, 100)):
            weight = BlockWeight(torch.zeros(kind.stored_shape((rows, columns)), dtype=torch.uint8), kind, rows)
            blocks.widen(weight, torch.zeros(rows, columns, dtype=dtype))
            blocks.widen(weight, torch.zeros(4, columns, dtype=dtype), torch.zeros(4, dtype=torch.int64))
            x, out = torch.zeros(tokens, columns, dtype=dtype), torch.zeros(tokens, rows, dtype=dtype)
            blocks.multiply(x, weight, out, out[0])
            blocks.multiply(x, weight, out.float(), add=True, like=x)
        experts = BlockWeight(torch.zeros(kind.stored_shape((4, 256, 256)), dtype=torch.uint8), kind, 256)
        for count in (9, 100):
            rows_of = torch.zeros(count, 256, dtype=dtype)
            blocks.multiply(rows_of, experts, rows_of, ends=torch.zeros(4, dtype=torch.int64))


def make_engine(directory: str, **settings):
    """An engine on these kernels, of which nothing is computed; like one on CUDA but for the capture."""
    from snapstream import LLM
    from snapstream.engine import engine
    from snapstream.engine.prefill import prefill
    from snapstream.engine.settings import set_up
    from snapstream.kernels import sampling
    from snapstream.kernels import triton as kernels

    kernels.missing = lambda device: None
    prefill.least_tokens = lambda device: 100
    sampling.shapes_may_vary = lambda device: False
    kernels.interpret()
    with torch.device("meta"):  # which remembers what makes tensors: before one of these functions is replaced
        torch.empty(0)
    empty = torch.empty

    def zeros(*size, **options):
        made = empty(*size, **options)
        return made if made.is_meta else made.zero_()

    torch.empty = zeros  # what no kernel has written is 0, not anything
    engine.set_up = lambda *given, **options: dataclasses.replace(set_up(*given, **options), eager=False)
    return LLM(directory, attention="triton", device="cpu", prefix_cache=0, **settings)


def run_engine(directory: str, speculative: str, weights: str) -> tuple[int, int]:
    """All kinds of requests.

    Returns:
        Kernels that were compiled when the engine was ready, and at the end.
    """
    from snapstream import CacheBudget, SamplingParams
    from tests.checkpoints import prompt

    settings = {"max_model_len": 200, "slots": 3, "prefill_chunk": 64, "decode_steps": 3, "sessions": 1}
    settings |= {"speculative": speculative, "weights": weights}
    llm = make_engine(directory, budget=CacheBudget(4, 16, 28, window=8), **settings)
    ready = len(compiled)
    rng = random.Random(0)
    lengths = [1, 2, 15, 16, 17, 28, 47, 48, 49, 64, 65, 128, 199, *(rng.randrange(1, 200) for _ in range(10))]
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True),
        SamplingParams(max_tokens=9, temperature=1.0, top_p=0.9, seed=1),
        SamplingParams(max_tokens=5, logprobs=3, stop="w5", prompt_logprobs=2),
        SamplingParams(max_tokens=60, repetition_penalty=1.2, kv_budget=36, ignore_eos=True),
        SamplingParams(max_tokens=8, kv_budget=CacheBudget(2, 20, 9, window=4, pooling="max"), return_kept_tokens=True),
        SamplingParams(max_tokens=8, kv_budget=CacheBudget(1, 15, 13, window=1, normalize="candidates")),
    ]
    llm.generate([prompt(n, seed=n) for n in lengths], [params[i % len(params)] for i in range(len(lengths))])
    saved = None
    for length in (60, 3, 33):
        name = llm.engine.add_request(prompt(length), params[0], past=saved, keep=True)
        outputs = iter(lambda: llm.engine.step()[-1], None)
        saved = next(output for output in outputs if output.finished and output.request_id == name).saved
    return ready, len(compiled)


def measure_memory(directory: str, length: str, slots: str) -> dict[str, int]:
    """What torch allocates on the way, beside the plan."""
    from snapstream import SamplingParams
    from tests.checkpoints import prompt
    from tests.memory import measure

    settings = {"budget": 256, "max_model_len": int(length), "slots": int(slots), "dtype": "bfloat16"}
    llm, _, kept = measure(lambda: make_engine(directory, **settings))
    plan = llm.engine.plan
    # What no kernel has written may be anything, the end of the text too.
    greedy = SamplingParams(max_tokens=2, ignore_eos=True)
    params = [greedy, dataclasses.replace(greedy, temperature=1.0, seed=1)]
    reading, sampling = (
        measure(lambda one=one: llm.generate(prompt(plan.max_model_len - 9), one))[1] for one in params
    )
    return dataclasses.asdict(plan) | {"kept": kept, "reading": reading, "sampling": sampling}


if __name__ == "__main__":
    what, *rest = sys.argv[1:]
    if what in ("engine", "memory"):
        compile_for(90)
        result: object = run_engine(*rest) if what == "engine" else measure_memory(*rest)
    else:
        compile_for(int(what))
        for each in rest:
            kind, numbers, *stored = each.split(":")
            before = set(compiled)
            if numbers == "blocks":
                compile_products(getattr(torch, kind))
            else:
                compile_kernels(getattr(torch, kind), int(numbers), getattr(torch, *stored or [kind]))
            for key in set(compiled) - before:
                compiled[key]["case"] = each
        result = list(compiled.values())
    print(json.dumps(result))
