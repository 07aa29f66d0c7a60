"""What NVIDIA's driver says of each card, read through its management library (NVML)."""

import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from types import ModuleType
from typing import Any

import pynvml

GIB = 2**30
PCIE_UNIT = 1024 / 1e6  # NVML's KiB a second, in MB a second

# Why a card's clocks are below what they could be, by NVML's bit. An idle card and clocks that were set by somebody are
# no such reason.
THROTTLES = {
    pynvml.nvmlClocksEventReasonSwPowerCap: "power limit",
    pynvml.nvmlClocksEventReasonHwSlowdown: "hardware slowdown",
    pynvml.nvmlClocksEventReasonSwThermalSlowdown: "temperature (driver)",
    pynvml.nvmlClocksEventReasonHwThermalSlowdown: "temperature (hardware)",
    pynvml.nvmlClocksEventReasonHwPowerBrakeSlowdown: "power brake",
}
# Consumer cards run at it whenever they are busy: written down, but no reason to worry.
USUAL_THROTTLES = frozenset({"power limit"})


class NoCardsError(Exception):
    """There is no NVIDIA card to read, or no driver for it; says why."""


@dataclass(frozen=True)
class Card:
    """What stays the same of a card; None is what its driver does not tell.

    Attributes:
        index: as nvidia-smi counts.
        name: the product's.
        memory_gib: what it has.
        watts_limit: above which the driver slows it down.
        celsius_limit: above which the hardware does.
    """

    index: int
    name: str
    memory_gib: float | None
    watts_limit: float | None
    celsius_limit: float | None


@dataclass(frozen=True)
class CardReading:
    """A card at one moment, or over some readings; None is what its driver does not tell.

    Attributes:
        card: its index, as nvidia-smi counts.
        memory_gib: in use, by all processes.
        utilisation: percent of the time in which some kernel ran.
        celsius: of the GPU.
        watts: of the whole card.
        pcie_received_mb_s: MB (10^6) a second over PCIe to the card.
        pcie_sent_mb_s: the same from it.
        throttled_by: reasons why its clocks are lower than they could be, some of THROTTLES.
        error: what the driver said of a card that does not answer.
    """

    card: int
    memory_gib: float | None = None
    utilisation: float | None = None
    celsius: float | None = None
    watts: float | None = None
    pcie_received_mb_s: float | None = None
    pcie_sent_mb_s: float | None = None
    throttled_by: tuple[str, ...] = ()
    error: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what is known, rounded to what the sensors can tell."""
        known = {name: value for name, value in asdict(self).items() if value not in (None, ())}
        return {name: round(value, 2) if isinstance(value, float) else value for name, value in known.items()}


class Cards:
    """The cards of this machine that the environment lets this process see."""

    def __init__(self, nvml: ModuleType | Any = pynvml, *, all_cards: bool = False):
        """Connect to the driver.

        Args:
            nvml: NVML's Python interface.
            all_cards: whether CUDA_VISIBLE_DEVICES does not count.

        Raises:
            NoCardsError: no driver answers, or no card is there.
        """
        self._nvml = nvml
        try:
            nvml.nvmlInit()
            count = nvml.nvmlDeviceGetCount()
        except nvml.NVMLError as error:
            raise NoCardsError(f"no NVIDIA driver answers ({error})") from error
        handles = {index: self._open(index) for index in range(count)}
        kept = list(handles) if all_cards else self._visible(handles)
        self._handles = {index: handles[index] for index in kept}
        self.cards = tuple(self._describe(index, handle) for index, handle in self._handles.items())
        if not self.cards:
            raise NoCardsError("CUDA_VISIBLE_DEVICES hides all cards" if count else "the NVIDIA driver sees no card")

    def read(self) -> list[CardReading]:
        """Read every card; PCIe traffic alone takes 40 ms a card, over which the driver counts it."""
        return [self._read(index, handle) for index, handle in self._handles.items()]

    def _open(self, index: int) -> Any:
        """Return the driver's handle of a card, or what it says of one that it has lost."""
        try:
            return self._nvml.nvmlDeviceGetHandleByIndex(index)
        except self._nvml.NVMLError as error:
            return error

    def _visible(self, handles: dict[int, Any]) -> list[int]:
        """Return the indices of the cards that CUDA shows this process.

        CUDA counts cards by speed and NVML by slot. Where that may differ and cards are given by number, all are taken.
        """
        given = os.environ.get("CUDA_VISIBLE_DEVICES")
        if given is None:
            return list(handles)
        names = [name.strip() for name in given.split(",") if name.strip()]
        if all(name.isdecimal() for name in names):
            alike = len({self._ask(self._nvml.nvmlDeviceGetName, handle) for handle in handles.values()}) < 2
            in_order = alike or os.environ.get("CUDA_DEVICE_ORDER") == "PCI_BUS_ID"
            return [index for index in handles if not in_order or str(index) in names] if names else []
        identities = {index: str(self._ask(self._nvml.nvmlDeviceGetUUID, handle)) for index, handle in handles.items()}
        chosen = [index for index, uuid in identities.items() if any(uuid.startswith(name) for name in names)]
        return chosen or list(handles)  # parts of cards (MIG) have names of their own

    def _describe(self, index: int, handle: Any) -> Card:
        nvml = self._nvml
        memory = self._ask(nvml.nvmlDeviceGetMemoryInfo, handle)
        watts = self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)
        celsius = self._ask(nvml.nvmlDeviceGetTemperatureThreshold, handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN)
        return Card(
            index,
            str(self._ask(nvml.nvmlDeviceGetName, handle) or "unnamed card"),
            memory and memory.total / GIB,
            watts and watts / 1000,
            celsius and float(celsius),
        )

    def _read(self, index: int, handle: Any) -> CardReading:
        nvml, ask = self._nvml, self._ask
        try:
            if isinstance(handle, nvml.NVMLError):
                raise handle
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError as error:
            if error.value != pynvml.NVML_ERROR_NOT_SUPPORTED:  # as of a card that shares the host's memory
                return CardReading(index, error=str(error))
            memory = None
        utilisation = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
        watts = ask(nvml.nvmlDeviceGetPowerUsage, handle)
        received = ask(nvml.nvmlDeviceGetPcieThroughput, handle, nvml.NVML_PCIE_UTIL_RX_BYTES)
        sent = ask(nvml.nvmlDeviceGetPcieThroughput, handle, nvml.NVML_PCIE_UTIL_TX_BYTES)
        reasons = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
        if reasons is None:  # a driver before 535
            reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle) or 0
        return CardReading(
            index,
            memory and memory.used / GIB,
            None if utilisation is None else float(utilisation.gpu),
            _float(ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU)),
            None if watts is None else watts / 1000,
            None if received is None else received * PCIE_UNIT,
            None if sent is None else sent * PCIE_UNIT,
            tuple(name for bit, name in THROTTLES.items() if reasons & bit),
        )

    def _ask(self, question: Callable[..., Any], *arguments: Any) -> Any:
        """Return the driver's answer, None where it has none: few cards tell everything, and a lost one nothing."""
        try:
            return None if isinstance(arguments[0], self._nvml.NVMLError) else question(*arguments)
        except self._nvml.NVMLError:
            return None


def _float(value: Any) -> float | None:
    return None if value is None else float(value)


def summary(readings: list[CardReading]) -> CardReading:
    """Put readings of one card together: the mean of rates, the highest memory and temperature, every reason."""

    def known(name: str) -> list[float]:
        return [value for reading in readings if (value := getattr(reading, name)) is not None]

    def mean(name: str) -> float | None:
        values = known(name)
        return sum(values) / len(values) if values else None

    reasons = tuple(name for name in THROTTLES.values() if any(name in reading.throttled_by for reading in readings))
    return replace(
        readings[-1],
        memory_gib=max(known("memory_gib"), default=None),
        utilisation=mean("utilisation"),
        celsius=max(known("celsius"), default=None),
        watts=mean("watts"),
        pcie_received_mb_s=mean("pcie_received_mb_s"),
        pcie_sent_mb_s=mean("pcie_sent_mb_s"),
        throttled_by=reasons,
    )
