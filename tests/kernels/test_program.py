"""The loop over a decode step against the same operations in plain torch: one by one, and in whole."""

import copy
import itertools
import os
import signal
import threading
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from snapstream.cache import StateCache
from snapstream.config import CacheBudget
from snapstream.kernels import cpu as kernels
from snapstream.kernels import operations as ops
from snapstream.kernels.buffers import BufferView, Slots, StepBuffers, allocate_buffers
from snapstream.kernels.cpu.program import CpuProgram, unsupported
from snapstream.kernels.operations import PlainProgram
from snapstream.kernels.recurrence import Recur
from snapstream.kernels.sampling import SamplingState
from snapstream.kernels.taking import Advance, Commit, Draw, Verify
from snapstream.kernels.weight import DenseWeight
from snapstream.models.weights import load_model, load_spec
from tests.checkpoints import FAMILIES, LATENT, save_checkpoint
from tests.products import multiply, multiply_experts

pytestmark = pytest.mark.skipif(not kernels.library.available(), reason="no kernels, and no C++ compiler")
EXACT = {torch.float32: 4e-6, torch.bfloat16: 4e-3}
"""Both sides add in an order of their own: over 1,100 entries each is up to 7e-6 of their size off, on one processor
or another."""
CPU = torch.device("cpu")
BUDGET = CacheBudget(sink=4, recent=600, top_k=500, window=8)
DRAFTED = (2, 0, 1, 1)
"""Guesses that slots have, where not all have as many as there is room for."""
INSTRUCTIONS = range(len(kernels.INSTRUCTIONS)) if kernels.available() else ()


MANY_HEADS = {
    "qwen3 of 10 heads a group": {"num_attention_heads": 20, "num_key_value_heads": 2, "head_dim": 64},
    "deepseek-v3 of 36 heads": {"num_attention_heads": 36, "num_key_value_heads": 36},
    "gemma2 of 16 heads": {"num_attention_heads": 16, "num_key_value_heads": 1},  # has a soft cap
}
"""Where there are tile registers, attention of so many heads to one KV head is computed in them."""


@pytest.fixture(scope="module", params=[*FAMILIES, *MANY_HEADS])
def checkpoint(request, tmp_path_factory):
    family, path = request.param.split()[0], tmp_path_factory.mktemp(request.param.replace(" ", "-"))
    size = {} if family in LATENT else {"head_dim": 32}
    save_checkpoint(path, family, **(size | MANY_HEADS.get(request.param, {})))
    return path


def load(checkpoint, dtype):
    return load_model(checkpoint, load_spec(checkpoint), dtype, CPU)


def work(model, slots=4, tokens=1, steps=5, seed=0, dtype=None, drafted=None, stored=None, room=1):
    """Slots in the middle of sequences of different lengths, one of them free; caches are random.

    ``dtype`` is that of activations, by default the weights', and ``stored`` that of caches, by default the same.
    Where it is said how many guesses slots have, what comes of them is verified. There may be ``room`` for more tokens.
    """
    spec, generator = model.spec.that_takes_back(8), torch.Generator().manual_seed(seed)
    dtype = dtype or model.dtype
    stored = stored or dtype
    groups = [spec.group_of(layer) for layer in range(spec.cached_layers)]
    layouts = [[group.lay_out(length, BUDGET) for length in (3, 600, 5000, 1104)] for group in spec.groups]

    def column(values):
        return torch.tensor([*values] * 2)[:slots].clone()

    def ring(field):
        return torch.stack([column(getattr(layout, field) for layout in each) for each in layouts])

    def caches(entries=None):
        kinds = [spec.groups[group] for group in groups]
        made = [
            each.entry.empty(slots, each.entries(BUDGET.capacity) if entries is None else entries, entry_type=stored)
            for each in kinds
        ]
        for cache in made:
            for tensor in cache.tensors:
                tensor.copy_(torch.randn(tensor.shape, generator=generator))
        return made

    state = Slots(
        token=F.pad(torch.randint(0, 96, (slots, tokens), generator=generator), (0, max(0, room - tokens)))[:, :tokens],
        position=column((3, 600, 5000, 1104)),
        base=ring("base"),
        count=ring("count"),
        limit=ring("limit"),
        active=column((True, True, False, True)),
        forced=torch.full((slots, steps), -1),
        taken=torch.zeros((steps, slots), dtype=torch.int64),
        drafted=None if drafted is None else column(drafted),
        accepted=None if drafted is None else torch.zeros(slots, dtype=torch.int64),
    )
    operations, logits = [*model.operations()], BufferView("logits", spec.vocab_size, dtype=torch.float32)
    wanted = SamplingState(slots, spec.vocab_size, 1, CPU, places=tokens)
    wanted.masked[0] = True  # by grammars that differ from token to token
    wanted.allowed.random_(-(2**31), 2**31 - 1, generator=torch.Generator().manual_seed(tokens))
    if drafted is not None:
        settling = [replace(each, settles=True) for each in operations if isinstance(each, Recur)]
        operations += [Verify(logits, wanted), *settling, Commit(), Advance()]
    elif tokens == 1:
        operations.append(Draw(logits, wanted))
    buffers = allocate_buffers((part for each in operations for part in each.parts()), slots * tokens, dtype)
    pending, held = caches(tokens) if tokens > 1 else [], caches()
    pending = [own if isinstance(own, StateCache) else each for each, own in zip(pending, held, strict=False)]
    return operations, StepBuffers(buffers, state, held, pending, dtype, groups)


def settled(m):
    """Of states, without inputs of tokens that are not certain; of other caches, all there is."""
    for cache in m.caches:
        if not isinstance(cache, StateCache):
            yield from cache.tensors
            continue
        places = (m.slots.position[:, None] - torch.arange(1, 3)) % cache.entries
        yield cache.matrices
        yield cache.inputs[torch.arange(cache.rows)[:, None], places]


def agree(got, want, tolerance):
    """Buffers of the rows there are, caches and state; relative to the size of what is in them."""
    there = want.slots.used()
    rows = there.flatten()
    for name, buffer in want.buffers.items():
        mine = got.buffers[name]
        if name == "ends":
            assert torch.equal(mine[0], buffer[0])
            continue
        copies = len(buffer) // len(rows)
        used = torch.arange(len(buffer), device=buffer.device) < copies * rows.sum() if copies > 1 else rows
        scale = buffer[used].double().square().mean().sqrt().clamp(min=1e-6)
        torch.testing.assert_close(
            mine[used].double() / scale, buffer[used].double() / scale, rtol=4 * tolerance, atol=4 * tolerance, msg=name
        )
    for mine, theirs in zip((*got.caches, *got.pending), (*want.caches, *want.pending), strict=True):
        for pair in zip(mine.tensors, theirs.tensors, strict=True):
            is_pending = theirs in want.pending and not isinstance(theirs, StateCache)
            a, b = (each.transpose(1, 2)[there] for each in pair) if is_pending else pair
            if torch.equal(a, b):  # most operations leave them as they are, and to compare them closely takes long
                continue
            torch.testing.assert_close(a.double(), b.double(), rtol=tolerance, atol=tolerance)
    for a, b in zip(vars(got.slots).values(), vars(want.slots).values(), strict=True):
        assert a is b is None or torch.equal(a, b)


def check_each_operation(model, **kinds):
    """One after the other, each from what plain torch has made of those before."""
    for instructions in INSTRUCTIONS:
        operations, plain = work(model, **kinds)
        mine = copy.deepcopy(plain)
        loop, twin = CpuProgram(operations, mine, instructions=instructions), PlainProgram(operations, plain)
        tolerance = max(EXACT[each] for each in (plain.dtype, plain.caches[0].entry_type))
        for index in range(len(operations)):
            loop.run(1, index, index + 1)
            twin.run(1, index, index + 1)
            agree(mine, plain, tolerance)
            for name, buffer in plain.buffers.items():
                mine.buffers[name].copy_(buffer)
            for ours, theirs in zip((*mine.caches, *mine.pending), (*plain.caches, *plain.pending), strict=True):
                for a, b in zip(ours.tensors, theirs.tensors, strict=True):
                    a.copy_(b)


@pytest.mark.parametrize(("tokens", "drafted"), [(1, None), (3, DRAFTED)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_every_operation_equals_plain_torch(checkpoint, dtype, tokens, drafted):
    check_each_operation(load(checkpoint, dtype), tokens=tokens, drafted=drafted)


MIXED = [each for each in itertools.product((torch.float32, torch.bfloat16), repeat=3) if len(set(each)) > 1]
"""Types of weights, of activations and of caches."""


@pytest.mark.parametrize("types", MIXED, ids=lambda types: "-".join(f"{each}"[6:] for each in types))
@pytest.mark.parametrize("family", ["qwen3", "deepseek-v3", "qwen3.5"])
@torch.inference_mode()
def test_every_tensor_has_a_type_of_its_own(family, types, tmp_path):
    """Operation by operation, and a whole step beside activations in float64."""
    save_checkpoint(tmp_path, family, **({} if family in LATENT else {"head_dim": 32}))
    weights, activations, stored = types
    model, wide_model = load(tmp_path, weights), load(tmp_path, weights).double()
    wide_model.rotation_of(0).frequencies = model.rotation_of(0).frequencies.double()
    kinds = {"tokens": 3, "drafted": DRAFTED, "stored": stored}
    check_each_operation(model, **kinds, dtype=activations)
    operations, mine = work(model, **kinds, dtype=activations)
    _, plain = work(model, **kinds, dtype=activations)
    wide_operations, wide = work(wide_model, **kinds, dtype=torch.float64)
    CpuProgram(operations, mine).run()
    PlainProgram(operations, plain).run()
    PlainProgram(wide_operations, wide).run()
    rows = wide.slots.used().flatten()
    want = wide.buffers["logits"][rows]
    for got in (mine, plain):
        error = (got.buffers["logits"][rows].double() - want).norm() / want.norm()
        assert error < (6e-2 if activations == torch.bfloat16 else 1e-4)


@torch.inference_mode()
def test_a_step_equals_float64(checkpoint):
    """All of it at once, beside the same operations in float64."""
    operations, mine = work(load(checkpoint, torch.float32))
    wide_operations, wide = work(load(checkpoint, torch.float64), dtype=torch.float64)
    for ours, theirs in zip(mine.caches, wide.caches, strict=True):
        for a, b in zip(ours.tensors, theirs.tensors, strict=True):
            b.copy_(a)
    CpuProgram(operations, mine).run(4)
    PlainProgram(wide_operations, wide).run(4)
    assert torch.equal(mine.slots.taken[:, wide.slots.active], wide.slots.taken[:, wide.slots.active])
    rows = wide.slots.active
    torch.testing.assert_close(
        mine.buffers["logits"][rows].double(), wide.buffers["logits"][rows], rtol=1e-3, atol=1e-3
    )


def state_of(m):
    tensors = [m.buffers["logits"], *vars(m.slots).values(), *(t for c in m.caches for t in c.tensors)]
    return [tensor.clone() for tensor in tensors if tensor is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_threads_and_steps_change_no_bit(checkpoint, dtype):
    model = load(checkpoint, dtype)
    results = []
    before = torch.get_num_threads()
    try:
        for threads, launches in ((1, (5,)), (2, (5,)), (5, (2, 3)), (2, (1, 1, 1, 1, 1)), (3, (4, 1))):
            torch.set_num_threads(threads)
            operations, m = work(model)
            loop, taken = CpuProgram(operations, m), []
            for steps in launches:
                loop.run(steps)
                taken.append(m.slots.taken[:steps].clone())
            m.slots.taken.copy_(torch.cat(taken))
            results.append(state_of(m))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_a_slot_depends_on_itself_alone(checkpoint, dtype):
    """To the bit: with eight neighbours, with others, and alone."""
    model = load(checkpoint, dtype)
    operations, m = work(model, slots=8)
    start = copy.deepcopy(m)
    CpuProgram(operations, m).run(5)
    alone = copy.deepcopy(start)
    for slot in range(8):
        if start.slots.active[slot]:
            alone.slots.active.zero_()[slot] = True
            CpuProgram(operations, alone).run(5)
    alone.slots.active.copy_(m.slots.active)
    assert all(torch.equal(a, b) for a, b in zip(state_of(m), state_of(alone), strict=True))
    free = ~m.slots.active
    for got, was in zip((m.slots, *m.caches), (start.slots, *start.caches), strict=True):
        tensors = zip(*((vars(x).values() if isinstance(x, Slots) else x.tensors) for x in (got, was)), strict=True)
        assert all(torch.equal(a[free], b[free]) for a, b in tensors if a is not None and len(a) == len(free))
    for name in ("base", "count", "limit"):
        assert torch.equal(getattr(m.slots, name)[:, free], getattr(start.slots, name)[:, free])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_several_tokens_equal_one_after_the_other(checkpoint, dtype):
    """To the bit, and the caches are not written before the tokens are certain."""
    model, T = load(checkpoint, dtype), 4
    operations, many = work(model, tokens=T, seed=3)
    single_operations, single = work(model, seed=3, room=T)
    for ours, theirs in zip(many.caches, single.caches, strict=True):
        for a, b in zip(ours.tensors, theirs.tensors, strict=True):
            b.copy_(a)
    before = [each.clone() for each in settled(many)]
    CpuProgram(operations, many).run(1)
    assert all(torch.equal(a, b) for a, b in zip(settled(many), before, strict=True))
    loop, rows = CpuProgram(single_operations, single), many.slots.active
    for t in range(T):
        single.slots.token[:, 0] = many.slots.token[:, t]
        loop.run(1)
        assert torch.equal(many.buffers["logits"].view(len(rows), T, -1)[rows, t], single.buffers["logits"][rows])


@torch.inference_mode()
def test_entries_that_no_token_sees_may_hold_anything(checkpoint):
    model = load(checkpoint, torch.bfloat16)
    operations, clean = work(model, tokens=3, seed=1)
    for instructions in INSTRUCTIONS:
        one, other = copy.deepcopy(clean), copy.deepcopy(clean)
        for cache, group in zip(other.caches, other.groups, strict=True):
            for tensor in () if isinstance(cache, StateCache) else cache.tensors:
                for slot, count in enumerate(other.slots.count[group].tolist()):
                    tensor[slot, :, count:] = float("nan")
        for m in (one, other):
            CpuProgram(operations, m, instructions=instructions).run(1)
        used = one.slots.used().flatten()
        assert bool(one.buffers["logits"][used].isfinite().all())
        assert torch.equal(one.buffers["logits"][used], other.buffers["logits"][used])


def look_ahead(operations, single, steps):
    """The tokens that come next in each slot, ``[steps, B]``; nothing is changed."""
    ahead = copy.deepcopy(single)
    CpuProgram(operations, ahead).run(steps)
    return ahead.slots.taken[:steps]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_verified_tokens_equal_one_after_the_other(checkpoint, dtype):
    """To the bit, in every round, however many of the guesses are right; in rings that turn in a step, too."""
    model, T = load(checkpoint, dtype), 4
    operations, many = work(model, tokens=T, seed=5, drafted=(0, 0, 0, 0))
    single_operations, single = work(model, seed=5, room=T)
    single.caches = copy.deepcopy(many.caches)
    for slots in (many.slots, single.slots):
        slots.limit[0, 2] = slots.base[0, 2] + 2  # shorter than what a step may take
        slots.active[2], slots.active[0] = True, False
        slots.forced[1, :3] = torch.tensor([7, 9, 11])
    many.slots.token[:, 0] = single.slots.token[:, 0]
    verify, loop = CpuProgram(operations, many), CpuProgram(single_operations, single)
    generator, counts = torch.Generator().manual_seed(0), []
    for _ in range(12):
        coming = look_ahead(single_operations, single, T - 1).T
        wrong = torch.rand(coming.shape, generator=generator) < 0.3
        many.slots.token[:, 1:] = torch.where(wrong, (coming + 1) % 96, coming)
        many.slots.drafted.copy_(torch.randint(0, T, (4,), generator=generator))
        verify.run()
        accepted, active = many.slots.accepted, single.slots.active.clone()
        there = torch.arange(T - 1) < many.slots.drafted[:, None]
        right = (~wrong & there).long().cumprod(1).sum(1) + 1
        assert torch.equal(accepted[active], right[active])
        for t in range(T):
            single.slots.active.copy_(active & (t < accepted))
            loop.run()
            now = single.slots.active
            assert torch.equal(many.slots.taken[t, now], single.slots.taken[0, now])
        single.slots.active.copy_(active)
        counts += accepted[active].tolist()
        for name in ("position", "count", "forced"):
            assert torch.equal(getattr(many.slots, name), getattr(single.slots, name)), name
        assert torch.equal(many.slots.token[active, 0], single.slots.token[active, 0])
        assert all(torch.equal(a, b) for a, b in zip(settled(many), settled(single), strict=True))
    assert set(counts) == {1, 2, 3, 4}


@torch.inference_mode()
def test_forced_tokens_and_ties(checkpoint):
    model = load(checkpoint, torch.float32)
    operations, m = work(model)
    m.slots.forced[0, :2] = torch.tensor([7, 9])
    m.slots.forced[1, :5] = torch.arange(20, 25)
    CpuProgram(operations, m).run(3)
    assert m.slots.taken[:2, 0].tolist() == [7, 9]
    assert m.slots.taken[:3, 1].tolist() == [20, 21, 22]
    assert m.slots.forced[1].tolist() == [23, 24, -1, -1, -1]
    assert m.slots.forced[0].tolist() == [-1] * 5
    take = operations[-1]
    take.state.masked.fill_(False)
    m.buffers["logits"][:] = -1.0
    m.buffers["logits"][:, [40, 77, 95]] = 3.5
    m.slots.forced.fill_(-1)
    CpuProgram([take], m).run(1)
    assert m.slots.taken[0, m.slots.active].tolist() == [40, 40, 40]
    m.buffers["logits"].fill_(float("nan"))
    CpuProgram([take], m).run(1)  # a broken model gives a token, not a crash
    assert m.slots.taken[0, m.slots.active].tolist() == [0, 0, 0]


def test_threads_of_a_program_may_call_at_once(tmp_path):
    """The team of threads is one for all; who finds it at work does without."""
    save_checkpoint(tmp_path, "qwen3")
    model, results = load(tmp_path, torch.float32), {}

    def decode(name):
        with torch.inference_mode():
            for _ in range(20):
                operations, m = work(model)
                CpuProgram(operations, m).run(5)
                results.setdefault(name, []).append(state_of(m))

    threads = [threading.Thread(target=decode, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first, *others = [state for name in range(4) for state in results[name]]
    assert len(others) == 79
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


@torch.inference_mode()
def test_a_launch_without_active_slots_does_nothing(checkpoint):
    operations, m = work(load(checkpoint, torch.float32))
    m.slots.active.zero_()
    before = state_of(m)
    CpuProgram(operations, m).run(3)
    assert all(torch.equal(a, b) for a, b in zip(before, state_of(m), strict=True))


def test_what_the_loop_cannot_run():
    product = ops.Product(BufferView("x", 40), BufferView("y", 64), DenseWeight(torch.zeros(64, 40)))
    assert "multiples of 32" in unsupported([product], torch.float32)
    assert "float16" in unsupported([], torch.float16)
    buffers = {"x": torch.zeros(1, 40), "y": torch.zeros(1, 64)}
    zero = torch.zeros(1, dtype=torch.int64)
    slots = Slots(zero[None], zero, *[zero[None]] * 3, zero > 0, zero[None], zero[None])
    with pytest.raises(ValueError, match="multiples of 32"):
        CpuProgram([product], StepBuffers(buffers, slots, [], [], torch.float32))


def test_weights_are_checked():
    buffers = {"x": torch.zeros(1, 64), "y": torch.zeros(1, 64)}
    zero = torch.zeros(1, dtype=torch.int64)
    slots = Slots(zero[None], zero, *[zero[None]] * 3, zero > 0, zero[None], zero[None])
    x, y = BufferView("x", 64), BufferView("y", 64)
    weight, gaps = DenseWeight(torch.zeros(64, 64)), torch.zeros(64, 128)[:, :64]
    for product, said in (
        (ops.Product(x, y, DenseWeight(torch.zeros(64, 64).half())), "the dtype is torch.float16"),
        (ops.Product(x, y, DenseWeight(gaps)), "weight of Product is not contiguous"),
        (ops.Product(x, y, weight, torch.zeros(128)[::2]), "bias of Product is not contiguous"),
        (ops.Norm(x, y, torch.zeros(64, dtype=torch.float64), 1e-5), "the dtype is torch.float64"),
        (ops.Angles(torch.zeros(32).bfloat16(), 1.0, y), "frequencies of Angles must be torch.float32"),
        (
            ops.Norm(x, BufferView("y", 64, dtype=torch.bfloat16), torch.zeros(64), 1e-5),
            "target of Norm is torch.bfloat16",
        ),
        (AnotherOperation(), "does not support AnotherOperation"),
    ):
        with pytest.raises(ValueError, match=said):
            CpuProgram([product], StepBuffers(buffers, slots, [], [], torch.float32))
    with pytest.raises(ValueError, match="is not contiguous"):
        multiply_experts(torch.zeros(2, 64), DenseWeight(gaps[None]), torch.tensor([2]), many=False)


class AnotherOperation(ops.Operation):
    """One that the loop has never heard of."""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are not listed here")
def test_a_fork_has_a_team_of_its_own(monkeypatch):
    """Threads are not copied: what was left to them would never be done, or by one thread alone."""
    x, weight = torch.randn(2, 256), DenseWeight(torch.randn(4096, 256))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    want = multiply(x, weight)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(30)  # rather than wait for ever
        try:
            for _ in range(20):
                assert torch.equal(multiply(x, weight), want)
            os.write(writing, b"same, by %d threads" % len(os.listdir("/proc/self/task")))
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        assert answer.read() == "same, by 4 threads"
    assert os.waitpid(child, 0)[1] == 0
    assert torch.equal(multiply(x, weight), want)
