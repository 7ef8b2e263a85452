"""Products of the rows of a step and of a prompt: against float64, and the same, to the bit, in any company."""

from dataclasses import replace

import pytest
import torch

from snapstream.kernels import cpu
from snapstream.kernels import operations as ops
from snapstream.kernels.buffers import BufferView
from snapstream.kernels.cpu.program import CpuProgram
from snapstream.kernels.formats import FORMATS
from snapstream.kernels.plain import Activation, gate
from snapstream.kernels.weight import DenseWeight, joined
from tests.blocks import random_weight
from tests.kernels.threads import on_threads
from tests.products import multiply, multiply_experts, of_prompt, run

pytestmark = pytest.mark.skipif(not cpu.library.available(), reason="no kernels, and no C++ compiler")
KINDS = tuple(FORMATS.values())
COLUMNS = (32, 96, 256, 288, 768, 1312)
STEP_ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 15, 16, 17, 33)
PROMPT_ROWS = (1, 2, 15, 16, 17, 31, 33, 65, 100, 511, 513, 700)
for_both = pytest.mark.parametrize("many", [False, True], ids=["step", "prompt"])


@pytest.fixture(scope="module", autouse=True)
def _kernels():
    cpu.available()


def ways():
    """Indices of the instructions that this processor has."""
    return [n for n, name in enumerate(cpu.INSTRUCTIONS) if cpu.has_instructions(name)]


class Random:
    """Random choices and numbers of a seed."""

    def __init__(self, seed):
        self.generator = torch.Generator().manual_seed(int(seed))

    def below(self, count):
        return int(torch.randint(0, count, (1,), generator=self.generator))

    def of(self, some):
        return some[self.below(len(some))]

    def numbers(self, *shape, dtype=torch.float32):
        return torch.randn(*shape, generator=self.generator).to(dtype)


def bound(x, weight, dtype, stored):
    """Of the error of products, from what is rounded: rows and weights once, and the result."""
    exact = x.double() @ weight.T
    size = x.double().abs() @ weight.abs().T
    # Numbers are multiplied exactly, unless weights in blocks become bfloat16; sums are in float32.
    rounded = 2**-8 if dtype == torch.bfloat16 and stored == "blocks" else 0
    return exact, 1e-5 * size + rounded * size + (exact.abs() * 2**-7 if dtype == torch.bfloat16 else 0) + 1e-6


@for_both
@pytest.mark.parametrize("seed", range(36))
def test_products_equal_float64(seed, many):
    r = Random(seed)
    dtype, stored = r.of([torch.float32, torch.bfloat16]), r.of([torch.float32, torch.bfloat16])
    rows, columns, out = r.of(PROMPT_ROWS if many else STEP_ROWS), r.of(COLUMNS), r.below(300) + 1
    x, weight = r.numbers(rows, columns, dtype=dtype), DenseWeight(r.numbers(out, columns, dtype=stored))
    bias = r.numbers(out, dtype=r.of([torch.float32, torch.bfloat16])) if r.below(2) else None
    want, most = bound(x, weight.dense(torch.float64), dtype, stored)
    want = want if bias is None else want + bias.double()
    for instructions in ways():
        got = multiply(x, weight, bias, many=many, instructions=instructions)
        assert ((got.double() - want).abs() <= most + want.abs() * 2**-7 * (dtype == torch.bfloat16)).all()
        # Part of the rows in other company, on other numbers of threads. A step has room for as many rows as before.
        first = r.below(rows)
        last = first + 1 + r.below(rows - first)
        noise = r.numbers(rows, columns, dtype=dtype)
        company = x[first:last] if many else torch.cat([noise[:first], x[first:last], noise[last:]])
        again = on_threads(lambda x=company, i=instructions: multiply(x, weight, bias, many=many, instructions=i))
        if not many:
            again = again[first:last]
        if last - first > 1 or not many:  # a prompt of one token is a step
            assert torch.equal(again, got[first:last])


@pytest.mark.parametrize("seed", range(12))
def test_what_is_done_with_sums(seed):
    """They are added to the target, multiplied by a factor, left in float32, or rounded first."""
    r = Random(seed)
    dtype, rows, out = r.of([torch.float32, torch.bfloat16]), 40, 50
    x, weight, before = r.numbers(rows, 64, dtype=dtype), DenseWeight(r.numbers(out, 64, dtype=dtype)), None
    wide = dtype == torch.bfloat16 and r.below(2) == 1
    target = BufferView("y", out, dtype=torch.float32 if wide else None)
    settings = {"factor": r.of([1.0, 0.5]), "rounded": wide and r.below(2) == 1, "add": not wide and r.below(2) == 1}
    operation = ops.Product(BufferView("x", 64), target, weight, **settings)
    if settings["add"]:
        before = r.numbers(rows, out, dtype=dtype)
    got = run(operation, x, many=True, before=before)
    want = run(operation, x, many=True, before=before, program=ops.PlainProgram)
    assert got.dtype == want.dtype == (torch.float32 if wide or dtype == torch.float32 else dtype)
    torch.testing.assert_close(got, want, rtol=1e-4 if dtype == torch.float32 else 0.02, atol=1e-4 if wide else 0.05)


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("rows", "inner"), [(2, 33), (70, 96), (520, 8)])
@for_both
def test_gates(activation, dtype, rows, inner, many):
    r = Random(rows)
    x, weight = r.numbers(rows, 96, dtype=dtype), DenseWeight(r.numbers(2 * inner, 96, dtype=dtype) / 10)
    bias = r.numbers(2 * inner)
    operation = ops.GatedProduct(BufferView("x", 96), BufferView("y", inner), weight, bias, activation)
    want = gate(x.double() @ weight.dense(torch.float64).T + bias.double(), activation)
    for instructions in ways():
        got = run(operation, x, many=many, instructions=instructions)
        torch.testing.assert_close(got.double(), want, rtol=1e-4 if dtype == torch.float32 else 0.02, atol=1e-3)


@for_both
@pytest.mark.parametrize("seed", range(16))
def test_blocks_and_mixtures_equal_float64(seed, many):
    """Weights whose rows are in several formats, some of them numbers."""
    r, parts, rows = Random(seed), [], 70
    dtype = r.of([torch.float32, torch.bfloat16])
    for count in (32, 16, 48, 21):
        kind = r.of([*KINDS, dtype] if seed % 2 else KINDS)
        dense = not hasattr(kind, "nbytes")
        parts.append(
            DenseWeight(r.numbers(count, 512, dtype=dtype) / 50)
            if dense
            else random_weight(kind, count, 512, r.generator)
        )
    weight, x = joined(parts), r.numbers(rows, 512, dtype=dtype)
    exact = weight.dense(torch.float64)
    for instructions in ways():
        got = multiply(x, weight, many=many, instructions=instructions).double()
        want = x.double() @ exact.T
        # Rows are rounded to 8 bits in parts of 32 numbers, or weights to bfloat16.
        parts_of_x = x.double().view(rows, -1, 32)
        steps = (parts_of_x.abs().amax(-1, keepdim=True) / 127).expand_as(parts_of_x).flatten(1) / 2
        most = steps @ exact.abs().T + x.double().abs() @ exact.abs().T * 2**-8 + want.abs() * 2**-7 + 1e-5
        assert ((got - want).abs() <= most).all()
        again = multiply(x[20:45], weight, many=many, instructions=instructions).double()
        assert torch.equal(again, got[20:45])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
@for_both
def test_experts(dtype, gated, many):
    """Of few rows, of many, and of none."""
    r, ends = Random(gated), torch.tensor([0, 3, 3, 50, 600, 601])
    x, weight = r.numbers(601, 64, dtype=dtype), r.numbers(6, 48, 64, dtype=dtype) / 8
    weight[[0, 2]] = torch.nan  # nobody chose them
    bias, target = r.numbers(6, 48), BufferView("y", 24 if gated else 48)
    ends_of = BufferView("ends", 6, dtype=torch.int64)
    operation = ops.ExpertProduct(BufferView("x", 64), target, ends_of, DenseWeight(weight), gated=gated, bias=bias)
    expert = torch.bucketize(torch.arange(601), ends, right=True)
    want = torch.einsum("mk,mnk->mn", x.double(), weight[expert].double()) + bias[expert].double()
    want = gate(want, Activation.SILU) if gated else want
    for instructions in ways():
        got = run(operation, x, many=many, ends=ends, instructions=instructions)
        torch.testing.assert_close(got.double(), want, rtol=1e-4 if dtype == torch.float32 else 0.02, atol=0.01)
        if not gated:  # in any company
            plain = replace(operation, bias=None)
            together = run(plain, x, many=many, ends=ends, instructions=instructions)
            one, their = DenseWeight(weight[3:4].contiguous()), torch.tensor([47])
            alone = multiply_experts(x[3:50], one, their, many=many, instructions=instructions)
            assert torch.equal(alone, together[3:50])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [2, 33, 530])
def test_heads_have_matrices_of_their_own(transposed, dtype, rows):
    r, heads, out = Random(rows), 3, 96
    size = 48 if transposed else 64
    x = r.numbers(rows, heads, size, dtype=dtype)
    weight = r.numbers(heads, *((size, out) if transposed else (out, size)), dtype=dtype)
    source, target = BufferView("x", size, heads, offset=32), BufferView("y", out, heads)
    operation = ops.HeadProduct(source, target, DenseWeight(weight), transposed)
    work = of_prompt(operation.parts(), rows, dtype)
    want = torch.einsum("thk,hkn->thn" if transposed else "thk,hnk->thn", x.double(), weight.double())
    for instructions in ways():
        source.of(work.buffers).copy_(x)
        CpuProgram([operation], work, instructions=instructions).run()
        got = target.of(work.buffers).double()
        torch.testing.assert_close(got, want, rtol=1e-4 if dtype == torch.float32 else 0.02, atol=0.05)


def test_a_single_row_of_a_program_for_many():
    """As the last chunk of a prompt may have it: with the bits that it has among others."""
    r = Random(0)
    source, target = BufferView("x", 96), BufferView("y", 40)
    weight = DenseWeight(r.numbers(40, 96, dtype=torch.bfloat16))
    work = of_prompt([source, target], 50, torch.bfloat16)
    work.buffers["x"].copy_(r.numbers(50, 96))
    program = CpuProgram([ops.Product(source, target, weight)], work)
    program.run()
    want = work.buffers["y"].clone()
    for row in (0, 17, 49):
        work.buffers["y"].zero_()
        slots = replace(work.slots, token=work.slots.token[:, row : row + 1])
        rows = {name: buffer[row : row + 1] for name, buffer in work.buffers.items()}
        program.rebind(replace(work, slots=slots, buffers=rows))
        program.run()
        assert torch.equal(work.buffers["y"][row], want[row])
        assert not work.buffers["y"][:row].any()
        assert not work.buffers["y"][row + 1 :].any()


@pytest.mark.parametrize("columns", [64, 1024, 2048])
def test_rows_wherever_they_are(columns):
    """Rows that compete for lines of the cache are copied, others are not: the bits are the same."""
    r = Random(columns)
    x, weight = r.numbers(64, columns, dtype=torch.bfloat16), DenseWeight(r.numbers(40, columns, dtype=torch.bfloat16))
    want = multiply(x, weight, many=True)
    for offset, width in ((0, columns + 32), (32, columns + 96)):
        wide = torch.full((64, width), torch.nan, dtype=torch.bfloat16)
        source, target = BufferView("x", columns, offset=offset), BufferView("y", 40)
        work = of_prompt([source, target], 64, torch.bfloat16)
        work.buffers["x"] = wide
        wide[:, offset : offset + columns] = x
        CpuProgram([ops.Product(source, target, weight)], work).run()
        assert torch.equal(work.buffers["y"], want)
