"""What joins GPUs to each other and to the host: named by the person who has them, or measured.

Sources of the rates, in GB/s (1e9 bytes) and one direction: PCI-SIG's base specifications (8, 16 and 32 GT/s a lane,
128b/130b code) for PCIe; NVIDIA's architecture whitepapers and data sheets for NVLink (half of the sum of both
directions, which is what they print). What arrives of it is a rule of thumb from public reports of NVIDIA's nccl-tests:
four fifths with peer-to-peer access. Without it (GeForce cards have none over PCIe) every byte passes through host
memory, which leaves about two fifths. `configure --report` measures the real ones where the GPUs are.
"""

import difflib
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sharding.targets import Gpu
from zagora_jax.checkpoints.json_files import read_json_object
from zagora_jax.errors import UserError

_PCIE_LANE = {3: 8 * 128 / 130 / 8, 4: 16 * 128 / 130 / 8, 5: 32 * 128 / 130 / 8}
_LANES = (4, 8, 16)
_NVLINK = {
    "rtx3090": 56.2,
    "rtx3090ti": 56.2,
    "a4500": 56.2,
    "a5000": 56.2,
    "a5500": 56.2,
    "a6000": 56.2,
    "a100-40": 300.0,
    "a100": 300.0,
    "h100-pcie": 300.0,
    "h100": 450.0,
    "h200": 450.0,
}
_REACHED, _REACHED_THROUGH_HOST = 0.8, 0.4
# What an NVMe disk behind four lanes of PCIe 3.0, the slowest that are sold, gives of the 3.5 that makers print.
DISK_GB_S = 3.0

NAMES = (
    *(f"pcie{generation}" for generation in _PCIE_LANE),
    *(f"pcie{generation}-x{lanes}" for generation in _PCIE_LANE for lanes in _LANES),
    "nvlink",
)


@dataclass(frozen=True)
class Link:
    """How fast a GPU sends to another one and to the host, in GB/s that arrive, one direction.

    Attributes:
        name: as it is printed.
        gpu_gb_s: to another GPU.
        host_gb_s: to pinned host memory.
        measured: whether measured on this machine.
        disk_gb_s: from the disk to host memory, for all GPUs together.
    """

    name: str
    gpu_gb_s: float
    host_gb_s: float
    measured: bool = False
    disk_gb_s: float = DISK_GB_S


def find_link(name: str, gpu: Gpu, peer_to_peer: bool | None) -> Link:
    """Look a link up: "pcie" (the card's own slot), "pcie4", "pcie4-x8", or "nvlink".

    Args:
        name: of the link.
        gpu: the card.
        peer_to_peer: whether cards reach each other's memory; None is what the driver allows such a card over PCIe.

    Raises:
        UserError: an unknown name, one that the card cannot have, or peer access that contradicts it.
    """
    plain = re.sub(r"[\s_:.]+", "-", name.lower())
    if plain == "nvlink":
        if gpu.kind not in _NVLINK:
            raise UserError(f"--interconnect nvlink: {gpu.name} has none; cards with it: {', '.join(_NVLINK)}")
        if peer_to_peer is False:
            raise UserError("--interconnect nvlink is peer-to-peer access: leave --peer-to-peer false out")
        return Link("NVLink", _NVLINK[gpu.kind] * _REACHED, _pcie(gpu.pcie_generation, gpu.pcie_lanes) * _REACHED)
    match = re.fullmatch(r"pcie-?(?:([345])(?:-0)?)?-?(?:x(4|8|16))?", plain)
    if match is None:
        nearest = difflib.get_close_matches(plain, NAMES, n=3, cutoff=0.4)
        hint = f"; the nearest are {', '.join(nearest)}" if nearest else ""
        raise UserError(f"--interconnect {name}: not known{hint}; all: pcie (the card's own slot), {', '.join(NAMES)}")
    generation, lanes = (int(part) if part else None for part in match.groups())
    # A card in a faster slot, or in a wider one, still sends at its own rate.
    generation = min(generation or gpu.pcie_generation, gpu.pcie_generation)
    lanes = min(lanes or gpu.pcie_lanes, gpu.pcie_lanes)
    if peer_to_peer is None:
        peer_to_peer = not gpu.kind.startswith("rtx")
    raw = _pcie(generation, lanes)
    how = "with" if peer_to_peer else "without"
    reached = _REACHED if peer_to_peer else _REACHED_THROUGH_HOST
    return Link(f"PCIe {generation}.0 x{lanes}, {how} peer-to-peer", raw * reached, raw * _REACHED)


def with_measured(link: Link, path: Path) -> Link:
    """Return a link at the rates that `train` has measured: between cards the slowest, since exchanges wait for it.

    Args:
        link: what is known without.
        path: of a run directory's connections.json.

    Raises:
        UserError: the file is none, or no pair of cards was measured.
    """
    content = read_json_object(path)
    links, host = content.get("links"), content.get("host_gb_s")
    if not isinstance(links, list) or not links:
        raise UserError(f"--links {path}: expected the key links with measured pairs, found {links!r}")
    rates = [
        _rate(pair.get("gb_s") if isinstance(pair, dict) else pair, f"{path}: links[{number}].gb_s")
        for number, pair in enumerate(links)
    ]
    name = f"measured, the slowest of {len(rates)} pairs"
    to_host = link.host_gb_s if host is None else _rate(host, f"{path}: host_gb_s")
    return replace(link, name=name, gpu_gb_s=min(rates), host_gb_s=to_host, measured=True)


def _rate(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise UserError(f"--links {name}: expected a positive number, found {value!r}")
    return float(value)


def _pcie(generation: int, lanes: int) -> float:
    return _PCIE_LANE[generation] * lanes
