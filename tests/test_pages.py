"""Tensors in one block of memory: each has its own part of it, and is as good as any other."""

import errno
import gc
import mmap

import pytest
import torch

from snapstream import pages
from snapstream.models.weights import load_model, load_spec
from tests.checkpoints import FAMILIES, save_checkpoint


def test_tensors_do_not_overlap_and_are_aligned():
    shapes = [((3, 5), torch.float32), ((700, 900), torch.bfloat16), ((), torch.float32), ((2, 0, 4), torch.float32)]
    shapes += [((4, 2, 64, 32), torch.float32)] * 3
    made = pages.tensors_of_zeros(shapes)
    for number, (tensor, (shape, dtype)) in enumerate(zip(made, shapes, strict=True)):
        assert tuple(tensor.shape) == shape
        assert tensor.dtype == dtype
        assert tensor.is_contiguous()
        assert tensor.data_ptr() % 64 == 0 or not tensor.numel()
        assert not tensor.any()
        tensor.fill_(number)
    assert all(bool((tensor == number).all()) for number, tensor in enumerate(made))
    kept = made[1]
    del made, tensor
    gc.collect()
    torch.zeros(10**7)
    assert bool((kept == 1).all())


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="not Linux")
def test_the_system_is_asked_for_whole_pages_alone(monkeypatch):
    asked = []

    class Block(mmap.mmap):
        def madvise(self, option, start, length):
            asked.append((start, length))
            raise OSError("no large pages here")

    monkeypatch.setattr(pages.mmap, "mmap", Block)
    pages.tensors_of_zeros([((1000,), torch.float32)])
    assert not asked
    large = pages.tensors_of_zeros([((2**20 + 5,), torch.float32), ((2**19,), torch.float32)])
    assert large[0].data_ptr() % 2**21 == 0
    assert [length for _, length in asked] == [3 * 2**21]


def test_no_memory_is_said_as_such(tmp_path, monkeypatch):
    """Not as a checkpoint that cannot be read."""

    def refuse(*args, **settings):
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    save_checkpoint(tmp_path, "qwen3")
    monkeypatch.setattr(pages.mmap, "mmap", refuse)
    with pytest.raises(MemoryError, match="Cannot allocate memory"):
        load_model(tmp_path, load_spec(tmp_path), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_that_two_modules_have_are_one(family, tmp_path):
    """And nothing of a model is left without memory."""
    save_checkpoint(tmp_path, family)
    spec = load_spec(tmp_path)
    model = load_model(tmp_path, spec, torch.float32, torch.device("cpu"))
    assert (model.head.weight is model.embedding) == spec.tied_embeddings
    everything = [*model.parameters(), *model.buffers()]
    assert all(tensor.device.type == "cpu" and not tensor.requires_grad for tensor in everything)
    assert len({tensor.data_ptr() for tensor in everything}) == len(everything)
