"""GPUs by name: the vendor's figures that a compiler target and a time model need.

Sources, all NVIDIA's unless said otherwise:
    capability, cores, clock, bandwidth, L2, PCIe: the architecture whitepapers (GA100, GA102, AD102, GH100, RTX
        Blackwell) and the data sheets and product pages of each card. The clock is the boost clock.
    bf16 TFLOP/s: dense, accumulated in float32; the same whitepapers and data sheets.
    memory: what CUDA reports as the device's total memory on Linux (deviceQuery and cudaGetDeviceProperties in public
        reports, and OpenXLA's target descriptions): 1-3 % below the size on the box, and 7-8 % below it where error
        correction takes its share (L4, L40S). Drivers differ by some 40 MiB. Where no report was found, the size on
        the box less 400 MiB, as reports of the same generation have it.
    limits of a multiprocessor: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

import difflib
import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Gpu:
    """The figures of one kind of GPU."""

    kind: str  # the short name that commands take
    name: str  # the name that CUDA reports
    capability: tuple[int, int]
    cores: int  # multiprocessors
    clock_ghz: float
    memory_mib: int
    bandwidth_gb_s: float
    l2_mib: float
    bf16_tflop_s: float
    pcie_generation: int
    pcie_lanes: int

    @property
    def memory_bytes(self) -> int:
        """Total device memory as CUDA reports it."""
        return self.memory_mib * 2**20


# fmt: off
_GPUS = (
    #   kind            CUDA's name                          cc       SMs  GHz    MiB     GB/s    L2     bf16   PCIe
    Gpu("rtx3060",      "NVIDIA GeForce RTX 3060",           (8, 6),  28,  1.777, 11938,  360.0,  2.25,  25.5,  4, 16),
    Gpu("rtx3060ti",    "NVIDIA GeForce RTX 3060 Ti",        (8, 6),  38,  1.665, 7792,   448.0,  4.0,   32.4,  4, 16),
    Gpu("rtx3070",      "NVIDIA GeForce RTX 3070",           (8, 6),  46,  1.725, 7792,   448.0,  4.0,   40.6,  4, 16),
    Gpu("rtx3070ti",    "NVIDIA GeForce RTX 3070 Ti",        (8, 6),  48,  1.770, 7792,   608.0,  4.0,   43.5,  4, 16),
    Gpu("rtx3080",      "NVIDIA GeForce RTX 3080",           (8, 6),  68,  1.710, 9840,   760.0,  5.0,   59.5,  4, 16),
    Gpu("rtx3080ti",    "NVIDIA GeForce RTX 3080 Ti",        (8, 6),  80,  1.665, 11888,  912.0,  6.0,   68.2,  4, 16),
    Gpu("rtx3090",      "NVIDIA GeForce RTX 3090",           (8, 6),  82,  1.695, 24259,  936.0,  6.0,   71.2,  4, 16),
    Gpu("rtx3090ti",    "NVIDIA GeForce RTX 3090 Ti",        (8, 6),  84,  1.860, 24176,  1008.0, 6.0,   80.0,  4, 16),
    Gpu("rtx4060",      "NVIDIA GeForce RTX 4060",           (8, 9),  24,  2.460, 7792,   272.0,  24.0,  30.2,  4, 8),
    Gpu("rtx4060ti",    "NVIDIA GeForce RTX 4060 Ti",        (8, 9),  34,  2.535, 7792,   288.0,  32.0,  44.1,  4, 8),
    Gpu("rtx4060ti-16", "NVIDIA GeForce RTX 4060 Ti",        (8, 9),  34,  2.535, 15944,  288.0,  32.0,  44.1,  4, 8),
    Gpu("rtx4070",      "NVIDIA GeForce RTX 4070",           (8, 9),  46,  2.475, 11866,  504.0,  36.0,  58.3,  4, 16),
    Gpu("rtx4070super", "NVIDIA GeForce RTX 4070 SUPER",     (8, 9),  56,  2.475, 11888,  504.0,  48.0,  71.0,  4, 16),
    Gpu("rtx4070ti",    "NVIDIA GeForce RTX 4070 Ti",        (8, 9),  60,  2.610, 11888,  504.0,  48.0,  80.2,  4, 16),
    Gpu("rtx4070tisuper", "NVIDIA GeForce RTX 4070 Ti SUPER", (8, 9), 66,  2.610, 15934,  672.0,  48.0,  88.2,  4, 16),
    Gpu("rtx4080",      "NVIDIA GeForce RTX 4080",           (8, 9),  76,  2.505, 15984,  716.8,  64.0,  97.5,  4, 16),
    Gpu("rtx4080super", "NVIDIA GeForce RTX 4080 SUPER",     (8, 9),  80,  2.550, 15984,  736.0,  64.0,  104.4, 4, 16),
    Gpu("rtx4090",      "NVIDIA GeForce RTX 4090",           (8, 9),  128, 2.520, 24210,  1008.0, 72.0,  165.2, 4, 16),
    Gpu("rtx5060",      "NVIDIA GeForce RTX 5060",           (12, 0), 30,  2.497, 7792,   448.0,  32.0,  38.4,  5, 8),
    Gpu("rtx5060ti",    "NVIDIA GeForce RTX 5060 Ti",        (12, 0), 36,  2.572, 7792,   448.0,  32.0,  47.4,  5, 8),
    Gpu("rtx5060ti-16", "NVIDIA GeForce RTX 5060 Ti",        (12, 0), 36,  2.572, 15841,  448.0,  32.0,  47.4,  5, 8),
    Gpu("rtx5070",      "NVIDIA GeForce RTX 5070",           (12, 0), 48,  2.512, 11888,  672.0,  48.0,  61.7,  5, 16),
    Gpu("rtx5070ti",    "NVIDIA GeForce RTX 5070 Ti",        (12, 0), 70,  2.452, 15842,  896.0,  48.0,  87.9,  5, 16),
    Gpu("rtx5080",      "NVIDIA GeForce RTX 5080",           (12, 0), 84,  2.617, 15880,  960.0,  64.0,  112.6, 5, 16),
    Gpu("rtx5090",      "NVIDIA GeForce RTX 5090",           (12, 0), 170, 2.407, 32117,  1792.0, 96.0,  209.5, 5, 16),
    Gpu("a4000",        "NVIDIA RTX A4000",                  (8, 6),  48,  1.560, 15984,  448.0,  4.0,   76.7,  4, 16),
    Gpu("a4500",        "NVIDIA RTX A4500",                  (8, 6),  56,  1.650, 20080,  640.0,  6.0,   94.6,  4, 16),
    Gpu("a5000",        "NVIDIA RTX A5000",                  (8, 6),  64,  1.695, 24114,  768.0,  6.0,   111.1, 4, 16),
    Gpu("a5500",        "NVIDIA RTX A5500",                  (8, 6),  80,  1.665, 24176,  768.0,  6.0,   136.4, 4, 16),
    Gpu("a6000",        "NVIDIA RTX A6000",                  (8, 6),  84,  1.800, 48676,  768.0,  6.0,   154.8, 4, 16),
    Gpu("l4",           "NVIDIA L4",                         (8, 9),  58,  2.040, 22491,  300.0,  48.0,  121.0, 4, 16),
    Gpu("l40s",         "NVIDIA L40S",                       (8, 9),  142, 2.520, 45589,  864.0,  96.0,  362.1, 4, 16),
    Gpu("a100-40",      "NVIDIA A100-SXM4-40GB",             (8, 0),  108, 1.410, 40339,  1555.0, 40.0,  312.0, 4, 16),
    Gpu("a100",         "NVIDIA A100-SXM4-80GB",             (8, 0),  108, 1.410, 81050,  2039.0, 40.0,  312.0, 4, 16),
    Gpu("h100-pcie",    "NVIDIA H100 PCIe",                  (9, 0),  114, 1.755, 81008,  2039.0, 50.0,  756.0, 5, 16),
    Gpu("h100",         "NVIDIA H100 80GB HBM3",             (9, 0),  132, 1.980, 81008,  3352.0, 50.0,  989.4, 5, 16),
    Gpu("h200",         "NVIDIA H200",                       (9, 0),  132, 1.980, 143156, 4800.0, 60.0,  989.4, 5, 16),
)
# fmt: on

GPUS = {gpu.kind: gpu for gpu in _GPUS}


def gpu(name: str) -> Gpu:
    """Look a GPU up by its short name ("rtx4090") or by the name that CUDA reports ("NVIDIA GeForce RTX 4090").

    Raises:
        ValueError: an unknown name; the message has the nearest known ones.
    """
    plain = _plain(name)
    # Where two cards that differ in memory alone share CUDA's name, the smaller stands first in the table.
    for known in _GPUS:
        if plain in (_plain(known.kind), _plain(known.name)):
            return known
    nearest = difflib.get_close_matches(plain, [_plain(kind) for kind in GPUS], n=3, cutoff=0.5)
    hint = f"the nearest are {', '.join(k for k in GPUS if _plain(k) in nearest)}" if nearest else "none is near"
    raise ValueError(f"GPU {name!r} is not known; {hint}; all: {', '.join(GPUS)}")


def _plain(name: str) -> str:
    """Reduce spellings of one name ("RTX A5000", "nvidia a5000", "4090") to one."""
    plain = re.sub(r"nvidia|geforce|[^a-z0-9]|(?<=\d)gb", "", name.lower())
    plain = re.sub(r"^rtx(?=a\d)", "", plain)
    return re.sub(r"^(?=[345]0[5-9]0)", "rtx", plain)
