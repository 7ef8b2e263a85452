"""A step by Triton's kernels against the same operations in plain torch: one by one, and in whole."""

import copy

import pytest
import torch

from snapstream.attention import TritonAttention
from snapstream.attention.operation import with_backend
from snapstream.cache import EntryShape
from snapstream.kernels.buffers import Slots, StepBuffers
from snapstream.kernels.operations import PlainProgram
from snapstream.kernels.taking import Commit, Draw
from snapstream.models import logits_of
from snapstream.models.weights import load_model, load_spec
from tests.attending import read_in_chunks
from tests.checkpoints import LATENT, save_checkpoint
from tests.kernels.test_program import DRAFTED, EXACT, MIXED, agree, work
from tests.kernels.triton.devices import DEVICE, column, random

pytest.importorskip("triton")
from snapstream.kernels.triton.program import TritonProgram


# Those that differ in what a step is made of; the interpreter is slow.
@pytest.fixture(
    scope="module",
    params=[
        "llama-biases",
        "qwen3-windows",
        "deepseek-v3",
        "deepseek-v2-lite",
        "glm4",
        "gemma2",
        "gemma3",
        "gemma4-moe",
        "gemma4-shared",
        "gpt-oss",
        "granite",
        "qwen3-next",
        "qwen3.5",
    ],
)
def checkpoint(request, tmp_path_factory):
    path = tmp_path_factory.mktemp(request.param)
    save_checkpoint(path, request.param, **({} if request.param in LATENT else {"head_dim": 32}))
    return path


def without_take(operations):
    return [each for each in operations if not isinstance(each, Draw)]


def on_device(m):
    """Step buffers with everything on the device; operations of models are there already."""
    for name, buffer in m.buffers.items():
        m.buffers[name] = buffer.to(DEVICE)
    state = vars(m.slots).items()
    m.slots = type(m.slots)(**{name: None if each is None else each.to(DEVICE) for name, each in state})
    for cache in (*m.caches, *m.pending):
        cache.tensors = tuple(tensor.to(DEVICE) for tensor in cache.tensors)
    return m


def load(checkpoint, dtype):
    return load_model(checkpoint, load_spec(checkpoint), dtype, DEVICE)


def runs_here(checkpoint, dtype):
    """On CUDA torch multiplies experts in bfloat16 only."""
    return DEVICE.type == "cpu" or dtype == torch.bfloat16 or load_spec(checkpoint).experts is None


@pytest.mark.parametrize(("tokens", "drafted"), [(1, None), (3, DRAFTED)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_every_operation_equals_plain_torch(checkpoint, dtype, tokens, drafted):
    """One after the other, each from what plain torch has made of those before."""
    if not runs_here(checkpoint, dtype):
        pytest.skip("no such model on CUDA")
    operations, plain = work(load(checkpoint, dtype), tokens=tokens, drafted=drafted)
    operations, plain = without_take(operations), on_device(plain)
    for operation in operations:
        mine = copy.deepcopy(plain)
        TritonProgram([operation], mine, splits=2).run()
        PlainProgram([operation], plain).run()
        agree(mine, plain, EXACT[dtype])


@pytest.mark.parametrize("types", MIXED, ids=lambda types: "-".join(f"{each}"[6:] for each in types))
@pytest.mark.parametrize(
    ("family", "tokens", "drafted"),
    [
        ("qwen3-windows", 1, None),
        ("deepseek-v3", 3, DRAFTED),
        ("qwen3.5", 1, None),
        pytest.param("qwen3-windows", 3, DRAFTED, marks=pytest.mark.slow),
        pytest.param("deepseek-v3", 1, None, marks=pytest.mark.slow),
        pytest.param("qwen3.5", 3, DRAFTED, marks=pytest.mark.slow),
    ],
)
@torch.inference_mode()
def test_every_tensor_has_a_type_of_its_own(family, types, tokens, drafted, tmp_path):
    """Operation by operation; then what is fused: a whole step beside activations in float64."""
    if DEVICE.type == "cuda" and family == "deepseek-v3":
        pytest.skip("torch multiplies experts in bfloat16 only")
    save_checkpoint(tmp_path, family, **({} if family in LATENT else {"head_dim": 32}))
    weights, activations, stored = types
    kinds = {"tokens": tokens, "drafted": drafted, "dtype": activations, "stored": stored}
    model, wide_model = load(tmp_path, weights), load(tmp_path, weights).double()
    for mine, theirs in zip(wide_model.rotations, model.rotations, strict=True):
        mine.frequencies = theirs.frequencies.double()
    operations, plain = work(model, **kinds)
    operations, plain = without_take(operations), on_device(plain)
    for operation in operations:
        mine = copy.deepcopy(plain)
        TritonProgram([operation], mine, splits=2).run()
        PlainProgram([operation], plain).run()
        agree(mine, plain, max(EXACT[activations], EXACT[stored]))
    mine = on_device(work(model, **kinds)[1])
    wide_operations, wide = work(wide_model, **kinds | {"dtype": torch.float64})
    TritonProgram(operations, mine, splits=2).run()
    PlainProgram(without_take(wide_operations), on_device(wide)).run()
    rows = wide.slots.used().flatten()
    got, want = (each.buffers["logits"][rows].double() for each in (mine, wide))
    off = float((got - want).norm() / want.norm())
    # A GPU rounds the weights of entries to their type.
    assert off < (6e-2 if activations == torch.bfloat16 else 1e-4 if stored == torch.float32 else 6e-3), off


@pytest.mark.parametrize("tokens", [1, 3])
@torch.inference_mode()
def test_a_step_equals_float64(checkpoint, tokens):
    """All of it at once, with what is fused, beside the same operations in float64."""
    dtype = torch.float32
    if not runs_here(checkpoint, dtype):
        pytest.skip("no such model on CUDA")
    operations, mine = work(load(checkpoint, dtype), tokens=tokens)
    wide_operations, wide = work(load(checkpoint, torch.float64), tokens=tokens, dtype=torch.float64)
    for ours, theirs in zip((*mine.caches, *mine.pending), (*wide.caches, *wide.pending), strict=True):
        for a, b in zip(ours.tensors, theirs.tensors, strict=True):
            b.copy_(a)
    mine, wide = on_device(mine), on_device(wide)
    program = TritonProgram(without_take(operations), mine, splits=4)
    # Where all of a head is rotated, this is fused with the write to the cache.
    assert load_spec(checkpoint).rotated or len(program._calls) < len(without_take(operations))
    program.run()
    PlainProgram(without_take(wide_operations), wide).run()
    rows = wide.slots.active.repeat_interleave(tokens)
    torch.testing.assert_close(
        mine.buffers["logits"][rows].double(), wide.buffers["logits"][rows], rtol=1e-3, atol=1e-3
    )
    for ours, theirs in zip((*mine.caches, *mine.pending), (*wide.caches, *wide.pending), strict=True):
        for a, b in zip(ours.tensors, theirs.tensors, strict=True):
            torch.testing.assert_close(a.double(), b, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
def test_chunks_of_a_prompt_equal_float64(checkpoint):
    if not runs_here(checkpoint, torch.float32):
        pytest.skip("no such model on CUDA")
    tokens = torch.arange(5, 45, device=DEVICE)

    def program(operations, work):
        return TritonProgram(with_backend(operations, TritonAttention(DEVICE)), work)

    got = read_in_chunks(load(checkpoint, torch.float32), tokens, (19, 20, 40), program)
    want = logits_of(load(checkpoint, torch.float64), tokens)
    torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3"])
@torch.inference_mode()
def test_several_tokens_equal_one_after_the_other(tmp_path, family):
    """And the caches are not written before the tokens are certain."""
    save_checkpoint(tmp_path, family)
    if not runs_here(tmp_path, torch.float32):
        pytest.skip("no such model on CUDA")
    model, T = load(tmp_path, torch.float32), 4
    operations, many = work(model, tokens=T, seed=3)
    _, single = work(model, seed=3)
    for ours, theirs in zip(many.caches, single.caches, strict=True):
        for a, b in zip(ours.tensors, theirs.tensors, strict=True):
            b.copy_(a)
    many, single, before = on_device(many), on_device(single), copy.deepcopy(many.caches)
    TritonProgram(operations, many, splits=2).run()
    for ours, theirs in zip(many.caches, before, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours.tensors, theirs.tensors, strict=True))
    one_by_one, rows = TritonProgram(operations, single, splits=1), many.slots.active
    for t in range(T):
        single.slots.token[:, 0] = many.slots.token[:, t]
        one_by_one.run()
        single.slots.count.add_(rows.long())
        single.slots.position.add_(rows.long())
        got, want = many.buffers["logits"].view(len(rows), T, -1)[rows, t], single.buffers["logits"][rows]
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("latent", [False, True])
@pytest.mark.parametrize("ring", [1, 3, 40])
def test_accepted_tokens_are_stored(latent, ring):
    """In rings that are shorter than the step, too: of tokens that take the same entry, the last one is stored."""
    B, T, C = 6, 5, 60
    shape = EntryShape(1 if latent else 2, 48, latent=latent)
    base = [20, 20, 20, 0, 20, 20]
    count = [3, 20 + ring - 1, 500, 7, 19, 33]
    mine, plain, pending = (shape.empty(B, entries, entry_type=torch.float32, device=DEVICE) for entries in (C, C, T))
    for number, (a, b, new) in enumerate(zip(mine.tensors, plain.tensors, pending.tensors, strict=True)):
        a.copy_(random(*a.shape, seed=number, dtype=torch.float32))
        b.copy_(a)
        new.copy_(random(*new.shape, seed=number + 9, dtype=torch.float32))
    slots = Slots(
        token=torch.zeros(B, T, dtype=torch.int64, device=DEVICE),
        position=column(count),
        base=column(base)[None],
        count=column(count)[None],
        limit=column([each + ring for each in base])[None],
        active=column([True, True, True, True, True, False]),
        forced=column([-1] * B)[:, None],
        taken=torch.zeros(T, B, dtype=torch.int64, device=DEVICE),
        drafted=column([T - 1] * B),
        accepted=column([5, 4, 5, 1, 3, 5]),
    )
    TritonProgram([Commit()], StepBuffers({}, slots, [mine], [pending], mine.entry_type)).run()
    PlainProgram([Commit()], StepBuffers({}, slots, [plain], [pending], plain.entry_type)).run()
    for a, b in zip(mine.tensors, plain.tensors, strict=True):
        assert torch.equal(a, b)
