"""Weights in blocks on a GPU: their numbers to the bit, and products beside float64."""

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from snapstream.kernels import operations as ops
from snapstream.kernels import triton as kernels
from snapstream.kernels.buffers import BufferView, Slots, StepBuffers, allocate_buffers
from snapstream.kernels.formats import FORMATS
from snapstream.kernels.operations import PlainProgram
from snapstream.kernels.triton import split_bytes
from snapstream.kernels.weight import BlockWeight, DenseWeight, joined
from tests.blocks import random_rows
from tests.kernels.triton.devices import DEVICE, DTYPES, random

pytest.importorskip("triton")
from snapstream.kernels.triton import blocks
from snapstream.kernels.triton.program import TritonProgram

KINDS = list(FORMATS.values())
STEPS = {torch.float32: 0.0, torch.bfloat16: 2**-8, torch.float16: 2**-11}
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)


def weight_of(kind, rows, columns, seed=0, experts=None):
    generator = torch.Generator().manual_seed(seed)
    tiles = [kind.pack(random_rows(kind, rows, columns, generator)) for _ in range(experts or 1)]
    return BlockWeight((tiles[0] if experts is None else torch.stack(tiles)).to(DEVICE), kind, rows)


@each_kind
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 37, 64, 130])
def test_numbers(kind, dtype, rows):
    weight = weight_of(kind, rows, 512)
    wide = torch.full((rows, 600), 7.0, dtype=dtype, device=DEVICE)
    blocks.widen(weight, wide[:, :512])
    # A device may multiply and add at once; the interpreter rounds numbers below the normal ones to 0.
    tolerance = {"rtol": {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-9}[dtype], "atol": 1e-6}
    torch.testing.assert_close(wide[:, :512], weight.dense(dtype), **tolerance)
    assert (wide[:, 512:] == 7).all()
    some = torch.randint(0, rows, (9,), device=DEVICE)
    own = torch.empty(9, 512, dtype=dtype, device=DEVICE)
    blocks.widen(weight, own, some)
    assert torch.equal(own, wide[some, :512])


@each_kind
@pytest.mark.parametrize("dtype", DTYPES)
@settings(deadline=None, max_examples=4, phases=(Phase.explicit, Phase.generate))
@given(
    tokens=st.sampled_from((1, 3, 5, 16, 17, 70)),
    rows=st.sampled_from((16, 70, 200)),
    columns=st.sampled_from((256, 768, 1280)),
    seed=st.integers(0, 99),
    add=st.booleans(),
    has_bias=st.booleans(),
    target=st.sampled_from(("own", "float32", "rounded")),
)
def test_products_equal_float64(kind, dtype, tokens, rows, columns, seed, add, has_bias, target):
    weight = weight_of(kind, rows, columns, seed)
    x = random(tokens, columns, seed=seed, dtype=dtype)
    bias = random(rows, seed=seed + 1, dtype=dtype) if has_bias else None
    out = random(tokens, rows + 5, seed=seed + 2, dtype=dtype if target == "own" else torch.float32)
    before, like = out.clone(), x if target == "rounded" else None
    blocks.multiply(x, weight, out[:, :rows], bias, add=add, like=like)
    dense = weight.dense(torch.float64)
    want = x.double() @ dense.T + (0 if bias is None else bias.double())
    steps = STEPS[dtype] * (target != "float32")
    total = want + before[:, :rows].double() if add else want
    # For more than one row, numbers of the weight are rounded to the type of x.
    own = 2e-6 if tokens == 1 else max(2e-6, STEPS[dtype])
    bound = own * (x.double().abs() @ dense.abs().T) + 2e-6 + steps * (want.abs() + total.abs())
    assert ((out[:, :rows].double() - total).abs() <= bound).all()
    assert torch.equal(out[:, rows:], before[:, rows:])


@each_kind
def test_a_row_depends_on_itself_alone(kind):
    """To the bit, also where columns are split. In the interpreter, numpy multiplies as the processor lets it."""
    weight, x = weight_of(kind, 100, 1024), random(67, 1024, seed=1, dtype=torch.float32)
    assert kernels.column_splits(100, 1024, DEVICE) > 1

    def multiplied(rows):
        out = torch.empty(len(rows), 100, device=DEVICE)
        blocks.multiply(rows, weight, out)
        return out

    exactly = {"rtol": 0, "atol": 0} if torch.device(DEVICE).type == "cuda" else {"rtol": 1e-5, "atol": 1e-5}
    want = multiplied(x)
    for first, last in ((17, 37), (20, 67)):
        torch.testing.assert_close(multiplied(x[first:last]), want[first:last], **exactly)
    few = multiplied(x[:9])
    torch.testing.assert_close(few[3:5], multiplied(x[3:5]), **exactly)
    for each in (few, multiplied(x[:1])):
        torch.testing.assert_close(each, want[: len(each)], rtol=1e-5, atol=1e-4)


@each_kind
@pytest.mark.parametrize("dtype", DTYPES)
def test_experts(kind, dtype):
    """Each row by the blocks of its expert; rows that belong to nobody stay as they are."""
    weight, ends = weight_of(kind, 40, 256, experts=4), torch.tensor([3, 3, 25, 26], device=DEVICE)
    x = random(30, 256, seed=0, dtype=dtype)
    out = torch.full((30, 40), 7.0, device=DEVICE)
    blocks.multiply(x, weight, out, ends=ends)
    want = torch.full((30, 40), 7.0, dtype=torch.float64, device=DEVICE)
    for expert, (first, last) in enumerate(((0, 3), (3, 3), (3, 25), (25, 26))):
        want[first:last] = x[first:last].double() @ weight.matrix(expert).dense(torch.float64).T
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-4 + STEPS[dtype] * float(want.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(4))
def test_operations_with_rows_in_several_formats(seed, dtype):
    """Embedding, products and experts of random mixtures, beside the same list in plain torch."""
    generator = torch.Generator().manual_seed(seed)

    def pick(count):
        return int(torch.randint(0, count, (1,), generator=generator))

    def mixture(*rows):
        parts = []
        for count in rows:
            number = pick(len(KINDS) + 1)
            numbers = DenseWeight(random(count, 256, seed=number, dtype=dtype, scale=0.02))
            parts.append(numbers if number == len(KINDS) else weight_of(KINDS[number], count, 256, seed))
        return joined(parts)

    B, x, few = (1, 3, 9, 40)[pick(4)], BufferView("x", 256), BufferView("few", 80)
    ends = BufferView("ends", 4, dtype=torch.int64)
    logits = BufferView("logits", 50, dtype=torch.float32)
    bias = random(80, seed=seed, dtype=dtype)
    experts = weight_of(KINDS[pick(len(KINDS))], 96, 256, experts=4)
    operations = [
        ops.Embed(weight_of(KINDS[pick(len(KINDS))], 50, 256), x),
        ops.Product(x, few, mixture(32, 16, 32), bias),
        ops.Product(x, few, mixture(80), add=True),
        ops.Product(x, logits, mixture(32, 18), rounded=bool(seed % 2)),
        ops.GatedProduct(x, BufferView("inner", 96), mixture(96, 96)),
        ops.ExpertProduct(x, BufferView("made", 48), ends, experts, gated=True),
    ]
    results = []
    for program in (PlainProgram, TritonProgram):
        parts = [part for each in operations for part in each.parts()]
        buffers = allocate_buffers(parts, B, dtype, device=DEVICE)
        slots = Slots.that_see(torch.ones(B, dtype=torch.int64, device=DEVICE), 1)
        work = StepBuffers(buffers, slots, [], [], dtype)
        slots.token.copy_(torch.arange(B)[:, None] * 7 % 50)
        buffers["ends"][0] = torch.tensor([B // 3, B // 3, B // 2, B])
        program(operations, work).run()
        results.append(buffers)
    plain, fast = results
    for name in plain:
        want = plain[name].float()
        few_bits = 2e-2 if dtype == torch.bfloat16 else 3e-3 if dtype == torch.float16 else 1e-5
        torch.testing.assert_close(fast[name].float(), want, rtol=few_bits, atol=few_bits * float(want.abs().max()))


def test_what_is_planned_for_parts_of_columns(monkeypatch):
    """Memory for sums is what is allocated for them."""
    weight, x = weight_of(FORMATS["q4_k"], 100, 1024), random(3, 1024, seed=1, dtype=torch.float32)
    made, empty = [], torch.empty

    def watched(*size, **options):
        made.append(empty(*size, **options))
        return made[-1]

    out = torch.zeros(3, 100, device=DEVICE)
    monkeypatch.setattr(torch, "empty", watched)
    blocks.multiply(x, weight, out)
    assert sum(each.nbytes for each in made) == 3 * split_bytes(weight, torch.device("cuda"))
