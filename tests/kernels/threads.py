"""What kernels must not depend on."""

import torch


def on_threads(function):
    """What comes out on one thread, two and five: the same to the bit."""
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            results.append(function())
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])
    return results[0]
