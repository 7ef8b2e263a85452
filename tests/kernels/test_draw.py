"""Tokens that the native loop draws, against those that torch draws."""

import copy
import random

import pytest
import torch

from snapstream.config import SamplingParams
from snapstream.kernels import cpu as kernels
from snapstream.kernels.buffers import BufferView, Slots, StepBuffers
from snapstream.kernels.cpu.program import CpuProgram
from snapstream.kernels.operations import PlainProgram
from snapstream.kernels.sampling import SamplingState
from snapstream.kernels.taking import Draw

pytestmark = pytest.mark.skipif(not kernels.library.available(), reason="no kernels, and no C++ compiler")
CPU = torch.device("cpu")
STEPS = 3


def params_of(choose):
    """What one request wants; half of the settings are off."""

    def maybe(value, off):
        return value if choose.random() < 0.5 else off

    return SamplingParams(
        temperature=choose.choice((0.0, 0.3, 1.0, 1.0, 2.5)),
        top_k=maybe(choose.choice((1, 5, 40, 600)), 0),
        top_p=maybe(choose.choice((0.1, 0.9, 0.999)), 1.0),
        min_p=maybe(choose.choice((1e-6, 0.05, 0.5)), 0.0),
        presence_penalty=maybe(0.7, 0.0),
        frequency_penalty=maybe(-0.4, 0.0),
        repetition_penalty=maybe(1.3, 1.0),
        logit_bias=maybe({3: 4.0, 7: -50.0}, {}),
        min_tokens=maybe(STEPS - 1, 0),
        max_tokens=STEPS + 5,
    )


def drawing(vocab, slots, seed, spread, coarse):
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    state = SamplingState(slots, vocab, 1, CPU)
    for slot in range(slots):
        prompt = torch.randint(0, vocab, (30,), generator=generator)
        state.assign(slot, params_of(choose), choose.getrandbits(60), prompt, ends=(2, 5))
    # Grammars: in half of the slots, with from one to nearly all tokens.
    state.masked.copy_(torch.rand(slots, generator=generator) < 0.5)
    shares = torch.tensor([0.0, 0.02, 0.5, 0.98])[torch.randint(0, 4, (slots, 1), generator=generator)]
    allowed = torch.rand(slots, state.allowed.shape[2] * 32, generator=generator) < shares
    allowed[:, 1] = True  # never only tokens that end the output, which min_tokens may forbid
    words = (allowed.view(slots, -1, 8) * 2 ** torch.arange(8)).sum(-1).to(torch.uint8)
    state.allowed[0].copy_(words.view(torch.int32))
    logits = torch.randn(slots, vocab, generator=generator) * spread
    if coarse:  # many are equal
        logits = logits.round()

    def column(value):
        return torch.full((slots,), value)

    where = Slots(
        token=column(0)[:, None],
        position=column(29),
        base=column(4)[None],
        count=column(29)[None],
        limit=column(64)[None],
        active=torch.tensor([slot != 1 for slot in range(slots)]),
        forced=column(-1)[:, None].repeat(1, STEPS),
        taken=torch.zeros(STEPS, slots, dtype=torch.int64),
    )
    where.forced[0, 1] = 11
    return Draw(BufferView("logits", vocab, dtype=torch.float32), state), StepBuffers(
        {"logits": logits}, where, [], [], torch.float32
    )


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("spread", [0.01, 1.0, 4.0, 15.0, 60.0])
@pytest.mark.parametrize("vocab", [13, 50, 1000, 30_001])
@torch.inference_mode()
def test_the_loop_draws_as_torch_does(vocab, spread, coarse):
    for seed in range(12 if vocab < 5000 else 4):
        operation, mine = drawing(vocab, 8, seed, spread, coarse)
        twin, plain = copy.deepcopy((operation, mine))
        CpuProgram([operation], mine).run(STEPS)
        PlainProgram([twin], plain).run(STEPS)
        assert torch.equal(mine.slots.taken, plain.slots.taken)
        assert torch.equal(operation.state.output_counts, twin.state.output_counts)
        for name in ("position", "count", "forced", "token"):
            assert torch.equal(getattr(mine.slots, name), getattr(plain.slots, name)), name
        assert mine.slots.taken[1, 0] == 11
        assert mine.slots.taken[:, 1].eq(0).all()
        assert operation.state.output_counts[1].sum() == 0
        for step, slot in ((step, slot) for step in range(STEPS) for slot in range(8) if slot != 1):
            token = int(mine.slots.taken[step, slot])
            is_allowed = int(operation.state.allowed[0, slot, token // 32]) >> token % 32 & 1
            assert is_allowed or not operation.state.masked[slot] or (step, slot) == (1, 0)


@torch.inference_mode()
def test_a_broken_model_gives_tokens():
    for value in (float("nan"), float("-inf"), float("inf")):
        operation, m = drawing(100, 8, 0, 1.0, False)
        m.buffers["logits"].fill_(value)
        CpuProgram([operation], m).run(STEPS)
        assert bool(((m.slots.taken >= 0) & (m.slots.taken < 100)).all())
