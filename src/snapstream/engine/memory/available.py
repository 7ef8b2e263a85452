"""How much memory there is."""

from __future__ import annotations

import os
from pathlib import Path

import torch


def available_memory(device: torch.device, fraction: float) -> int | None:
    """Bytes that the engine may use: ``fraction`` of the device's free memory; ``None`` if that is unknown."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * fraction)
    free = _free_host_memory()
    return None if free is None else int(free * fraction)


def _free_address_space() -> list[int]:
    """Bytes that the process may still allocate, if it has a limit (``ulimit -v``)."""
    try:
        import resource
    except ImportError:  # Unix only
        return []
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    status = Path("/proc/self/statm")
    if limit == resource.RLIM_INFINITY or not status.exists():
        return []
    return [max(0, limit - int(status.read_text().split()[0]) * resource.getpagesize())]


def _free_host_memory() -> int | None:
    limits = []
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                limits.append(int(line.split()[1]) * 1024)
    maximum, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if maximum.exists() and used.exists() and maximum.read_text().strip() != "max":
        # Cached file pages count as used, but are freed when memory is needed.
        stat = dict(line.split() for line in Path("/sys/fs/cgroup/memory.stat").read_text().splitlines())
        limits.append(int(maximum.read_text()) - int(used.read_text()) + int(stat.get("inactive_file", 0)))
    limits += _free_address_space()
    if not limits and hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        limits.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(limits, default=None)
