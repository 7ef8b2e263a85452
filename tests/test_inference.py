"""Inference mode."""

import gc
import itertools

import torch

from snapstream.inference import in_inference_mode
from tests.raising import Raise


@in_inference_mode
def outer(x):
    """Adds one, in two functions that both set the mode."""
    return inner(x)


@in_inference_mode
def inner(x):
    return x + 1


def test_results_and_names_are_those_of_the_function():
    result = outer(torch.zeros(3))
    assert result.is_inference()
    assert result.tolist() == [1, 1, 1]
    assert outer.__doc__ == "Adds one, in two functions that both set the mode."


def test_an_interrupt_at_any_line_does_not_leave_the_mode_on():
    """Any line of any package: torch's own context manager leaves the mode on after an interrupt in its lines."""
    for number in itertools.count(1):
        try:
            with Raise(KeyboardInterrupt(), number, lambda code, text: True) as raising:
                outer(torch.zeros(3))
        except KeyboardInterrupt:
            pass
        assert not torch.is_inference_mode_enabled(), raising.where
        if raising.where is None:
            break
    assert number > 4
    gc.collect()
    assert torch.is_grad_enabled()
