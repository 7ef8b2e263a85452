"""Static graphs: one function over fixed tensors, captured once and replayed on CUDA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from snapstream.inference import in_inference_mode


class StaticGraph:
    """A function without arguments over tensors at fixed addresses.

    Inputs are written into the tensors before a call and results are read after it. So a replay allocates nothing and
    is launched as a whole.
    """

    def __init__(self, function: Callable[[], Any], device: torch.device, *, captured: bool) -> None:
        """Wrap ``function``.

        Args:
            function: Reads and writes tensors it holds. If it is captured, its result is overwritten by the next call
                of any graph.
            device: Device of the tensors.
            captured: Whether to capture it as a CUDA graph; ignored on other devices.
        """
        self._function = function
        self._device = device
        self._capture = captured and device.type == "cuda"
        self._captured: torch.cuda.CUDAGraph | None = None
        self._result: Any = None

    @in_inference_mode
    def warm_up(self, pool: Any = None) -> None:
        """Run the function once, and capture it; the device must be the current one.

        The caller must reset state that the function changes.

        Args:
            pool: CUDA memory that graphs share, from :func:`graph_pool`.
        """
        self._function()
        if not self._capture:
            return
        torch.cuda.synchronize(self._device)
        self._captured = torch.cuda.CUDAGraph()
        # The default capture stream belongs to the first device that captured a graph in this process.
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.graph(self._captured, pool=pool, stream=stream):
            self._result = self._function()

    @in_inference_mode
    def __call__(self) -> Any:
        """Run the function once; on CUDA, the device must be the current one."""
        if self._captured is None:
            return self._function()
        self._captured.replay()
        return self._result


def graph_pool(device: torch.device) -> Any:
    """Memory pool for temporaries, shared by all graphs of an engine because only one runs at once.

    ``None`` on other devices than CUDA.
    """
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None
