"""What torch allocates on a CPU."""

import gc

import torch


def measure(function):
    """Call it.

    Returns:
        What it returns, the most bytes that were allocated at a time meanwhile, and those that still are.
    """
    gc.collect()  # what others have left would be freed meanwhile
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    now = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return result, peak, now
