"""Static graphs: one function, always the same tensors; on CUDA captured once, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class StaticGraph:
    """A function of no arguments over tensors that stay where they are.

    Inputs are written into the tensors before a call and results read after it, so nothing is allocated or launched
    piece by piece in between.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, *, captured: bool) -> None:
        """Wrap ``function``.

        Args:
            function: Reads and writes tensors it holds. Where it is captured, what it returns is overwritten by the
                next call of any graph.
            device: Where they live.
            captured: Capture it as a CUDA graph; ignored on other devices.
        """
        self._function = function
        self._device = device
        self._capture = captured and device.type == "cuda"
        self._captured: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    @torch.inference_mode()
    def warm_up(self, pool: Any = None) -> None:
        """Run once, and capture; the device must be the current one.

        State that the function changes has to be reset by the caller afterwards.

        Args:
            pool: CUDA memory that graphs share, from :func:`graph_pool`.
        """
        self._function()
        if not self._capture:
            return
        torch.cuda.synchronize(self._device)
        self._captured = torch.cuda.CUDAGraph()
        # By default the stream would be of the device that captured first in this process.
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.graph(self._captured, pool=pool, stream=stream):
            self._result = self._function()

    @torch.inference_mode()
    def __call__(self) -> Any:
        """Run once; on CUDA, the device must be the current one."""
        if self._captured is None:
            return self._function()
        self._captured.replay()
        return self._result


def graph_pool(device: torch.device) -> Any:
    """Memory for temporaries that all graphs of an engine share, as only one runs at a time; ``None`` off CUDA."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
