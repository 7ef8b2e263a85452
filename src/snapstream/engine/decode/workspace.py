"""What a decode step allocates for a while: counted without contents, on the meta device."""

from __future__ import annotations

import torch

from snapstream.engine.decode.decode import Decode
from snapstream.kernels.counting import peak_of
from snapstream.kernels.cpu import CpuProgram, Scratch
from snapstream.kernels.launches import has_loop, reserve
from snapstream.kernels.sampling import sample
from snapstream.kernels.stock import Program
from snapstream.kernels.workspace import most_workspace


def decode_workspace(decode: Decode, device: torch.device) -> int:
    """The most bytes of temporaries that a step needs: of its operations, or of drawing tokens.

    Args:
        decode: On the meta device.
        device: Where it will run.
    """
    position, nothing_forced = decode.position + 1, decode.forced[:, 0]
    drawing = peak_of(lambda: sample(decode.logits, decode.sampling, position, decode.active, nothing_forced))
    running = (most_workspace(each.operations, each.work, device) for each in _programs(decode))
    return max(drawing, *running, 0)


def kept_by_steps(decode: Decode, device: torch.device) -> int:
    """Bytes that programs of steps keep for the native loop, where they run some operations in it; as above."""
    kept = 0
    for each in _programs(decode):
        if has_loop(device, each.work.dtype):
            scratch = Scratch()
            reserve(each.operations, each.work, scratch)
            kept += scratch.nbytes
    return kept


def _programs(decode: Decode) -> list[Program]:
    """Programs of steps but the native loop's, which already has what it needs."""
    steps = [decode.program, *(each.program for each in decode.verifications.values())]
    return [each for each in steps if not isinstance(each, CpuProgram)]
