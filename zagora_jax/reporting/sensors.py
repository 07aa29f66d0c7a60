"""Readings of the machine that a run is on."""

import resource

import jax

GIB = 2**30


def peak_memory_gib() -> float:
    """Return the most memory used so far, in GiB.

    On a GPU this is the allocator's peak on the fullest device; on a CPU, whose memory is the host's, the peak
    resident size of the process.
    """
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    if all(peak is not None for peak in peaks):
        return max(peaks) / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
