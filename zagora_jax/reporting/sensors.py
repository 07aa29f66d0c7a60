"""Readings of the machine that a run is on."""

import resource

import jax

GIB = 2**30


def peak_memory_gib() -> float:
    """Return the most memory used so far, in GiB.

    On a GPU this is the allocator's peak on the fullest device; on a CPU, whose memory is the host's, the peak
    resident size of the process.
    """
    statistics = [device.memory_stats() for device in jax.local_devices()]
    if all(statistics):
        return max(of_device["peak_bytes_in_use"] for of_device in statistics if of_device) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
