"""Weights in blocks: the numbers of the gguf package, to the bit, and products as near to float64 as they can be."""

import pytest
import torch

from snapstream.config.engine import QUANTIZED
from snapstream.kernels import cpu
from snapstream.kernels import operations as ops
from snapstream.kernels.buffers import BufferView
from snapstream.kernels.cpu import blocks
from snapstream.kernels.cpu.program import CpuProgram
from snapstream.kernels.formats import FORMATS
from snapstream.kernels.operations import PlainProgram
from snapstream.kernels.quantizing import quantize
from snapstream.kernels.stock import StockProgram
from snapstream.kernels.weight import BlockWeight, DenseWeight, joined
from tests.blocks import equal_rows, random_rows, random_weight, rounding_bound
from tests.kernels.threads import on_threads
from tests.products import multiply, multiply_experts, of_step

KINDS = list(FORMATS.values())
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
has_kernels = pytest.mark.skipif(not cpu.available(), reason="no CPU kernels")


def random_generator(seed=0):
    return torch.Generator().manual_seed(seed)


@each_kind
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_numbers_are_those_of_the_gguf_package(kind, rows):
    gguf = pytest.importorskip("gguf")
    raw = random_rows(kind, rows, 512, random_generator(rows))
    want = gguf.quants.dequantize(raw.numpy(), gguf.GGMLQuantizationType(kind.number))
    weight = BlockWeight(kind.pack(raw), kind, rows)
    assert weight.shape == (rows, 512)
    assert weight.nbytes == -(-rows // 16) * 16 * raw.shape[1]
    assert torch.equal(weight.dense(torch.float32), torch.from_numpy(want))
    some = torch.randint(0, rows, (9,))
    assert torch.equal(weight.rows(some, torch.float32), torch.from_numpy(want)[some])


@has_kernels
@each_kind
@pytest.mark.parametrize("rows", [1, 16, 37])
def test_kernels_pack_and_widen_to_the_bit(kind, rows):
    raw, order = random_rows(kind, rows, 512, random_generator()), torch.randperm(rows)
    want = kind.pack(raw[order])
    tiles = torch.full_like(want, 77)
    blocks.pack(kind, raw, tiles, order)
    assert torch.equal(tiles, want)
    weight = BlockWeight(tiles, kind, rows)
    for dtype in (torch.float32, torch.bfloat16):
        wide = torch.zeros(rows, 600, dtype=dtype)[:, :512]
        blocks.widen(weight, wide)
        assert torch.equal(wide, weight.dense(dtype))


@has_kernels
@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("T", "rows", "columns"), [(1, 48, 512), (5, 37, 256), (70, 304, 1024)])
def test_products_equal_float64(kind, dtype, T, rows, columns):
    generator = random_generator(T)
    weight, x = random_weight(kind, rows, columns, generator), torch.randn(T, columns, generator=generator)
    x[:, :32] *= 100  # parts with scales of their own
    x[0, 32:64] = 0
    x, bias = x.to(dtype), torch.randn(rows, generator=generator)
    got = multiply(x, weight, bias, many=T > 1, instructions=0)
    dense = weight.dense(torch.float64)
    want = x.double() @ dense.T + bias.double()
    rounded = want.abs() * 2**-8 if dtype == torch.bfloat16 else 0
    bound = rounding_bound(x, dense) + 1e-5 * (x.double().abs() @ dense.abs().T) + rounded
    assert ((got.double() - want).abs() <= bound).all()
    # The bound is not loose: errors of many roundings are some part of it.
    assert T == 1 or ((got.double() - want).abs() > bound / 1000).any()


@has_kernels
@each_kind
@pytest.mark.parametrize("byte", [0, 127, 128, 255])
@pytest.mark.parametrize("sign", [1, -1])
def test_sums_of_the_largest_numbers_fit(kind, byte, sign):
    """Some processors add products in 16 bits."""
    weight = BlockWeight(kind.pack(equal_rows(kind, 16, 512, byte)), kind, 16)
    x = torch.full((9, 512), sign * 3.0)
    want = x.double() @ weight.dense(torch.float64).T
    for many in (False, True):
        torch.testing.assert_close(multiply(x, weight, many=many).double(), want, rtol=1e-5, atol=1e-5)


@has_kernels
@each_kind
def test_a_row_depends_on_itself_alone(kind):
    """To the bit: in any company, for any number of threads, in a step as in a prompt."""
    generator = random_generator()
    weight, x = random_weight(kind, 600, 1024, generator), torch.randn(67, 1024, generator=generator)
    want = multiply(x, weight, many=True)
    for first, last in ((0, 1), (3, 5), (7, 14), (20, 53), (66, 67)):
        for many in (False, True):
            some = on_threads(lambda rows=x[first:last], many=many: multiply(rows, weight, many=many))
            assert torch.equal(some, want[first:last])


@has_kernels
def test_numbers_that_are_not_finite_stay_so():
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = torch.randn(3, 512)
        x[1, 300] = bad
        for kind in KINDS:
            weight = random_weight(kind, 32, 512, random_generator())
            for got in (multiply(x, weight), multiply(x, weight, many=True)):
                assert got[1].isnan().all()
                assert got[[0, 2]].isfinite().all()


@has_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_steps_with_rows_in_several_formats(seed, dtype):
    """Embedding, product, gated product and experts of random mixtures, beside the same list in plain torch."""
    generator = random_generator(seed)

    def pick(count):
        return int(torch.randint(0, count, (1,), generator=generator))

    def mixture(rows):
        parts = []
        for count in rows:
            kind = [None, *KINDS][pick(len(KINDS) + 1)]
            if kind is None:
                parts.append(DenseWeight(torch.randn(count, 256, generator=generator).to(dtype) / 50))
            else:
                parts.append(random_weight(kind, count, 256, generator))
        return joined(parts)

    def experts(rows):
        parts = []
        for count in rows:
            kind = KINDS[pick(len(KINDS))]
            tiles = [kind.pack(random_rows(kind, count, 256, generator)) for _ in range(4)]
            parts.append(BlockWeight(torch.stack(tiles), kind, count))
        return joined(parts)

    B, x = [1, 3, 9, 40][pick(4)], BufferView("x", 256)
    inner, made = BufferView("inner", 96), BufferView("made", 96)
    ends = BufferView("ends", 4, dtype=torch.int64)
    operations = [
        ops.Embed(mixture([50]), x),
        ops.Product(x, BufferView("y", 80), mixture([32, 16, 32]), torch.randn(80, generator=generator)),
        ops.GatedProduct(x, inner, mixture([96, 96]), torch.randn(192, generator=generator)),
        ops.ExpertProduct(x, made, ends, experts([96, 96]), gated=True),
        ops.ExpertProduct(x, BufferView("z", 40), ends, experts([40]), gated=False),
    ]
    results = []
    for program in (PlainProgram, CpuProgram):
        work = of_step([part for each in operations for part in each.parts()], B, dtype)
        work.slots.token.copy_(torch.arange(B)[:, None] * 7 % 50)
        work.buffers["ends"][0] = torch.tensor([B // 3, B // 3, B // 2, B])
        program(operations, work).run()
        results.append(work.buffers)
    plain, fast = results
    assert torch.equal(plain["x"], fast["x"])
    for name in ("y", "inner", "made", "z"):
        want = plain[name].float()
        torch.testing.assert_close(fast[name].float(), want, rtol=0.03, atol=0.02 * float(want.abs().max()))


@has_kernels
@each_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_with_many_rows(kind, dtype):
    """As a prompt has them: each row by the blocks of its expert, and by nothing else."""
    generator = random_generator()
    tiles = torch.stack([kind.pack(random_rows(kind, 48, 256, generator)) for _ in range(3)])
    weight, ends = BlockWeight(tiles, kind, 48), torch.tensor([70, 70, 130])
    x = torch.randn(130, 256, generator=generator).to(dtype)
    for many in (False, True):
        got = multiply_experts(x, weight, ends, many=many)
        each = (multiply(rows, weight.matrix(n), many=many) for rows, n in ((x[:70], 0), (x[70:], 2)))
        assert torch.equal(got, torch.cat([*each]))


@has_kernels
@each_kind
@pytest.mark.parametrize("rounded", [False, True])
def test_float32_logits_of_bfloat16_activations(kind, rounded):
    """In a step and in a prompt."""
    weight, x = random_weight(kind, 48, 256, random_generator()), torch.randn(5, 256).bfloat16()
    logits = BufferView("y", 48, dtype=torch.float32)
    operation = ops.Product(BufferView("x", 256), logits, weight, rounded=rounded)
    results = []
    for program in (CpuProgram, StockProgram, PlainProgram):
        work = of_step(operation.parts(), 5, torch.bfloat16)
        work.buffers["x"].copy_(x)
        program([operation], work).run()
        results.append(work.buffers["y"])
    step, prompt, plain = results
    assert torch.equal(step, prompt)
    assert torch.equal(step, step.bfloat16().float()) == rounded
    torch.testing.assert_close(step, plain, rtol=0.02, atol=0.02 * float(plain.abs().max()))


@has_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_in_one_format_that_are_gates_and_ups(dtype):
    weight, x = random_weight(FORMATS["q4_k"], 96, 256, random_generator()), torch.randn(70, 256).to(dtype)
    source, target = BufferView("x", 256), BufferView("y", 48)
    operation = ops.GatedProduct(source, target, weight)
    work = of_step(operation.parts(), 70, dtype)
    work.buffers["x"].copy_(x)
    work.slots.active[5:40] = False
    CpuProgram([operation], work).run()
    gates, ups = multiply(x.float(), weight).chunk(2, -1)
    want = (torch.nn.functional.silu(gates) * ups).to(dtype)
    want[5:40] = 0
    torch.testing.assert_close(work.buffers["y"], want, rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-4)


@has_kernels
def test_what_kernels_cannot_take_apart_is_refused():
    generator, kind = random_generator(), FORMATS["q8_0"]
    first, second = (random_weight(kind, rows, 256, generator) for rows in (24, 40))
    x, y, z = BufferView("x", 256), BufferView("y", 64), BufferView("z", 40)
    several = joined([DenseWeight(torch.zeros(32, 256)), DenseWeight(torch.zeros(32, 256).bfloat16())])
    for operation, said in (
        (ops.Product(x, y, joined([first, second])), "changes its format between multiples of 16"),
        (ops.Product(x, y, several), "numbers of several types"),
        (ops.GatedProduct(x, z, random_weight(kind, 80, 256, generator)), "gates of GatedProduct end within a tile"),
    ):
        work = of_step(operation.parts(), 1, torch.float32)
        with pytest.raises(ValueError, match=said):
            CpuProgram([operation], work)


@has_kernels
def test_bad_arguments_are_refused():
    kind = FORMATS["q4_k"]
    weight = random_weight(kind, 32, 256, random_generator())
    with pytest.raises(ValueError, match="tiles do not match"):
        blocks.pack(kind, torch.zeros(17, 144, dtype=torch.uint8), torch.zeros(1, 1, 2304, dtype=torch.uint8))
    with pytest.raises(ValueError, match="the target is"):
        blocks.widen(weight, torch.zeros(32, 512))
    with pytest.raises(ValueError, match="do not consist of blocks of 256"):
        kind.stored_shape((32, 288))


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q4_1", "q5_0", "q5_1"])
def test_quantized_as_by_the_gguf_package(name):
    gguf = pytest.importorskip("gguf")
    kind = FORMATS[name]
    numbers = torch.randn(40, 512, generator=random_generator()) * torch.rand(40, 1)
    numbers[0], numbers[1, :64] = 0, 0
    want = gguf.quants.quantize(numbers.numpy(), gguf.GGMLQuantizationType(kind.number))
    assert torch.equal(quantize(kind, numbers), torch.from_numpy(want))


# Root mean square errors of normally distributed numbers, relative to them; more bits, less error.
ERRORS = {
    "q4_0": 0.09,
    "q4_1": 0.08,
    "q4_k": 0.074,
    "q5_0": 0.045,
    "q5_1": 0.04,
    "q5_k": 0.037,
    "q6_k": 0.02,
    "q8_0": 0.006,
}


@each_kind
@pytest.mark.parametrize("shift", [0.0, 3.0, -3.0])
def test_numbers_survive_rounding(kind, shift):
    numbers = torch.randn(64, 1024, generator=random_generator()) + shift
    numbers[0], numbers[1], numbers[2, 100:400] = 0, 1e-3, 0
    back = BlockWeight(kind.pack(quantize(kind, numbers)), kind, 64).dense(torch.float32)
    assert (back[0] == 0).all()
    assert (back[2, 128:384] == 0).all()
    torch.testing.assert_close(back[1], numbers[1], rtol=0.07, atol=0)
    off = (back - numbers)[3:].square().mean().sqrt() / numbers[3:].square().mean().sqrt()
    assert off < ERRORS[kind.name]
    # What is rounded already stays as it is, but for the float16 of scales.
    again = BlockWeight(kind.pack(quantize(kind, back)), kind, 64).dense(torch.float32)
    assert (again - back).abs().mean() < 0.3 * (back - numbers).abs().mean()


def test_every_format_can_be_asked_for():
    assert set(QUANTIZED) == set(FORMATS)
