"""NVML as tests want it: cards whose sensors say what a test has set, and a driver that can be away."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pynvml


@dataclass
class FakeCard:
    """A card's sensors; None is what its driver does not support."""

    name: str = "NVIDIA GeForce RTX 4090"
    uuid: str = "GPU-0"
    used: int | None = 20 * 2**30
    total: int = 24 * 2**30
    utilisation: int | None = 97
    celsius: int | None = 65
    milliwatts: int | None = 430_000
    received_kib_s: int | None = 1_000_000
    sent_kib_s: int | None = 500_000
    reasons: int | None = 0
    lost: bool = False
    gone: bool = False  # from the beginning


@dataclass
class FakeNvml:
    """Stands for the module pynvml."""

    cards: list[FakeCard] = field(default_factory=lambda: [FakeCard()])
    driver: bool = True
    old_driver: bool = False  # which knows reasons for throttling by their former name
    reads: int = 0

    NVMLError = pynvml.NVMLError
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU
    NVML_TEMPERATURE_THRESHOLD_SLOWDOWN = pynvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
    NVML_PCIE_UTIL_TX_BYTES = pynvml.NVML_PCIE_UTIL_TX_BYTES
    NVML_PCIE_UTIL_RX_BYTES = pynvml.NVML_PCIE_UTIL_RX_BYTES

    def nvmlInit(self):  # noqa: N802
        if not self.driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if self.cards[index].gone:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return self.cards[index]

    def nvmlDeviceGetName(self, card):  # noqa: N802
        return card.name

    def nvmlDeviceGetUUID(self, card):  # noqa: N802
        return card.uuid

    def nvmlDeviceGetMemoryInfo(self, card):  # noqa: N802
        self.reads += 1
        if card.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return _supported(card.used and SimpleNamespace(used=card.used, total=card.total))

    def nvmlDeviceGetEnforcedPowerLimit(self, card):  # noqa: N802
        return _supported(card.milliwatts and 450_000)

    def nvmlDeviceGetTemperatureThreshold(self, card, kind):  # noqa: N802
        assert kind == self.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN
        return _supported(card.celsius and 94)

    def nvmlDeviceGetUtilizationRates(self, card):  # noqa: N802
        return SimpleNamespace(gpu=_supported(card.utilisation))

    def nvmlDeviceGetPowerUsage(self, card):  # noqa: N802
        return _supported(card.milliwatts)

    def nvmlDeviceGetPcieThroughput(self, card, counter):  # noqa: N802
        return _supported(card.received_kib_s if counter == self.NVML_PCIE_UTIL_RX_BYTES else card.sent_kib_s)

    def nvmlDeviceGetTemperature(self, card, sensor):  # noqa: N802
        assert sensor == self.NVML_TEMPERATURE_GPU
        return _supported(card.celsius)

    def nvmlDeviceGetCurrentClocksEventReasons(self, card):  # noqa: N802
        if self.old_driver:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return _supported(card.reasons)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, card):  # noqa: N802
        return _supported(card.reasons)


def _supported(value):
    if value is None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return value
