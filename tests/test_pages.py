"""Tensors in one block of memory: each has its own part of it, and is as good as any other."""

import ctypes
import errno
import gc
import mmap
import sys
from pathlib import Path

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


@pytest.mark.skipif(sys.platform != "linux", reason="not Linux")
@pytest.mark.parametrize("is_old", [False, True])
def test_planned_memory_is_committed(is_old, monkeypatch):
    """Also where the system does not know how to populate pages."""

    def resident():
        status = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))

    if is_old:
        monkeypatch.setattr(pages, "_madvise", lambda: None)
    before = resident()
    made = pages.tensors_of_zeros([((2**24,), torch.float32), ((5,), torch.bfloat16)])
    assert resident() - before > 60 * 1024  # of 64 MiB
    assert not any(tensor.any() for tensor in made)


@pytest.mark.skipif(sys.platform != "linux", reason="not Linux")
def test_memory_that_cannot_be_committed(monkeypatch):
    def refuse(*args):
        ctypes.set_errno(errno.ENOMEM)
        return -1

    monkeypatch.setattr(pages, "_madvise", lambda: refuse)
    with pytest.raises(MemoryError, match="not enough memory for 4032 bytes"):
        pages.tensors_of_zeros([((1000,), torch.float32)])


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
