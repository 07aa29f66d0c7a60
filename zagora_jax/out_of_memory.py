"""What to say when a device's memory runs out: who needs it, who has it, and what takes less."""

from collections.abc import Iterator, Mapping

import jax

from zagora_jax.devices import memory_limit
from zagora_jax.reporting.cards import Cards, NoCardsError
from zagora_jax.reporting.sensors import GIB

MARK = "RESOURCE_EXHAUSTED"  # absl's status, which XLA's messages begin with or hold


def out_of_memory(
    error: BaseException, planned: Mapping[jax.Device, int] | None = None, takes_less: str = ""
) -> str | None:
    """Say what a user can do about `error`; None where it is of another kind.

    Args:
        error: what XLA raised, when it allocated memory or opened the devices.
        planned: bytes that the compiled step needs of each device, where that is known.
        takes_less: options with which less is needed.
    """
    if MARK not in str(error):
        return None
    first = str(error).strip().splitlines()[0].rstrip(".")
    account = "".join(f"{line}; " for line in (*_of_allocators(planned or {}), *_of_cards()))
    advice = f". {takes_less}" if takes_less else ""
    return f"the memory of a device ran out: {first:.300}; {account}end what else uses it, or take less{advice}"


def _of_allocators(planned: Mapping[jax.Device, int]) -> Iterator[str]:
    try:
        devices = jax.local_devices()
    except RuntimeError:  # they could not even be opened
        return
    for device in devices:
        name, limit = f"{device.device_kind} {device.id}", memory_limit(device)
        if device in planned:
            yield f"{name}: the step needs {planned[device] / GIB:.2f} GiB"
        if limit is not None:
            used = (device.memory_stats() or {}).get("bytes_in_use", 0)
            yield f"{name}: {used / GIB:.2f} GiB in use of {limit / GIB:.2f} that this process may take"


def _of_cards() -> Iterator[str]:
    """What the driver says, which counts all processes."""
    try:
        cards = Cards()
    except NoCardsError:
        return
    for card, reading in zip(cards.cards, cards.read(), strict=True):
        if reading.memory_gib is not None and card.memory_gib is not None:
            free = card.memory_gib - reading.memory_gib
            yield f"card {card.index} ({card.name}): {free:.2f} of {card.memory_gib:.2f} GiB are free"
