"""Inference mode that an interrupt cannot leave on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def in_inference_mode(function: Callable[P, R]) -> Callable[P, R]:
    """Run a function in inference mode, like ``@torch.inference_mode()``.

    A signal such as Ctrl-C is handled between two lines of Python. Between those of ``torch.inference_mode.__enter__``
    and ``__exit__`` it would leave the mode on in the caller's code, which then cannot train. The guard beneath is
    written in C++: it is entered and left as a whole.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch._C._InferenceMode(True):
            return function(*args, **kwargs)

    return run
