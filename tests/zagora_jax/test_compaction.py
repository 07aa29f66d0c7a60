"""Which arrays are moved together, so that a step finds its memory in one piece."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from zagora_jax import compaction
from zagora_jax.compaction import Block, compact, first_moved

MIB = 1 << 20
# 10 MiB, a gap of 5, 20 MiB, a gap of 2, 3 MiB.
SCATTERED = [Block(37 * MIB, 3 * MIB), Block(0, 10 * MIB), Block(15 * MIB, 20 * MIB)]


@pytest.mark.parametrize(
    ("free", "needed", "border"),
    [
        (20, 13, None),  # 20 - 5 - 2 lie in one piece
        (20, 14, 37),  # the topmost block, moved down, frees 2 more
        (20, 15, 37),
        (20, 16, 15),
        (20, 99, 15),  # cannot be: as much as there is
    ],
)
def test_the_fewest_blocks_above_a_gap_are_moved(free: int, needed: int, border: int | None) -> None:
    found = first_moved(SCATTERED, free * MIB, needed * MIB)
    assert found == (None if border is None else border * MIB)


def test_gaps_of_rounding_are_none() -> None:
    assert first_moved([Block(0, MIB), Block(MIB + 256, MIB)], free=0, needed=MIB) is None


def test_moved_arrays_keep_their_values_and_places(monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = {"a": jnp.arange(5.0), "b": jnp.ones((2, 3), jnp.uint8), "c": jnp.float32(7)}
    expected = jax.tree.map(np.asarray, arrays)
    lowest = min(array.unsafe_buffer_pointer() for array in arrays.values())
    monkeypatch.setattr(
        compaction, "first_moved", lambda _, free, needed: lowest if (free, needed) == (5, 70) else None
    )
    monkeypatch.setattr(compaction, "_stats", lambda device: {"bytes_limit": 10, "bytes_in_use": 5})
    moved = compact(arrays, {jax.devices()[0]: 100})
    assert all(array.is_deleted() for array in arrays.values())
    jax.tree.map(np.testing.assert_array_equal, moved, expected)
    assert moved["a"].sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])
