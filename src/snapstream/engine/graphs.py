"""Static graphs: one function, always the same tensors, compiled once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class StaticGraph:
    """A function of no arguments over tensors that stay where they are, compiled and, on CUDA, captured.

    Inputs are written into the tensors before a call and results read after it, so nothing is allocated, traced or
    launched piece by piece in between.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, *, eager: bool) -> None:
        """Wrap ``function``.

        Args:
            function: Reads and writes tensors it holds; what it returns is overwritten by the next call on CUDA.
            device: Where they live.
            eager: Call it as it is, for debugging or where nothing can be compiled.
        """
        self._function = function if eager else torch.compile(function, fullgraph=True, dynamic=False)
        self._device = device
        self._eager = eager
        self._captured: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile and capture. State the function changes has to be reset by the caller afterwards."""
        # Engines in one process share the code that is traced, and each counts as a recompilation of it.
        with torch._dynamo.config.patch(recompile_limit=1024, accumulated_recompile_limit=4096):
            self._function()
        if self._device.type != "cuda" or self._eager:
            return
        torch.cuda.synchronize(self._device)
        self._captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._captured):
            self._result = self._function()

    @torch.inference_mode()
    def __call__(self) -> Any:
        """Run once."""
        if self._captured is None:
            return self._function()
        self._captured.replay()
        return self._result
