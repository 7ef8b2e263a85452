"""What a decode step allocates for a while: counted without contents, on the meta device."""

from __future__ import annotations

import torch

from snapstream.engine.decode.decode import Decode
from snapstream.kernels.counting import peak_of
from snapstream.kernels.cpu import CpuProgram, available
from snapstream.kernels.launches import loop_bytes
from snapstream.kernels.sampling import sample
from snapstream.kernels.workspace import most_workspace


def decode_workspace(decode: Decode, device: torch.device) -> int:
    """The most bytes of temporaries that a step needs: of its operations, or of drawing tokens.

    Args:
        decode: On the meta device.
        device: Where it will run.
    """
    position, nothing_forced = decode.position + 1, decode.forced[:, 0]
    drawing = peak_of(lambda: sample(decode.logits, decode.sampling, position, decode.active, nothing_forced))
    steps = [decode.program, *(each.program for each in decode.verifications.values())]
    others = [each for each in steps if not isinstance(each, CpuProgram)]  # it keeps what it needs
    running = (most_workspace(each.operations, each.work, device) for each in others)
    in_loop = device.type == "cpu" and available()
    kept = sum(loop_bytes(each.operations, each.work) for each in others) if in_loop else 0
    return kept + max(drawing, *running, 0)
