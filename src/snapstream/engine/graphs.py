"""Static graphs: one function, always the same tensors, compiled once and, on CUDA, captured."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def compile_function(function: Callable[P, R], *, eager: bool) -> Callable[P, R]:
    """``function``, compiled without graph breaks and without dynamic shapes, unless all is to be eager.

    What it is given may change from call to call, tensors and modules alike, as long as their shapes and kinds do not.
    """
    return function if eager else torch.compile(function, fullgraph=True, dynamic=False)


def compiling() -> AbstractContextManager[None]:
    """Around calls that compile: engines in one process share the code that is traced, and each counts as again."""
    patch: AbstractContextManager[None] = torch._dynamo.config.patch(
        recompile_limit=1024, accumulated_recompile_limit=4096
    )
    return patch


def repeated(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, to be compiled once inside of a larger graph that calls it for every layer.

    Torch before 2.13 is not known to do so where the function writes to its arguments; it compiles every call.
    """
    major, minor = (int(part) for part in torch.__version__.split(".")[:2])
    if (major, minor) < (2, 13):
        return function
    region: Callable[P, R] = torch.compiler.nested_compile_region(function)
    return region


class StaticGraph:
    """A function of no arguments over tensors that stay where they are.

    Inputs are written into the tensors before a call and results read after it, so nothing is allocated, traced or
    launched piece by piece in between.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, *, compiled: bool, captured: bool) -> None:
        """Wrap ``function``.

        Args:
            function: Reads and writes tensors it holds. Where it is captured, what it returns is overwritten by the
                next call of any graph.
            device: Where they live.
            compiled: Compile it, without graph breaks and without dynamic shapes.
            captured: Capture it as a CUDA graph; ignored on other devices.
        """
        self._function = compile_function(function, eager=not compiled)
        self._device = device
        self._capture = captured and device.type == "cuda"
        self._captured: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    @torch.inference_mode()
    def warm_up(self, pool: Any = None) -> None:
        """Compile and capture. State the function changes has to be reset by the caller afterwards.

        Args:
            pool: CUDA memory that graphs share, from :func:`graph_pool`.
        """
        with compiling():
            self._function()
        if not self._capture:
            return
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            self._captured = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._captured, pool=pool):
                self._result = self._function()

    @torch.inference_mode()
    def __call__(self) -> Any:
        """Run once."""
        if self._captured is None:
            return self._function()
        with torch.cuda.device(self._device):
            self._captured.replay()
        return self._result


def graph_pool(device: torch.device) -> Any:
    """Memory for temporaries that all graphs of an engine share, as only one runs at a time; ``None`` off CUDA."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
