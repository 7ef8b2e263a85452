"""Chunks of a prompt, by torch's products and kernels for rows, against the definitions in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from snapstream.kernels import cpu
from snapstream.kernels.launches import loop_operations
from snapstream.kernels.operations import PlainProgram
from snapstream.kernels.stock import StockProgram
from snapstream.models import logits_of
from snapstream.models.weights import load_model, load_spec
from tests.attending import read_in_chunks
from tests.checkpoints import FAMILIES, save_checkpoint
from tests.products import of_prompt

CPU = torch.device("cpu")
LENGTH = 90
ERRORS = {torch.float32: 2e-4, torch.bfloat16: 0.05}
"""Of a token's logits, relative to their size."""


@pytest.fixture(scope="module", params=FAMILIES)
def models(request, tmp_path_factory):
    """The same weights in three types."""
    path = tmp_path_factory.mktemp(request.param)
    save_checkpoint(path, request.param, dtype=torch.bfloat16)
    return {dtype: load_model(path, load_spec(path), dtype, CPU) for dtype in (*ERRORS, torch.float64)}


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("dtype", ERRORS)
@settings(deadline=None, max_examples=4)
@given(cuts=st.sets(st.integers(1, LENGTH - 1) | st.sampled_from((1, 16, 17)), max_size=4))
def test_chunks_equal_float64(models, dtype, kernels, cuts):
    """However a prompt is cut, also into single tokens, with kernels for rows and without."""
    loaded, ends = cpu.loaded or cpu.available(), (*sorted(cuts), LENGTH)
    tokens = torch.randint(0, 96, (LENGTH,), generator=torch.Generator().manual_seed(len(cuts)))
    cpu.loaded = loaded and kernels
    try:
        got = read_in_chunks(models[dtype], tokens, ends, StockProgram)
    finally:
        cpu.loaded = loaded
    want = logits_of(models[torch.float64], tokens)
    errors = (got.double() - want).norm(dim=-1) / want.norm(dim=-1)
    # Rounding to bfloat16 decides which of two experts a token gets that are about as good, or where it attends.
    assert errors.quantile(1.0 if dtype == torch.float32 else 0.5) < ERRORS[dtype]


@pytest.mark.parametrize("dtype", ERRORS)
@settings(deadline=None, max_examples=3)
@given(cuts=st.sets(st.integers(1, LENGTH - 1) | st.sampled_from((1, 16, 17, 64)), max_size=4))
def test_a_program_reads_chunks_as_if_they_were_one(models, dtype, cuts):
    """To the bit, for what the native loop runs: the same program reads chunks of any size, one after the other."""
    if not cpu.available():
        pytest.skip("no kernels")
    model, tokens = models[dtype], torch.randint(0, 96, (LENGTH,), generator=torch.Generator().manual_seed(1))
    operations = list(model.operations())
    work = of_prompt([part for each in operations for part in each.parts()], LENGTH, dtype)
    work.caches = [
        model.spec.layer_group(n).entry.empty(1, 1, entry_type=dtype) for n in range(model.spec.cached_layers)
    ]
    if not all(fits for fits, _ in loop_operations(operations, work)):
        pytest.skip("torch runs some operations")
    together = read_in_chunks(model, tokens, (LENGTH,), StockProgram, again=True)
    assert torch.equal(read_in_chunks(model, tokens, (*sorted(cuts), LENGTH), StockProgram, again=True), together)


def test_the_definition_of_chunks(models):
    """In plain torch, chunks give what the whole text gives."""
    tokens, model = torch.arange(3, 3 + 60), models[torch.float64]
    got = read_in_chunks(model, tokens, (7, 8, 60), PlainProgram)
    torch.testing.assert_close(got, logits_of(model, tokens), rtol=1e-9, atol=1e-9)
