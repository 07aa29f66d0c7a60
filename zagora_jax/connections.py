"""Whether devices reach each other, and how fast, tried with known numbers before a run relies on it.

Some cards and boards announce peer-to-peer access that they do not have: the first exchange then hangs, or a copy
arrives as zeros (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting.html).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from itertools import combinations, permutations
from statistics import median
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.spanning import place
from zagora_jax.errors import UserError
from zagora_jax.hanging import in_time

COUNT = 2**16  # numbers that are sent to see whether they arrive
TIMED_BYTES, TIMED_BYTES_OF_CPU = 64 * 2**20, 2**20  # of a copy that is timed
REPETITIONS = 3
BYTES_A_NUMBER = 4

COPIES_FAIL = (
    "The way between these devices is at fault, most often peer-to-peer access that the driver announces and the "
    "board does not carry. Try NCCL_P2P_DISABLE=1 in the environment; if copies still fail, switch the IOMMU (VT-d, "
    "AMD-Vi) and PCIe ACS off in the BIOS"
)
NETWORK_FAILS = (
    "These devices are on different machines: the network between them is at fault. Name the interface that joins "
    "them with NCCL_SOCKET_IFNAME=eth0, say, in the environment of every process; try NCCL_IB_DISABLE=1 where "
    "InfiniBand is not set up; and see that a firewall lets any port through between the machines"
)
SAME_HOST_FAILS = (
    "These devices belong to two processes of one machine. Try NCCL_P2P_DISABLE=1 in the environment of every process; "
    "in a container, give it more shared memory (docker run --shm-size=1g, or --ipc=host), or try NCCL_SHM_DISABLE=1"
)


@dataclass(frozen=True)
class Link:
    """What was measured from one device to another.

    Attributes:
        source: the device that sends, by platform and number.
        target: the one that receives.
        gb_s: GB (1e9 bytes) a second that arrived.
        between: "devices" of one process, "processes" of one machine, or "machines".
    """

    source: str
    target: str
    gb_s: float
    between: str


def try_connections(mesh: Mesh, host_of: Callable[[int], str] = str) -> list[Link]:
    """Copy numbers between any two devices, and sum some over each axis of the mesh whose devices exchange sums.

    Of several processes any two exchange numbers, each with its first device.

    Args:
        mesh: the devices.
        host_of: names the machine of a process.

    Returns:
        How fast this process's devices send.

    Raises:
        UserError: numbers arrive wrong or not in time; the devices are named, and what to try.
    """
    links = [_within(source, target) for source, target in permutations(mesh.local_devices, 2)]
    first: dict[int, jax.Device] = {}
    for device in mesh.devices.flat:
        first.setdefault(device.process_index, device)
    for one, other in combinations(first, 2):  # in the same order everywhere
        if jax.process_index() in (one, other):
            same_host = host_of(one) == host_of(other)
            links.append(_across(first[one], first[other], same_host, sends=jax.process_index() == one))
    for axis, size in mesh.shape.items():
        if size > 1 and axis != "stage":  # stages send to their neighbours
            what = f"summing over the {size} devices along the mesh's axis {axis}"
            advice = COPIES_FAIL if len(first) == 1 else f"{COPIES_FAIL}. {NETWORK_FAILS}"
            # A device that is missing in the sum, or counts twice, shows.
            expected = _numbers() * (2**size - 1)
            for device, found in in_time(what, partial(_sum, mesh, axis), advice).items():
                _require(f"{what}, as {_name(device)} has it", expected, found, advice)
    return links


def report(links: Sequence[Link], host_gb_s: float | None) -> dict[str, Any]:
    """Return what a run directory keeps of measured links, and `configure --links` reads."""
    return {"links": [asdict(link) for link in links], "host_gb_s": host_gb_s}


def in_words(links: Sequence[Link]) -> list[str]:
    """Say how fast links are, and which is much slower than others of its kind."""
    lines = []
    for between in dict.fromkeys(link.between for link in links):
        rates = {f"{link.source} to {link.target}": link.gb_s for link in links if link.between == between}
        slowest, usual = min(rates, key=lambda pair: rates[pair]), median(rates.values())
        lines.append(
            f"links between {between}: {len(rates)}, {min(rates.values()):.3g} to {max(rates.values()):.3g} GB/s"
        )
        if rates[slowest] < usual / 2 and not slowest.startswith("cpu"):
            lines.append(
                f"warning: {slowest} reaches {rates[slowest]:.3g} GB/s, others {usual:.3g}: a slot with fewer lanes, "
                "or a way around; the slowest link holds all others up"
            )
    return lines


def _within(source: jax.Device, target: jax.Device) -> Link:
    """Try a copy between two devices of this process."""
    what = f"copying from {_name(source)} to {_name(target)}"
    _require(what, _numbers(), in_time(what, partial(_copy, source, target), COPIES_FAIL), COPIES_FAIL)
    gb_s = in_time(what, partial(_rate_of_copy, source, target), COPIES_FAIL)
    return Link(_key(source), _key(target), gb_s, "devices")


def _across(one: jax.Device, other: jax.Device, same_host: bool, sends: bool) -> Link:
    """Try an exchange between devices of two processes, of which this one sends from `one`, or else from `other`."""
    what = f"exchanging between {_name(one)} (process {one.process_index}) and {_name(other)} ({other.process_index})"
    advice, mesh = SAME_HOST_FAILS if same_host else NETWORK_FAILS, Mesh(np.array([one, other]), ("pair",))
    _require(what, _numbers(), in_time(what, partial(_swap, mesh, _numbers()), advice), advice)
    numbers = np.resize(_numbers(), _timed_bytes(one) // BYTES_A_NUMBER)
    gb_s = in_time(what, partial(_rate_of_swap, mesh, numbers), advice)
    source, target = (one, other) if sends else (other, one)
    return Link(_key(source), _key(target), gb_s, "processes" if same_host else "machines")


def _numbers() -> np.ndarray:
    return np.arange(1, COUNT + 1, dtype=np.int32) % 1000 + 1


def _copy(source: jax.Device, target: jax.Device) -> np.ndarray:
    return np.asarray(jax.device_put(jax.device_put(_numbers(), source), target))


def _rate_of_copy(source: jax.Device, target: jax.Device) -> float:
    """Measure a copy, GB/s."""
    numbers = jax.block_until_ready(jax.device_put(np.zeros(_timed_bytes(source), np.uint8), source))
    return _rate(lambda: jax.device_put(numbers, target), numbers.nbytes)


def _swap(mesh: Mesh, numbers: np.ndarray) -> np.ndarray:
    """Return what arrives here of the numbers that the other device of a pair sends."""
    return np.asarray(_swapped(mesh)(_for_swap(mesh, numbers)).addressable_data(0))[0]


def _rate_of_swap(mesh: Mesh, numbers: np.ndarray) -> float:
    """Measure an exchange, GB/s in each direction, both at the same time."""
    given, swap = jax.block_until_ready(_for_swap(mesh, numbers)), _swapped(mesh)
    jax.block_until_ready(swap(given))  # which compiles it
    return _rate(lambda: swap(given), numbers.nbytes)


def _for_swap(mesh: Mesh, numbers: np.ndarray) -> jax.Array:
    return place(np.broadcast_to(numbers, (2, *numbers.shape)), NamedSharding(mesh, PartitionSpec("pair")))


@cache
def _swapped(mesh: Mesh) -> Callable[[jax.Array], jax.Array]:
    def swap(numbers: jax.Array) -> jax.Array:
        return jax.lax.ppermute(numbers, "pair", [(0, 1), (1, 0)])

    spec = PartitionSpec("pair")
    return jax.jit(jax.shard_map(swap, mesh=mesh, in_specs=spec, out_specs=spec))


def _rate(send: Callable[[], jax.Array], size: int) -> float:
    """Return the GB/s of the median of some repetitions."""
    seconds = []
    for _ in range(REPETITIONS):
        started = time.perf_counter()
        jax.block_until_ready(send())
        seconds.append(time.perf_counter() - started)
    return size / median(seconds) / 1e9


def _timed_bytes(device: jax.Device) -> int:
    return TIMED_BYTES_OF_CPU if device.platform == "cpu" else TIMED_BYTES


def _sum(mesh: Mesh, axis: str) -> dict[jax.Device, np.ndarray]:
    """The sum, as each device has it, of the numbers times 1, 2, 4 ... along `axis`."""
    terms = np.outer(2 ** np.arange(mesh.shape[axis], dtype=np.int32), _numbers())  # [devices, COUNT]
    spread = place(terms, NamedSharding(mesh, PartitionSpec(axis)))
    summed = jax.jit(
        jax.shard_map(
            lambda term: jax.lax.psum(term[0], axis), mesh=mesh, in_specs=PartitionSpec(axis), out_specs=PartitionSpec()
        )
    )(spread)
    return {shard.device: np.asarray(shard.data) for shard in summed.addressable_shards}


def _require(what: str, expected: np.ndarray, found: np.ndarray, advice: str) -> None:
    if wrong := np.flatnonzero(expected != found).tolist():
        raise UserError(
            f"{what}: {len(wrong):,} of {len(expected):,} numbers arrive wrong, the first as {found[wrong[0]]} in "
            f"place of {expected[wrong[0]]}\n{advice}"
        )


def _name(device: jax.Device) -> str:
    return f"{device.device_kind} {device.id}"


def _key(device: jax.Device) -> str:
    return f"{device.platform}:{device.id}"
